"""Rules about loops: a step left out, a step more, a rank that is past the loop."""

from __future__ import annotations

from ddp_notebook.diagnosis.collectives.alignment import site
from ddp_notebook.diagnosis.collectives.divergence import Parting, Side
from ddp_notebook.diagnosis.context import named
from ddp_notebook.model import Category, Collective, Finding

UNEVEN_REMEDY = (
    "Give every rank the same number of batches (DistributedSampler, drop_last=True), or use Join."
)
TOGETHER = (
    "Let all ranks decide together whether to skip a step: all_reduce a flag, then branch on it."
)


def skipped(parting: Parting) -> Finding:
    """Both sides have done both before: one of them is past the loop, or left out a step."""
    own, other = parting.fault.own[0], parting.fault.other[0]
    if parting.theirs.repeats(other, since=own):
        return past_the_loop(parting, parting.mine, parting.theirs, other)
    if parting.mine.repeats(own, since=other):
        return past_the_loop(parting, parting.theirs, parting.mine, own)
    culprits = parting.culprits(parting.against_habit())
    return parting.finding(
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        f"the ranks took different ways through the loop: {parting.side_by_side()}",
        TOGETHER,
    )


def past_the_loop(parting: Parting, past: Side, inside: Side, there: Collective) -> Finding:
    """One side is past the loop in which the other still is: fewer steps, or one left out."""
    way = parting.picture.sources.way_around(there)
    beyond = past.here
    said = f"{past.named} {past.verb('is', 'are')} past the loop"
    said += f", in {named(beyond)}" if beyond else ""
    return parting.finding(
        Category.DIVERGENT_CONTROL_FLOW if way else Category.UNEVEN_INPUTS,
        parting.culprits(past),
        f"{said}, while {inside.named} {inside.verb('is', 'are')} in {named(there)}",
        TOGETHER if way else UNEVEN_REMEDY,
        (f"{way.place}: {way.place.text}",) if way else (),
    )


def once_more(
    parting: Parting, full: Side, short: Side, records: tuple[Collective, ...]
) -> Finding:
    """One side has collectives more that both know: a step too many, or left out."""
    here = short.here
    if here is not None and _is_a_step(full, records) and full.repeats(records[0], since=here):
        return past_the_loop(parting, short, full, records[0])
    culprits = parting.culprits(parting.against_habit())
    more, less, other = ("more", full, short) if culprits == full.ranks else ("less", short, full)
    times = f"once {more}" if len(records) == 1 else f"{len(records)} collectives {more}"
    return parting.finding(
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        f"{less.named} called {named(records[0])} {times} than {other.named}",
        TOGETHER,
    )


def _is_a_step(side: Side, records: tuple[Collective, ...]) -> bool:
    """True when just the same lines came just before: a whole step of the loop."""
    index = side.at - side.track.first
    before = side.track.records[max(0, index - len(records)) : index]
    return [site(each) for each in before] == [site(each) for each in records]
