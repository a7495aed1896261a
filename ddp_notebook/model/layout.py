"""What each rank holds of each parameter, and where each rank is in the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of a model as one rank holds it.

    `placements` has one for each of `dimensions`, the mesh's, whose ranks are `mesh` in its order;
    a plain tensor has none. `bytes` are those on this rank, `whole_bytes` those of all of it.
    """

    model: str
    """The user's variable, or the class of the module."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    whole_bytes: int
    placements: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh: Ranks = ()
    wrapper: str = ""
    """FSDP2 or DDP; empty for neither."""
    gathers: tuple[str, ...] = ()
    """Where FSDP2 gathers it: forward, backward."""
    group: Ranks = ()
    """The ranks that gather it together, or of DDP those that reduce its gradient."""


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """All that a rank holds; `left_out` are those beyond the first ones."""

    parameters: tuple[HeldParameter, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter that some ranks hold identically except for `bytes`: ranks, and bytes on each."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    ranks: Ranks
    bytes: tuple[tuple[Ranks, int], ...]
    whole_bytes: int
    gathers: tuple[str, ...] = ()
    over: str = ""
    """The mesh dimension, or the ranks, that gather it or reduce its gradient."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model and its parameters, in the order in which it has them."""

    name: str
    parameters: tuple[Placed, ...]


@dataclass(frozen=True)
class MeshLayout:
    """The mesh, and what ranks hold of each model.

    `coordinates` are in the order of `dimensions`; both are empty where there is no mesh.
    """

    world_size: int
    dimensions: tuple[tuple[str, int], ...] = ()
    coordinates: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    models: tuple[ModelLayout, ...] = ()
    bytes: Mapping[int, int] = field(default_factory=dict)
    """Of all parameters, by rank."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values: ranks as lists, mappings by rank."""
        return asdict(self)
