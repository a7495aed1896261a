"""Rules for ranks that share one model or its data: splits of all_to_all, FSDP2, pipelines.

In each, ranks hold parts that must fit together, and torch does not compare them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import CallSite, call_site
from ddp_notebook.diagnosis.collectives.describe import side
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, minority, outvoted
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    PipelinePart,
    Ranks,
    ShardedUnit,
    Splits,
    by_value,
    name_ranks,
    verb,
)

_REMEDY = (
    "Exchange the counts with all_to_all_single after everything that changes them (capacity, "
    "dropped tokens), and use these very counts as splits on both sides."
)


@dataclass(frozen=True)
class _Disagreement:
    """What `sender` sends to `receiver`, and what that expects; both ranks of the session."""

    sender: int
    receiver: int
    sends: int
    expects: int


def split_mismatch(context: Context) -> Iterator[Finding]:
    """Two ranks of one all_to_all that do not agree how much goes from one to the other.

    Only at one line: what ranks send each other at two lines was not meant to meet, and one of them
    may be in its next forward already.
    """
    of_calls: dict[tuple[str, int, CallSite | None], dict[int, Splits]] = {}
    records: dict[int, Collective | None] = {}
    for report in context.case.ranks:
        splits = report.splits
        if splits is not None:
            record = records[report.rank] = _record(context, report.rank, splits)
            site = call_site(record) if record is not None else None
            of_calls.setdefault((splits.group, splits.slot, site), {})[report.rank] = splits
    for (group, _, _), of_ranks in of_calls.items():
        members = wait_graph.members(context.case, group)
        there = _in_one_unit(of_ranks)
        wrong = _disagreements(there, members)
        if wrong:
            record = next((records[rank] for rank in there if records[rank]), None)
            yield _finding(context, wrong, there, members, record)
            return


def _in_one_unit(there: Mapping[int, Splits]) -> Mapping[int, Splits]:
    """In rows where those are as long on all ranks; in elements where they are not."""
    # torch counts rows, and what goes over the wire are elements. Rows are what the user wrote, so
    # they are kept where they say the same; where rows are of other lengths, only elements can be
    # compared.
    if len({width for splits in there.values() for width in splits.widths}) == 1:
        return there
    return {
        rank: replace(
            splits,
            sends=tuple(rows * splits.widths[0] for rows in splits.sends),
            receives=tuple(rows * splits.widths[1] for rows in splits.receives),
            announced=(),
            widths=(1, 1),
        )
        for rank, splits in there.items()
    }


def _disagreements(there: Mapping[int, Splits], members: Ranks) -> list[_Disagreement]:
    index = {rank: at for at, rank in enumerate(members)}
    whole = {
        rank: splits
        for rank, splits in there.items()
        if rank in index and len(splits.sends) == len(splits.receives) == len(members)
    }
    return [
        _Disagreement(sender, receiver, sends, expects)
        for sender, mine in whole.items()
        for receiver, theirs in whole.items()
        if (sends := mine.sends[index[receiver]]) != (expects := theirs.receives[index[sender]])
    ]


def _record(context: Context, rank: int, splits: Splits) -> Collective | None:
    records = reversed(context.collectives.of.get(rank, ()))
    at_slot = (r for r in records if (r.group, r.slot) == (splits.group, splits.slot))
    return next((record for record in at_slot if "all_to_all" in record.operation), None)


def _finding(
    context: Context,
    wrong: list[_Disagreement],
    there: Mapping[int, Splits],
    members: Ranks,
    record: Collective | None,
) -> Finding:
    culprits, why = _whose(wrong, there, members)
    first = next(
        (disagreement for disagreement in wrong if disagreement.sender in culprits), wrong[0]
    )
    place = f" at {record.place}" if record is not None and record.place else ""
    brought = {
        rank: f"sends {list(splits.sends)}, expects {list(splits.receives)}"
        + (f"; announced {list(splits.announced)} before" if splits.announced else "")
        for rank, splits in there.items()
    }
    return Finding(
        Category.SPLIT_MISMATCH,
        culprits,
        f"rank {first.sender} sends {first.sends} to rank {first.receiver}, which expects "
        f"{first.expects}, in all_to_all{place}{why}",
        _REMEDY,
        context.victims,
        by_ranks(brought),
        sides=(side(tuple(there), record),) if record is not None else (),
    )


def _whose(
    wrong: list[_Disagreement], there: Mapping[int, Splits], members: Ranks
) -> tuple[Ranks, str]:
    """The ranks whose numbers are wrong, and the reason; all ranks if unknown."""
    # One number too large is as wrong as the other one is too small, so a pair alone does not tell.
    # In order: what was announced before; all expect what they send; the one that is in every pair
    # that disagrees; the one whose splits are unlike those of the rest.
    culprits = {
        rank
        for disagreement in wrong
        if (rank := _against_announced(disagreement, there, members)) is not None
    }
    if culprits:
        return tuple(sorted(culprits)), ", and announced another number before"
    if _never_exchanged(there, members):
        return tuple(sorted(there)), ": every rank expects what it sends, counts of its own"
    pairs = [{disagreement.sender, disagreement.receiver} for disagreement in wrong]
    common = set.intersection(*pairs)
    if len(common) == 1:
        return tuple(common), ""
    if len(there) > 2 and len(there) == len(members):
        sends = minority({rank: splits.sends for rank, splits in there.items()})
        receives = minority({rank: splits.receives for rank, splits in there.items()})
        few = {rank for ranks in (sends, receives) if 2 * len(ranks) < len(there) for rank in ranks}
        unlike = few & {rank for pair in pairs for rank in pair}
        if len(unlike) == 1:
            return tuple(unlike), ", and its splits are unlike the other ranks'"
    return tuple(sorted(there)), ""


def _never_exchanged(there: Mapping[int, Splits], members: Ranks) -> bool:
    """Every rank takes its own counts for what it gets, and all have other counts.

    That two of them agree is then chance. No counts were exchanged before.
    """
    own = all(e.sends == e.receives and not e.announced for e in there.values())
    lists = {splits.sends for splits in there.values()}
    uneven = all(len(set(sends)) > 1 for sends in lists)
    return own and uneven and len(there) == len(members) == len(lists)


def _against_announced(
    each: _Disagreement, there: Mapping[int, Splits], members: Ranks
) -> int | None:
    """The rank that does not keep to what was announced, in an exchange of counts, before."""
    sender, receiver = there[each.sender].announced, there[each.receiver].announced
    at, by = members.index(each.receiver), members.index(each.sender)
    # What goes out was announced by the sender; what comes back, by whom it comes back to.
    for counts, index in ((sender, at), (receiver, by)):
        if len(counts) == len(members):
            if counts[index] == each.expects != each.sends:
                return each.sender
            if counts[index] == each.sends != each.expects:
                return each.receiver
    return None


# -- sharding ----------------------------------------------------------------------------
# Rules for models that FSDP2 shards: ranks that wrap them, or reduce gradients, in another way.


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


# -- schedules ---------------------------------------------------------------------------
# Rules for pipelines: stages, micro-batches or schedules of ranks that do not fit together.


_Pipeline = Mapping[int, PipelinePart]


def other_schedules(context: Context) -> Iterator[Finding]:
    """Ranks of one pipeline that run other stages, micro-batches or schedules than it needs.

    torch does not compare them. Only where ranks are stuck, or one has failed.
    """
    for pipeline in _pipelines(context):
        finding = _wrong_stages(context, pipeline) or _other_numbers(context, pipeline)
        if finding is not None:
            yield finding
            return


def _pipelines(context: Context) -> Iterator[_Pipeline]:
    """The ranks of each pipeline, with what each of them is in it."""
    found: dict[tuple[Ranks, int], dict[int, PipelinePart]] = {}
    ranks = tuple(e.rank for e in context.case.ranks)
    for report in context.case.ranks:
        seen: dict[Ranks, int] = {}
        for part in report.parts.pipelines:
            number = seen[part.members] = seen.get(part.members, -1) + 1
            if part.members and max(part.members) < len(ranks):
                found.setdefault((part.members, number), {})[report.rank] = part
    yield from (pipeline for pipeline in found.values() if len(pipeline) > 1)


def _wrong_stages(context: Context, pipeline: _Pipeline) -> Finding | None:
    """A rank with a stage that torch has another rank for: that one is there twice, its own not."""
    wrong = {
        rank: part for rank, part in pipeline.items() if not set(part.stages) <= set(part.meant)
    }
    sizes = {part.num_stages for part in pipeline.values()}
    if not wrong or len(sizes) > 1:
        return None
    part = next(iter(wrong.values()))
    twin = next(
        (r for r, p in pipeline.items() if r not in wrong and set(p.stages) & set(part.stages)),
        None,
    )
    also = f", which rank {twin} has too" if twin is not None else ""
    lacks = sorted(set(range(part.num_stages)) - {s for p in pipeline.values() for s in p.stages})
    missing = ""
    if lacks and len(pipeline) == len(part.members):
        missing = f"; no rank has {_stages(tuple(lacks))}"
    return Finding(
        Category.SCHEDULE_MISMATCH,
        tuple(wrong),
        f"{verb(tuple(wrong), 'runs', 'run')} {_stages(part.stages)} of the pipeline{also}, where "
        f"the schedule expects {_stages(part.meant)}{missing}",
        "Give each rank the stage_index of its own place in the pipeline's group: "
        "PipelineStage(module, dist.get_rank(group), ...).",
        context.victims,
        _evidence(pipeline),
    )


def _stages(stages: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, stages))
    return f"stage {numbers}" if len(stages) == 1 else f"stages {numbers}"


def _other_numbers(context: Context, pipeline: _Pipeline) -> Finding | None:
    numbers: list[tuple[Mapping[int, Hashable], str, str]] = [
        (
            {rank: part.num_stages for rank, part in pipeline.items()},
            "{} stages in all",
            "Give PipelineStage the same num_stages on every rank.",
        ),
        (
            {rank: part.micro_batches for rank, part in pipeline.items()},
            "{} micro-batches",
            "Give the schedule the same n_microbatches on every rank.",
        ),
    ]
    if _in_messages(context, pipeline):  # in another order the same messages may well meet
        numbers.append(
            (
                {rank: part.schedule for rank, part in pipeline.items()},
                "schedule {}",
                "Use one schedule on every rank of the pipeline.",
            )
        )
    for values, what, remedy in numbers:
        finding = _other_value(context, pipeline, values, what, remedy)
        if finding is not None:
            return finding
    return None


def _in_messages(context: Context, pipeline: _Pipeline) -> bool:
    """True when ranks of it wait for each other's sends and receives, forever."""
    at = context.graph.at
    return any(
        rank in at and at[rank].is_point_to_point
        for rank in context.graph.stuck
        if rank in pipeline
    )


def _other_value(
    context: Context, pipeline: _Pipeline, values: Mapping[int, Hashable], what: str, remedy: str
) -> Finding | None:
    if len(set(values.values())) < 2:
        return None
    culprits = outvoted(values)
    sides = sorted(by_value(values), key=lambda side: len(side[0]))
    said = "; ".join(f"{name_ranks(ranks)}: {what.format(value)}" for ranks, value in sides)
    return Finding(
        Category.SCHEDULE_MISMATCH,
        culprits,
        f"the ranks of one pipeline do not agree ({said})",
        remedy,
        context.victims,
        _evidence(pipeline),
    )


def _evidence(pipeline: _Pipeline) -> tuple[str, ...]:
    return by_ranks(
        {
            rank: f"{part.schedule}, {_stages(part.stages)} of {part.num_stages}, "
            f"{part.micro_batches} micro-batches"
            for rank, part in pipeline.items()
        }
    )
