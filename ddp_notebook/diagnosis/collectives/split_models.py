"""Rules for ranks that share one model or its data: splits of all_to_all, FSDP2, pipelines.

In each, ranks hold parts that must fit together, and torch does not compare them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import CallSite, call_site
from ddp_notebook.diagnosis.collectives.describe import side
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, minority, outvoted
from ddp_notebook.model import (
    Collective,
    Finding,
    PipelinePart,
    Ranks,
    ShardedUnit,
    Splits,
    by_value,
)


@dataclass(frozen=True)
class _Disagreement:
    """The numbers that `sender` sends and `receiver` expects; both are ranks of the session."""

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
    records: dict[int, Collective] = {}
    for report in context.case.ranks:
        splits, site = report.splits, None
        if splits is None:
            continue
        for record in reversed(context.collectives.of.get(report.rank, ())):
            in_place = (record.group, record.slot) == (splits.group, splits.slot)
            if in_place and "all_to_all" in record.operation:
                records[report.rank], site = record, call_site(record)
                break
        of_calls.setdefault((splits.group, splits.slot, site), {})[report.rank] = splits
    for (group, _, _), of_ranks in of_calls.items():
        members = wait_graph.members(context.case, group)
        there = _in_one_unit(of_ranks)
        wrong = _disagreements(there, members)
        if wrong:
            shown = next((records[rank] for rank in there if rank in records), None)
            yield _finding(context, wrong, there, members, shown)
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
    brought = {
        rank: f"sends {list(splits.sends)}, expects {list(splits.receives)}"
        + (f"; announced {list(splits.announced)} before" if splits.announced else "")
        for rank, splits in there.items()
    }
    return catalogue.finding(
        "split-mismatch.splits",
        culprits,
        waiting=context.victims,
        evidence=(*by_ranks(brought), *why),
        sides=(side(tuple(there), record),) if record is not None else (),
        sender=(first.sender,),
        sends=first.sends,
        receiver=(first.receiver,),
        expects=first.expects,
    )


def _whose(
    wrong: list[_Disagreement], there: Mapping[int, Splits], members: Ranks
) -> tuple[Ranks, tuple[str, ...]]:
    """The ranks whose numbers are wrong, and a line that says why; all ranks if unknown."""
    # One number too large is as wrong as the other one is too small, so a pair alone does not tell.
    # In order: what was announced before; all expect what they send; the one that is in every pair
    # that disagrees; the one whose splits are unlike those of the rest.
    culprits: set[int] = set()
    for pair in wrong:
        # What goes out was announced by the sender; what comes back, by whom it comes back to.
        counts = (
            (there[pair.sender].announced, pair.receiver),
            (there[pair.receiver].announced, pair.sender),
        )
        for announced, peer in counts:
            number = announced[members.index(peer)] if len(announced) == len(members) else None
            if number in (pair.sends, pair.expects):
                culprits.add(pair.sender if number == pair.expects else pair.receiver)
                break
    if culprits:
        ranks = tuple(sorted(culprits))
        return ranks, (catalogue.words("split-mismatch.splits.announced", ranks=ranks),)
    all_there = len(there) == len(members)
    # No counts were exchanged before where every rank takes its own for what it gets, and all have
    # other ones. That two of them agree is then chance.
    own = all(splits.sends == splits.receives and not splits.announced for splits in there.values())
    lists = {splits.sends for splits in there.values()}
    if own and all_there and len(lists) == len(members) and all(len(set(s)) > 1 for s in lists):
        return tuple(sorted(there)), (catalogue.words("split-mismatch.splits.own"),)
    pairs = [{disagreement.sender, disagreement.receiver} for disagreement in wrong]
    common = set.intersection(*pairs)
    if len(common) == 1:
        return tuple(common), ()
    if len(there) > 2 and all_there:
        sends = minority({rank: splits.sends for rank, splits in there.items()})
        receives = minority({rank: splits.receives for rank, splits in there.items()})
        few = {rank for ranks in (sends, receives) if 2 * len(ranks) < len(there) for rank in ranks}
        unlike = few & {rank for pair in pairs for rank in pair}
        if len(unlike) == 1:
            ranks = tuple(unlike)
            return ranks, (catalogue.words("split-mismatch.splits.unlike", ranks=ranks),)
    return tuple(sorted(there)), ()


# -- sharding ----------------------------------------------------------------------------
# Rules for models that FSDP2 shards: ranks that wrap them, or reduce gradients, in another way.


_Model = Mapping[str, ShardedUnit]
_MOST_NAMED = 4


def other_wrapping(context: Context) -> Iterator[Finding]:
    """Ranks with parts of one model that gave other modules, or arguments, to fully_shard."""
    for of_rank in _models(context):
        sizes: dict[int, tuple[str, ...]] = {}
        freed: dict[int, tuple[str, ...]] = {}
        for rank, model in of_rank.items():
            units = model.values()
            sizes[rank] = tuple(sorted(f"{_name(u)} ({u.parameters:,} parameters)" for u in units))
            freed[rank] = tuple(f"{_name(u)}: {u.reshards}" for u in units)
        values, resharding = sizes, len(set(sizes.values())) < 2
        if resharding:
            values = freed
        if len(set(values.values())) > 1:
            yield catalogue.finding(
                "sharding-mismatch.resharding" if resharding else "sharding-mismatch.units",
                outvoted(values),
                waiting=context.victims,
                evidence=by_ranks(_uncommon(values)),
                **_two_sides(values),
            )
            return


def _two_sides(values: Mapping[int, Hashable]) -> dict[str, Any]:
    """Return the smallest and the largest set of ranks that agree, with their values."""
    sides = sorted(by_value(values), key=lambda side: len(side[0]))
    (first, value), (second, other) = sides[0], sides[-1]
    return {"first": first, "second": second, "value": value, "other": other}


def _some(values: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
    return ", ".join(values[:_MOST_NAMED]) + more if values else "no others"


def _name(unit: ShardedUnit) -> str:
    return unit.name or "the root"


def other_frozen(context: Context) -> Iterator[Finding]:
    """Ranks that train other parameters of one model: who trains none of a unit reduces nothing.

    Only where a rank reduces what another does not. Where all of a model is frozen on a rank, that
    may be for a while: a GAN trains its parts in turns.
    """
    here = [branch.here for d in context.divergences for branch in (d.own, d.other)]
    if not any(record is not None and "reduce_scatter" in record.operation for record in here):
        return
    for of_rank in _models(context):
        values = {
            rank: tuple(f"{u.trained or 'no'} parameters of {_name(u)}" for u in units.values())
            for rank, units in of_rank.items()
        }
        some = all(any(u.trained for u in units.values()) for units in of_rank.values())
        if not some or len(set(values.values())) < 2:
            continue
        yield catalogue.finding(
            "param-mismatch.frozen",
            outvoted(values),
            waiting=context.victims,
            evidence=by_ranks({r: f"trains {text}" for r, text in _uncommon(values).items()}),
            **_two_sides(values),
        )
        return


def _uncommon(values: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    common = set.intersection(*(set(value) for value in values.values()))
    return {
        rank: _some([each for each in value if each not in common])
        for rank, value in values.items()
    }


def _models(context: Context) -> Iterator[dict[int, _Model]]:
    """Models that several ranks shard among each other: the units of each rank, by name.

    Stages of a pipeline have other modules, and other ranks.
    """
    found: dict[tuple[int, Ranks], dict[int, _Model]] = {}
    for report in context.case.ranks:
        models: dict[int, dict[str, ShardedUnit]] = {}
        for unit in report.parts.sharded:
            models.setdefault(unit.model, {})[unit.name] = unit
        for number, units in models.items():
            meshes = {unit.mesh for unit in units.values()}  # mostly one, of many ranks
            mesh = tuple(sorted(set().union(*meshes)))
            if mesh and mesh[-1] < len(context.case.ranks):
                found.setdefault((number, mesh), {})[report.rank] = units
    in_order = sorted(found, key=lambda key: key[0])
    yield from (found[key] for key in in_order if len(found[key]) > 1)


# -- schedules ---------------------------------------------------------------------------
# Rules for pipelines: stages, micro-batches or schedules of ranks that do not fit together.


_Pipeline = Mapping[int, PipelinePart]
_AGREED = (
    ("num_stages", "schedule-mismatch.num-stages"),
    ("micro_batches", "schedule-mismatch.micro-batches"),
    ("schedule", "schedule-mismatch.schedule"),
)
"""Fields of `PipelinePart` that are the same on all ranks, with the kind of their mistake."""


def other_schedules(context: Context) -> Iterator[Finding]:
    """Ranks of one pipeline that run other stages, micro-batches or schedules than it needs.

    torch does not compare them. Only where ranks are stuck, or one has failed.
    """
    pipelines: dict[tuple[Ranks, int], dict[int, PipelinePart]] = {}
    for report in context.case.ranks:
        seen: dict[Ranks, int] = {}
        for part in report.parts.pipelines:
            number = seen[part.members] = seen.get(part.members, -1) + 1
            if part.members and max(part.members) < len(context.case.ranks):
                pipelines.setdefault((part.members, number), {})[report.rank] = part
    for pipeline in pipelines.values():
        if len(pipeline) < 2:
            continue
        finding = _wrong_stages(context, pipeline) or _other_numbers(context, pipeline)
        if finding is not None:
            yield finding
            return


def _wrong_stages(context: Context, pipeline: _Pipeline) -> Finding | None:
    """A rank with a stage that torch has another rank for: that one is there twice, its own not."""
    wrong = {
        rank: part for rank, part in pipeline.items() if not set(part.stages) <= set(part.meant)
    }
    sizes = {part.num_stages for part in pipeline.values()}
    if not wrong or len(sizes) > 1:
        return None
    part = next(iter(wrong.values()))
    right = sorted(pipeline.keys() - wrong.keys())
    twins = (rank for rank in right if {*pipeline[rank].stages} & {*part.stages})
    facts = [
        catalogue.words(
            "schedule-mismatch.stage.twin", rank=(twin,), stages=_stages(pipeline[twin].stages)
        )
        for twin in list(twins)[:1]
    ]
    there = set().union(*(p.stages for p in pipeline.values()))
    lacks = tuple(sorted(set(range(part.num_stages)) - there))
    if lacks and len(pipeline) == len(part.members):
        facts.append(catalogue.words("schedule-mismatch.stage.missing", stages=_stages(lacks)))
    return catalogue.finding(
        "schedule-mismatch.stage",
        tuple(wrong),
        waiting=context.victims,
        evidence=(*_evidence(pipeline), *facts),
        stages=_stages(part.stages),
        meant=_stages(part.meant),
    )


def _stages(stages: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, stages))
    return f"stage {numbers}" if len(stages) == 1 else f"stages {numbers}"


def _other_numbers(context: Context, pipeline: _Pipeline) -> Finding | None:
    at = context.graph.at
    waiting = [at[rank] for rank in context.graph.stuck if rank in pipeline and rank in at]
    in_messages = any(record.is_point_to_point for record in waiting)
    for name, kind in _AGREED:
        values: dict[int, Hashable] = {r: getattr(part, name) for r, part in pipeline.items()}
        # In another order the same messages may well meet: then no rank waits in a send or a recv.
        if len(set(values.values())) < 2 or (name == "schedule" and not in_messages):
            continue
        return catalogue.finding(
            kind,
            outvoted(values),
            waiting=context.victims,
            evidence=_evidence(pipeline),
            **_two_sides(values),
        )
    return None


def _evidence(pipeline: _Pipeline) -> tuple[str, ...]:
    return by_ranks(
        {
            rank: f"{part.schedule}, {_stages(part.stages)} of {part.num_stages}, "
            f"{part.micro_batches} micro-batches"
            for rank, part in pipeline.items()
        }
    )
