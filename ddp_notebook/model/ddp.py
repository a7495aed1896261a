"""DDP's construction as values: stages, fingerprints of models, buckets; and what ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ddp_notebook.model.ranks import Ranks

_DOCS = "https://docs.pytorch.org/docs/stable"


class WrapStage(StrEnum):
    """One step of what `DistributedDataParallel(model)` does, in order. The value is typed."""

    PARAMETERS_VERIFIED = "parameters-verified"
    BROADCAST = "broadcast"
    BUCKETS = "buckets"
    REDUCER = "reducer"

    @property
    def number(self) -> int:
        """1 for the first stage."""
        return list(WrapStage).index(self) + 1

    @property
    def about(self) -> str:
        """Return what happens in this stage and why, in one line."""
        return _ABOUT[self]

    @property
    def link(self) -> str:
        """Where torch's documentation says more."""
        return _LINKS[self]

    @property
    def collective(self) -> bool:
        """True if ranks wait for each other in it: one that fails leaves the others waiting."""
        return self in (WrapStage.PARAMETERS_VERIFIED, WrapStage.BROADCAST)


_ABOUT = {
    WrapStage.PARAMETERS_VERIFIED: (
        "Every rank must have the same parameters and buffers in the same order: what DDP sends "
        "is values, told apart by their place alone."
    ),
    WrapStage.BROADCAST: (
        "Rank 0 sends its parameters and buffers to the others: all replicas begin with the "
        "same values."
    ),
    WrapStage.BUCKETS: (
        "Parameters are put into buckets: one all_reduce for each, as soon as its last gradient "
        "is ready, while backward goes on."
    ),
    WrapStage.REDUCER: (
        "The DistributedDataParallel object is made: its reducer hooks every parameter, counts "
        "gradients in and sends the buckets that are full."
    ),
}
_LINKS = {
    WrapStage.PARAMETERS_VERIFIED: (
        f"{_DOCS}/generated/torch.nn.parallel.DistributedDataParallel.html"
    ),
    WrapStage.BROADCAST: f"{_DOCS}/distributed.html#torch.distributed.broadcast",
    WrapStage.BUCKETS: f"{_DOCS}/notes/ddp.html#internal-design",
    WrapStage.REDUCER: f"{_DOCS}/notes/ddp.html#implementation",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter or a buffer without its values. `dtype` as torch writes it: ``float32``.

    `stride` is empty where it does not matter: DDP compares that of parameters which require
    a gradient. `device` is the kind of device, without its index: each rank has its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    stride: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A rank's parameters and buffers, in the order in which DDP traverses them."""

    parameters: tuple[TensorInfo, ...] = ()
    buffers: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Synced:
    """The broadcast as one rank saw it: hashes of its tensors before and after.

    In the order of the fingerprint, parameters first. An empty hash: the values of this
    tensor cannot be read.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    size_bytes: int

    @property
    def changed(self) -> tuple[int, ...]:
        """The indices of the tensors whose values the broadcast changed."""
        pairs = enumerate(zip(self.before, self.after, strict=True))
        return tuple(place for place, (before, after) in pairs if before != after)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients travel in one all_reduce."""

    parameters: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The buckets before any gradient was seen. `limits_bytes`: of the first, of the others.

    `first` are those of the first step. `later` are those expected from the second on, if gradients
    become ready in the reverse order of the parameters; None when DDP keeps the first ones.
    """

    first: tuple[Bucket, ...]
    later: tuple[Bucket, ...] | None
    limits_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """The state of a DDP object after some steps.

    `steps` counts forwards whose gradients were to be reduced; after the first ten DDP notes
    only some of them. `order` is the order in which gradients became ready in the last step
    noted; empty before the first backward. `buckets` are the rebuilt ones, or what they will
    be when the next step begins (`rebuilt` False), or, when DDP `keeps` its first ones,
    those; None when it is not known. `idle` are parameters that got no gradient.
    """

    steps: int
    order: tuple[str, ...]
    buckets: tuple[Bucket, ...] | None
    rebuilt: bool
    keeps: bool = False
    idle: tuple[str, ...] = ()


STOPPED = "stopped"
"""True for a rank whose process is stopped (SIGSTOP)."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank did not pass a stage. `kind`: memory, error, interrupted, or `STOPPED`."""

    kind: str
    text: str


# -- what ranks hold -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of a model as one rank holds it.

    `placements` has one for each of `dimensions`, the mesh's, whose ranks are `mesh` in its order;
    empty for a plain tensor. `bytes` are those on this rank, `whole_bytes` those of all of it.
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
