"""Rules for models that FSDP2 shards: ranks that wrap them, or reduce gradients, in another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.model import Category, Finding, Ranks, ShardedUnit, by_value, name_ranks

_Model = Mapping[str, ShardedUnit]
_MOST_NAMED = 4


def other_wrapping(context: Context) -> Iterator[Finding]:
    """Ranks with parts of one model that gave other modules, or arguments, to fully_shard."""
    for of_rank in _models(context):
        for what, says in _DIFFERENCES:
            values = {rank: says(units) for rank, units in of_rank.items()}
            if len(set(values.values())) > 1:
                yield _wrapped(context, what, values)
                return


def _wrapped(context: Context, what: str, values: Mapping[int, tuple[str, ...]]) -> Finding:
    culprits = outvoted(values)
    sides = sorted(by_value(values), key=lambda side: len(side[0]))
    facts = _uncommon(values)
    said = "; ".join(f"{name_ranks(ranks)}: {facts[ranks[0]]}" for ranks, _ in sides)
    return Finding(
        Category.SHARDING_MISMATCH,
        culprits,
        f"the ranks shard one model in another way, {what}: {said}",
        "Call fully_shard on the same modules, with the same arguments, on every rank.",
        context.victims,
        by_ranks({rank: f"{what}: {_some(value)}" for rank, value in values.items()}),
    )


def _some(values: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
    return ", ".join(values[:_MOST_NAMED]) + more if values else "no others"


def _name(unit: ShardedUnit) -> str:
    return unit.name or "the root"


def _names(units: _Model) -> tuple[str, ...]:
    return tuple(sorted(f"{_name(u)} ({u.parameters:,} parameters)" for u in units.values()))


def _reshards(units: _Model) -> tuple[str, ...]:
    return tuple(f"{_name(unit)} {'is' if unit.reshards else 'is not'}" for unit in units.values())


_DIFFERENCES = (
    ("units and their sizes", _names),
    ("freed after forward (reshard_after_forward)", _reshards),
)


def other_frozen(context: Context) -> Iterator[Finding]:
    """Ranks that train other parameters of one model: who trains none of a unit reduces nothing.

    Only where a rank reduces what another does not. Where all of a model is frozen on a rank, that
    may be for a while: a GAN trains its parts in turns.
    """
    if not any(_reduces(context)):
        return
    for of_rank in _models(context):
        values = {
            rank: tuple(f"{u.trained or 'no'} parameters of {_name(u)}" for u in units.values())
            for rank, units in of_rank.items()
        }
        some = all(any(u.trained for u in units.values()) for units in of_rank.values())
        if not some or len(set(values.values())) < 2:
            continue
        facts = _uncommon(values)
        sides = sorted(by_value(facts), key=lambda side: len(side[0]))
        yield Finding(
            Category.PARAM_MISMATCH,
            outvoted(values),
            "the ranks train other parameters of one model, so they do not reduce the same "
            f"gradients: {'; '.join(f'{name_ranks(ranks)}: {fact}' for ranks, fact in sides)}",
            "Freeze and unfreeze (requires_grad) the same parameters on every rank, before "
            "fully_shard.",
            context.victims,
            by_ranks({rank: f"trains {_some(value)}" for rank, value in values.items()}),
        )
        return


def _uncommon(values: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    common = set.intersection(*(set(value) for value in values.values()))
    return {
        rank: _some([each for each in value if each not in common])
        for rank, value in values.items()
    }


def _reduces(context: Context) -> Iterator[bool]:
    """For each divergence, whether a side reduces gradients of sharded parameters there."""
    for divergence in context.divergences:
        for here in (divergence.own.here, divergence.other.here):
            yield here is not None and "reduce_scatter" in here.operation


def _models(context: Context) -> Iterator[dict[int, _Model]]:
    """Models that several ranks shard among each other: the units of each rank, by name.

    Stages of a pipeline have other modules, and other ranks.
    """
    by_rank = {e.rank: e.parts.sharded for e in context.case.ranks if e.parts.sharded}
    numbers = sorted({unit.model for units in by_rank.values() for unit in units})
    ranks = tuple(e.rank for e in context.case.ranks)
    for number in numbers:
        of_mesh: dict[Ranks, dict[int, _Model]] = {}
        for rank, units in by_rank.items():
            mine = {unit.name: unit for unit in units if unit.model == number}
            mesh = _ranks_of(list(mine.values()))
            if mine and mesh[-1] < len(ranks):
                of_mesh.setdefault(mesh, {})[rank] = mine
        yield from (of_rank for of_rank in of_mesh.values() if len(of_rank) > 1)


def _ranks_of(units: Sequence[ShardedUnit]) -> Ranks:
    """The ranks that have parts of them: mostly one mesh for all, of many ranks."""
    meshes = [unit.mesh for unit in units]
    if all(mesh == meshes[0] for mesh in meshes):
        return tuple(sorted(meshes[0])) if meshes else ()
    return tuple(sorted({member for mesh in meshes for member in mesh}))
