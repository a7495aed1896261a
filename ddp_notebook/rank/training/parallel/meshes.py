"""Which ranks of a mesh have the same part of a tensor, and which have other parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ddp_notebook import model
from ddp_notebook.model import Ranks


class Row(NamedTuple):
    """The ranks of a mesh that differ from this one in one dimension alone, and its name."""

    ranks: Ranks
    dimension: str
    sharded: bool
    """True if these ranks have other parts of the tensor."""


def along(mesh: Any, free: Sequence[bool]) -> Ranks:
    """The ranks that differ from this one in no dimension but those that are `free`."""
    place = mesh.get_coordinate()
    if place is None:
        return ()
    index = tuple(slice(None) if any_at else at for any_at, at in zip(free, place, strict=True))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def is_placed(tensor: Any) -> bool:
    """True of a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def replicated_over(mesh: Any, placements: Iterable[Any]) -> Ranks:
    """The ranks with the same part of a tensor as this one."""
    return along(mesh, [placement.is_replicate() for placement in placements])


def rows(tensor: Any) -> Iterator[Row]:
    """The rows of a DTensor's mesh that this rank is in, of two ranks or more."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for at, placement in enumerate(tensor.placements):
        ranks = along(mesh, [at == other for other in range(mesh.ndim)])
        if len(ranks) > 1:
            yield Row(ranks, str(names[at]), not placement.is_replicate())


def part_of(tensor: Any) -> tuple[int, int]:
    """Which part of a DTensor this rank has, and of how many."""
    mesh, part, parts = tensor.device_mesh, 0, 1
    place = mesh.get_coordinate()
    for at, placement in enumerate(tensor.placements):
        if place is not None and not placement.is_replicate():
            size = int(mesh.size(at))
            part, parts = part * size + place[at], parts * size
    return part, parts


def _memory(tensor: Any) -> int:
    """The address of its memory, which a tensor and its views share."""
    return int(tensor.untyped_storage().data_ptr())


def shards_in(named: Iterable[tuple[str, Any]], owners: Iterable[Any]) -> model.Shards | None:
    """The parts of tensors among these; None where all are whole.

    Also those that were taken out of one of `owners`, which are DTensors, with to_local().
    """
    placed = [owner for owner in owners if is_placed(owner) and owner.to_local().numel()]
    of_owner = {_memory(each.to_local()): each for each in placed}
    whole = ((name, e if is_placed(e) else of_owner.get(_memory(e))) for name, e in named)
    found = [(name, e) for name, e in whole if e is not None and part_of(e)[1] > 1]
    if not found:
        return None
    name, first = found[0]
    ranks = tuple(sorted(first.device_mesh.mesh.flatten().tolist()))
    return model.Shards(name, len(found), ranks, *part_of(first))
