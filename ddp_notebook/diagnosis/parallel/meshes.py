"""Where each rank is in the mesh: its coordinate in every dimension, by the groups made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ddp_notebook.model import Case, GroupMade, Ranks

_TERM = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)(?:-(\d+))?\s*")


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
                raise ValueError(f"{text!r} is no place in the mesh: write {names[0]}=0.")
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
    dimensions: dict[str, dict[int, tuple[int, int]]] = {}
    count = 1
    for name, places in of_name.items():
        sizes = {size for _, size in places.values()}
        covers = len(places) == len(ranks) and len(sizes) == 1
        if covers and (count < len(ranks) or sizes == {1}):
            dimensions[name] = places
            count *= max(sizes)
    return _mesh(ranks, dimensions)


def _mesh(ranks: Ranks, dimensions: Mapping[str, Mapping[int, tuple[int, int]]]) -> Mesh | None:
    shape = tuple((name, places[0][1]) for name, places in dimensions.items() if 0 in places)
    coordinates = {
        rank: tuple(places[member][0] for places in dimensions.values())
        for member, rank in enumerate(ranks)
        if all(member in places for places in dimensions.values())
    }
    whole = len(set(coordinates.values())) == len(ranks) == prod(size for _, size in shape)
    return Mesh(shape, coordinates) if whole and shape else None
