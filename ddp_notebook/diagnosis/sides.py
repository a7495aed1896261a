"""Where the ranks of a finding are: the line of each group of them, and what it does there.

A rule says who is wrong, and why. Where all ranks stand is the same question for each finding, so
it is answered here, from records, stacks and tracebacks; only what a rule has shown itself stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from ddp_notebook.diagnosis.collectives.describe import side
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import raised_words
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.patch import find_unused_parameters, hoist
from ddp_notebook.model import (
    Activity,
    Category,
    Decision,
    Finding,
    Part,
    Phase,
    Place,
    RankReport,
    Ranks,
    Side,
    agree,
    counted,
    name_ranks,
)
from ddp_notebook.model.fold import MISMATCH

_NOT_TOLD = re.compile(r"checkpoint|\.module\b|static_graph")
_MOST_GROUPS = 4
_MOST_OF_ERROR = 60
"""How much of an error stands beside the line that raised it."""


def with_sides(context: Context, finding: Finding) -> Finding:
    """Return the finding with a side for each group of its ranks, and the code of all."""
    decides = finding.decides or _raised_before(context, finding.ranks)
    sides = [
        each if each.place else _ended(context, each, finding.sides, decides)
        for each in finding.sides
    ]
    if not sides:
        # Culprits and those that wait for them stand apart, also where both are at one line.
        sides = _groups(context, finding.ranks) + _groups(context, finding.waiting)
    if decides is not None and not decides.label:
        everyone = len(finding.ranks) == len(context.case.ranks or context.facts)
        who = "every rank" if everyone else name_ranks(finding.ranks)
        decides = replace(decides, label=f"on {who}")
    found = replace(finding, sides=_from_their_parting(sides), decides=decides)
    found = _with_wrapping(context, found)
    found = replace(found, patch=found.patch or _moved(context, found))
    return found.with_code(context.sources.texts)


def _with_wrapping(context: Context, finding: Finding) -> Finding:
    """Return that of unused parameters with the line that makes DDP, and its change if certain."""
    replicas = context.replicas
    made = {replica.place for replica in replicas if replica.place is not None}
    if finding.category is not Category.UNUSED_PARAMS or len(made) != 1:
        return finding
    (place,), sides = made, finding.sides
    if finding.decides is not None:
        words, at = "used unaveraged gradients", (finding.decides.place,)
        sides = (*sides, _at(finding.ranks, at, words))
    # Wrong where parameters get gradients of which DDP's forward does not tell: in checkpoints, or
    # by a use past DDP. And `static_graph` does not go with it.
    patch, told = "", not _NOT_TOLD.search("\n".join(context.sources.texts.values()))
    if told and all(replica.could_find_unused for replica in replicas):
        patch = context.sources.changed(find_unused_parameters, place)
    return replace(
        finding, sides=sides, decides=Decision(place, "the model is wrapped here"), patch=patch
    )


def _moved(context: Context, finding: Finding) -> str:
    """Return the change that moves a call out of the test that decides who makes it, if certain."""
    test = finding.decides.place if finding.decides is not None else None
    if finding.category is not Category.CONDITIONAL_COLLECTIVE or test is None:
        return ""
    source = context.sources.texts.get(test.file, "")
    for each in finding.sides:
        for place, below in zip_longest(each.path, each.path[1:]):
            within = (place.file, place.function) == (test.file, test.function)
            if within and place.line > test.line and source:
                called = below.function if below is not None else each.call.partition(" ")[0]
                return hoist(source, place.line, test.line, called.rpartition(".")[2])
    return ""


def _groups(context: Context, ranks: Ranks) -> list[Side]:
    """Return a side for those of these ranks that do the same at the same line."""
    same: dict[Side, list[int]] = {}
    for report in (context.reports[rank] for rank in ranks if rank in context.reports):
        same.setdefault(replace(_stands(context, report), ranks=()), []).append(report.rank)
    return [
        replace(_stands(context, context.reports[group[0]], len(group)), ranks=tuple(group))
        for stands, group in same.items()
        if stands.place is not None
    ][:_MOST_GROUPS]


def _stands(context: Context, report: RankReport, count: int = 1) -> Side:
    """Return where a rank is, in words for `count` ranks; without a place where it is unknown."""
    ranks = (report.rank,) * count  # only how many there are matters to words
    record = context.graph.at.get(report.rank)
    if report.activity is Activity.FAILED:
        if report.error.type == MISMATCH:  # then its last call was rejected
            calls = reversed(context.collectives.of.get(report.rank, ()))
            record = next((each for each in calls if each.phase is Phase.REFUSED), record)
        elif report.error.at:
            record = None
    if record is not None:
        return side(ranks, record)
    one, many, detail, path = _does(report)
    records = context.collectives.of.get(report.rank, ())
    if not path and records and context.gone(report.rank):
        # It has ended: what it called last is what is known of it.
        one, many, detail, path = "was last seen", "were last seen", "", records[-1].path
    return _at(ranks, path, agree(ranks, one, many), detail)


def _does(report: RankReport) -> tuple[str, str, str, tuple[Place, ...]]:
    """Return what one rank does, and several; more about it; and the way there."""
    error = report.error
    if report.end.left_at:
        return "left", "left", "", report.end.left_at
    if report.activity is not Activity.FAILED:
        one, many = _WORDS.get(report.activity, ("is", "are"))
        return one, many, "", () if report.activity is Activity.IDLE else report.path
    if torch_errors.is_of_others(error.text):
        return "lost its connection", "lost their connections", "", error.at
    words = raised_words(error.type, error.text, (), _MOST_OF_ERROR)
    return "raised", "raised", f": {words}", error.at


_WORDS = {
    Activity.BUSY: ("is busy", "are busy"),
    Activity.HELD: ("is paused", "are paused"),
    Activity.WAITING: ("waits", "wait"),
    Activity.SILENT: ("does not answer; it is", "do not answer; they are"),
}


def _at(ranks: Ranks, path: Sequence[Place], state: str, detail: str = "") -> Side:
    place = path[-1] if path else None
    return Side(ranks, "", "", place, tuple(path), state, detail)


def _ended(context: Context, each: Side, sides: Sequence[Side], decides: Decision | None) -> Side:
    """Return where ranks ended that called nothing more: a loop that others are still in."""
    rank = each.ranks[0]
    report, finished = context.reports.get(rank), context.finished(rank)
    found = _stands(context, report, len(each.ranks)) if report is not None else each
    way = next((other.path for other in sides if other.path), ())
    loop, steps = context.sources.loop_around(way), _steps(context, rank, way[-1:])
    if loop and finished and steps is not None:
        after = f", after {counted(steps, 'step')}" if steps else ""
        found = _at(each.ranks, loop, "left the loop", after)
    elif found.place is None and decides is not None:
        ended = f", and {agree(each.ranks, 'has', 'have')} finished" if finished else ""
        found = _at(each.ranks, (decides.place,), "went another way", ended)
    return replace(found, ranks=each.ranks, call=each.call)


def _steps(context: Context, rank: int, line: tuple[Place, ...]) -> int | None:
    """Return how many steps a rank made at a line, 0 if that is unknown; None if it was not there.

    One backward reduces several buckets: its number tells steps apart.
    """
    there = [e for e in context.collectives.of.get(rank, ()) if e.path[-1:] == line]
    passes = {record.backwards for record in there if record.part is Part.BACKWARD}
    unknown = context.collectives.first.get(rank)
    return (0 if unknown else len(passes)) if there else None


def _raised_before(context: Context, ranks: Ranks) -> Decision | None:
    """Return the line that raised what one of these ranks still handles, where it waits."""
    for rank in ranks:
        report = context.reports.get(rank)
        error = report.handles if report is not None else None
        if error is not None and error.path and error.type != MISMATCH:
            return Decision(error.path[-1], f"rank {rank} raised {error.type} here")
    return None


def _from_their_parting(sides: Sequence[Side]) -> tuple[Side, ...]:
    """Return the sides without the calls that they share: what leads to all of them."""
    paths = [[(at.file, at.line) for at in each.path] for each in sides if each.path]
    # Of one path alone the first line of the user's is shown, and the last.
    shared = 0
    if len(paths) > 1:
        levels = enumerate(zip(*paths, strict=False))
        parting = (index for index, frames in levels if len(set(frames)) > 1)
        shared = next(parting, min(map(len, paths)) - 1)
    return tuple(replace(each, path=each.path[shared:]) for each in sides)
