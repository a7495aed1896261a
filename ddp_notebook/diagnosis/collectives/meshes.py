"""The mesh: where each rank is in it, by the groups made, and what it holds there, arranged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product

from ddp_notebook.model import Case, GroupMade, Ranks, name_ranks
from ddp_notebook.model.ddp import HeldParameter, HeldParameters, MeshLayout, ModelLayout, Placed

_TERM = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)(?:-(\d+))?\s*")
_COPY_OF_DDP = "Replicate (DDP)"
_OWN_TENSOR = "whole, a tensor of the rank's own"
_UNNAMED = "rank"
"""The name shown for the only dimension of a mesh without names."""


@dataclass(frozen=True)
class Mesh:
    """Ranks by coordinates. `dimensions` are names and sizes, in the order in which they were made.

    A rank that is in no group of a dimension is not in `coordinates`.
    """

    dimensions: tuple[tuple[str, int], ...]
    coordinates: Mapping[int, tuple[int, ...]]

    @property
    def shape(self) -> str:
        """``dp[4] x tp[2]``."""
        return " x ".join(f"{name}[{size}]" for name, size in self.dimensions)

    def of(self, rank: int) -> str:
        """``dp=1, tp=0``; empty for a rank that is not in the mesh."""
        place = self.coordinates.get(rank)
        if place is None:
            return ""
        return ", ".join(
            f"{name}={at}" for (name, _), at in zip(self.dimensions, place, strict=True)
        )

    def ranks(self, text: str) -> Ranks:
        """The ranks at ``dp=0`` or ``dp=0-1,tp=1``. Raises ValueError, with words for the user."""
        chosen = set(self.coordinates)
        names = [name for name, _ in self.dimensions]
        for term in text.split(","):
            match = _TERM.fullmatch(term)
            if match is None:
                raise ValueError(
                    f"Expected a place in the mesh such as {names[0]}=0, got {text!r}."
                )
            if match[1] not in names:
                raise ValueError(f"The mesh has no dimension {match[1]!r}: it is {self.shape}.")
            at, first, last = names.index(match[1]), int(match[2]), int(match[3] or match[2])
            size = self.dimensions[at][1]
            if last < first or last >= size:
                raise ValueError(f"{term.strip()!r}: {match[1]} is 0 to {size - 1} ({self.shape}).")
            chosen &= {r for r, place in self.coordinates.items() if first <= place[at] <= last}
        if not chosen:
            raise ValueError(f"No rank is at {text!r} in {self.shape}.")
        return tuple(sorted(chosen))

    def lines(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """``rank 3 is dp=1, tp=1 of dp[2] x tp[2]``, a line for each of these ranks."""
        return tuple(
            f"rank {rank} is {self.of(rank)} of {self.shape}" for rank in ranks if self.of(rank)
        )


def mesh_of(case: Case) -> Mesh | None:
    """The mesh that groups with names make, as a rank made them for all; None for none.

    In each dimension every rank is in one group, and no two ranks are at one place. Dimensions
    that are made of others (`_flatten`), and further meshes, come after those of the first one.
    """
    ranks = tuple(e.rank for e in case.ranks)
    made = next((e.groups_made for e in case.ranks if any(g.called for g in e.groups_made)), ())
    of_meshes = [group for group in made if group.of_mesh]
    return _made_by(ranks, of_meshes) or _made_by(ranks, made)


def _made_by(ranks: Ranks, made: Iterable[GroupMade]) -> Mesh | None:
    of_name: dict[str, dict[int, tuple[int, int]]] = {}
    for group in made:
        if group.called:  # of a mesh that was made twice, the last
            places = of_name.setdefault(group.called, {})
            places.update({m: (at, len(group.members)) for at, m in enumerate(group.members)})
    shape: list[tuple[str, int]] = []
    axes: list[dict[int, tuple[int, int]]] = []
    count = 1
    for name, places in of_name.items():
        sizes = {size for _, size in places.values()}
        covers = places.keys() == set(range(len(ranks))) and len(sizes) == 1
        if covers and (count < len(ranks) or sizes == {1}):
            shape.append((name, max(sizes)))
            axes.append(places)
            count *= max(sizes)
    coordinates = {
        rank: tuple(places[member][0] for places in axes) for member, rank in enumerate(ranks)
    }
    whole = len(set(coordinates.values())) == len(ranks) == count
    return Mesh(tuple(shape), coordinates) if whole and shape else None


def arranged(
    mesh: Mesh | None,
    of_rank: Mapping[int, HeldParameters],
    world_size: int,
    notes: Iterable[str] = (),
) -> MeshLayout:
    """The layout of what ranks hold, by rank; `mesh` as they made it, None where not known."""
    held = {rank: of.parameters for rank, of in of_rank.items()}
    mesh = mesh or mesh_of_parameters(held) or Mesh((), {})
    models: dict[str, dict[str, dict[int, HeldParameter]]] = {}
    sizes = dict.fromkeys(of_rank, 0)
    for rank, parameters in sorted(held.items()):
        for parameter in parameters:
            of_name = models.setdefault(parameter.model, {}).setdefault(parameter.name, {})
            of_name.setdefault(rank, parameter)
            sizes[rank] += parameter.bytes
    cut = [rank for rank, of in of_rank.items() if of.left_out]
    more = [f"{name_ranks(cut)}: more parameters than can be shown"] if cut else []
    return MeshLayout(
        world_size,
        mesh.dimensions,
        mesh.coordinates,
        tuple(ModelLayout(name, tuple(_rows(of, mesh))) for name, of in models.items()),
        sizes,
        tuple(filter(None, (*notes, *more))),
    )


def mesh_of_parameters(held: Mapping[int, tuple[HeldParameter, ...]]) -> Mesh | None:
    """The largest mesh that parameters are placed on: that of FSDP2 alone makes no group."""
    placed = [
        parameter for parameters in held.values() for parameter in parameters if parameter.mesh
    ]
    largest = max(placed, key=lambda each: (len(each.mesh), len(each.mesh_shape)), default=None)
    if largest is None:
        return None
    shape = largest.mesh_shape
    unnamed = (_UNNAMED,) if len(shape) == 1 else tuple(f"dim{at}" for at in range(len(shape)))
    names = largest.dimensions or unnamed
    places = product(*(range(size) for size in shape))
    return Mesh(tuple(zip(names, shape, strict=True)), dict(zip(largest.mesh, places, strict=True)))


def _rows(parameters: Mapping[str, Mapping[int, HeldParameter]], mesh: Mesh) -> Iterator[Placed]:
    """Yield each parameter as ranks hold it: once where all hold the same."""
    for name, of in parameters.items():
        sizes: dict[Placed, dict[int, list[int]]] = {}
        for rank, held in of.items():
            # ``dp: Shard(dim=0), tp: Replicate``; of a plain tensor, whose copy it is.
            where = list(held.placements)
            if not where:
                where = [_COPY_OF_DDP if held.wrapper == "DDP" else _OWN_TENSOR]
            elif len(held.dimensions) == len(where):
                where = [*map(": ".join, zip(held.dimensions, where, strict=True))]
            row = Placed(
                name,
                held.shape,
                held.dtype,
                ", ".join(where),
                (),
                (),
                held.whole_bytes,
                held.gathers,
                _over(held.group, mesh),
            )
            sizes.setdefault(row, {}).setdefault(held.bytes, []).append(rank)
        for row, having in sizes.items():
            yield replace(
                row,
                ranks=tuple(sorted(chain(*having.values()))),
                bytes=tuple((tuple(ranks), size) for size, ranks in having.items()),
            )


def _over(group: Ranks, mesh: Mesh) -> str:
    """The dimension in which the members of a group differ; else the ranks."""
    if len(group) < 2:
        return ""
    places = [mesh.coordinates.get(rank, ()) for rank in group]
    values = [len(set(along)) for along in zip(*places, strict=False)]
    apart = [at for at, count in enumerate(values) if count > 1]
    if len(apart) != 1 or values[apart[0]] != mesh.dimensions[apart[0]][1]:
        return name_ranks(group)
    name = mesh.dimensions[apart[0]][0]
    return name if name != _UNNAMED else "all ranks"
