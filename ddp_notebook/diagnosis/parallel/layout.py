"""What the ranks hold, arranged: the mesh, and each parameter's placement and bytes per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from ddp_notebook.diagnosis.parallel.meshes import Mesh
from ddp_notebook.model import Ranks, name_ranks
from ddp_notebook.model.ddp import (
    HeldParameter,
    HeldParameters,
    MeshLayout,
    ModelLayout,
    Placed,
)

_UNNAMED = "rank"
"""The name shown for the only dimension of a mesh without names."""


def arranged(
    mesh: Mesh | None,
    of_rank: Mapping[int, HeldParameters],
    world_size: int,
    notes: Iterable[str] = (),
) -> MeshLayout:
    """The layout of what ranks hold, by rank; `mesh` as they made it, None where not known."""
    held = {rank: held_parameters.parameters for rank, held_parameters in of_rank.items()}
    mesh = mesh or mesh_of_parameters(held)
    cut = {
        rank: held_parameters.left_out
        for rank, held_parameters in of_rank.items()
        if held_parameters.left_out
    }
    more = [f"{name_ranks(cut)}: more parameters than can be shown" if cut else ""]
    return MeshLayout(
        world_size,
        mesh.dimensions if mesh is not None else (),
        mesh.coordinates if mesh is not None else {},
        tuple(_models(held, mesh)),
        {
            rank: sum(parameter.bytes for parameter in parameters)
            for rank, parameters in held.items()
        },
        tuple(filter(None, (*notes, *more))),
    )


def _models(
    held: Mapping[int, tuple[HeldParameter, ...]], mesh: Mesh | None
) -> Iterator[ModelLayout]:
    by_model: dict[str, dict[str, dict[int, HeldParameter]]] = {}
    for rank, parameters in sorted(held.items()):
        for parameter in parameters:
            of_model = by_model.setdefault(parameter.model, {})
            of_model.setdefault(parameter.name, {}).setdefault(rank, parameter)
    for model, of in by_model.items():
        yield ModelLayout(model, tuple(row for name in of for row in _rows(name, of[name], mesh)))


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


def _rows(name: str, of: Mapping[int, HeldParameter], mesh: Mesh | None) -> list[Placed]:
    """A parameter as ranks hold it: once where all hold the same."""
    by_holding: dict[tuple[object, ...], list[int]] = {}
    for rank, parameter in of.items():
        key = (
            parameter.shape,
            parameter.dtype,
            _placement(parameter),
            parameter.gathers,
            _over(parameter.group, mesh),
        )
        by_holding.setdefault(key, []).append(rank)
    rows = []
    for ranks in by_holding.values():
        sizes: dict[int, list[int]] = {}
        for rank in ranks:
            sizes.setdefault(of[rank].bytes, []).append(rank)
        first = of[ranks[0]]
        rows.append(
            Placed(
                name,
                first.shape,
                first.dtype,
                _placement(first),
                tuple(ranks),
                tuple((tuple(having), size) for size, having in sizes.items()),
                first.whole_bytes,
                first.gathers,
                _over(first.group, mesh),
            )
        )
    return rows


def _placement(each: HeldParameter) -> str:
    """``dp: Shard(dim=0), tp: Replicate``; of a plain tensor, whose copy it is."""
    if not each.placements:
        return "Replicate (DDP)" if each.wrapper == "DDP" else "whole, a tensor of the rank's own"
    if len(each.dimensions) != len(each.placements):
        return ", ".join(each.placements)
    return ", ".join(
        f"{name}: {place}" for name, place in zip(each.dimensions, each.placements, strict=True)
    )


def _over(group: Ranks, mesh: Mesh | None) -> str:
    """The dimension in which the members of a group differ; else the ranks."""
    if len(group) < 2:
        return ""
    places = [mesh.coordinates.get(rank, ()) for rank in group] if mesh is not None else []
    values = [len(set(along)) for along in zip(*places, strict=False)]
    apart = [at for at, count in enumerate(values) if count > 1]
    if mesh is None or len(apart) != 1 or values[apart[0]] != mesh.dimensions[apart[0]][1]:
        return name_ranks(group)
    name = mesh.dimensions[apart[0]][0]
    return name if name != _UNNAMED else "all ranks"
