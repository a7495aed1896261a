"""Rules about ranks that died or raised in a run: which was first, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import call_site
from ddp_notebook.diagnosis.collectives.describe import fact, numbered, short_name
from ddp_notebook.diagnosis.collectives.explain import threads_of
from ddp_notebook.diagnosis.collectives.out_of_step import ended_by_conflicts
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.majority import by_ranks, minority
from ddp_notebook.diagnosis.progress import differing_variables, raised_words, way_to_error
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Collective,
    Finding,
    Part,
    Phase,
    Place,
    RankReport,
    Ranks,
    ThreadError,
    by_value,
    name_ranks,
)
from ddp_notebook.model.fold import MISMATCH

_ENDED_BY_OTHERS = (-15, 143)
"""SIGTERM: a launcher ends the remaining ranks when one has died."""


def ended(context: Context) -> Iterator[Finding]:
    """Ranks that died or raised, the earliest first, without those that failed as a consequence.

    Also without those whose end is explained by a mismatched collective.
    """
    explained = ended_by_conflicts(context)
    gone = [
        e
        for e in context.case.ranks
        if e.activity is Activity.FAILED or (e.activity is Activity.DEAD and e.end.code != 0)
        if e.rank not in explained
    ]
    dragged = _dragged_along(context, gone)
    first = [e for e in gone if e.rank not in dragged]
    ranks = tuple(e.rank for e in first)
    died = [e for e in first if e.activity is Activity.DEAD]
    too_much = list(_got_too_much(context, died))
    known = {rank for finding in too_much for rank in finding.ranks}
    died = [e for e in died if e.rank not in known]
    last = {e.rank: numbered(at) for e in died if (at := last_record(context, e.rank))}
    findings = too_much + list(deaths(context.case, died, context.victims, last))
    # The guard refuses a call on every rank that brought it, so a refusal is mostly a right rank's.
    # Who raised by itself and, on its way out, met the others with the wrong call is the cause: a
    # `finally` may call a collective, which then meets what the others are in.
    refused = {e.rank for e in first if e.error.type == MISMATCH}
    raised = []
    for e in first if refused else ():
        own = e.activity is Activity.FAILED and e.rank not in refused and e.error.at
        issued = context.collectives.of.get(e.rank, ())
        if not own or any(record.phase is Phase.REFUSED for record in issued):
            continue
        if not torch_errors.is_of_others(e.error.text):
            raised.append(
                catalogue.finding(
                    "exception-on-one-rank.met-others",
                    (e.rank,),
                    waiting=context.victims,
                    evidence=_error_lines((e.rank,), e.error.type, e.error.text, e.error.at),
                    error=e.error.type,
                    others=tuple(sorted(refused)),
                )
            )
    findings += raised or _refused(context, refused)
    stuck = tuple(rank for rank in context.graph.stuck if rank in context.graph.at)
    findings += torch_errors.of_errors(
        context.case,
        invalid=False,
        only=set(ranks) - refused,
        waiting=context.victims,
        facts=(context.standing(stuck),) if stuck else (),
    )
    yield from sorted(findings, key=partial(_time, context))


def raised_alike(context: Context) -> Iterator[Finding]:
    """All ranks raised at one line, whose variables differ between them.

    Where they are all alike, the error says what is to be said, as in a program of one process.
    """
    failed = [e for e in context.case.ranks if e.activity is Activity.FAILED]
    first = failed[0].error if failed else None
    if first is None or len(failed) < len(context.case.ranks) or first.type in _NO_ERRORS:
        return
    # All ranks raised, so no rank waits and none is a victim. A program of one process would say
    # the same, unless something differs between the ranks: that is what is worth a finding.
    variables = differing_variables(failed)
    if len({e.error.type for e in failed}) > 1:
        return
    if variables and not any(torch_errors.is_of_others(e.error.text) for e in failed):
        ranks = tuple(e.rank for e in failed)
        yield catalogue.finding(
            "exception.alike",
            ranks,
            evidence=(*_error_lines(ranks, first.type, first.text, first.at), *variables),
            error=first.type,
            names=tuple(variable.partition(" is ")[0] for variable in variables),
        )


def _error_lines(ranks: Ranks, name: str, text: str, path: Sequence[Place]) -> tuple[str, str]:
    """Lines of evidence about an error: what was raised, and on which way."""
    who = name_ranks(ranks)
    return f"{who} raised {raised_words(name, text, path)}", f"{who}: {way_to_error(path)}"


def unwinding(context: Context) -> Iterator[Finding]:
    """Ranks that raised, and during unwinding wait in a collective that the others are not in.

    A rank that lost its connection to them may come to the same lines, after them.
    """
    # To call a collective while an error is handled is no mistake: where all ranks fall back to
    # something else, all of them do. It is one if the others wait at other lines. Those that have
    # only lost a connection are asked to prove nothing: they come to the same lines, as the second.
    at = context.graph.at
    there = {rank: at[rank] for rank in context.graph.stuck if rank in at}
    for rank, report in context.reports.items():
        refused = [r for r in context.collectives.of.get(rank, ()) if r.phase is Phase.REFUSED]
        handled = report.handles is not None and report.handles.type == MISMATCH
        if handled and refused:
            there[rank] = refused[0]  # where it calls others on its way out, those prove nothing
        elif report.error.type == MISMATCH and refused[-1:] == [last_record(context, rank)]:
            there[rank] = refused[-1]
    own: dict[int, ThreadError] = {}
    others: list[int] = []
    for rank in there:
        error = context.reports[rank].handles
        if error is not None and torch_errors.is_of_others(error.text):
            continue
        if error is None or error.type in _NO_ERRORS:
            others.append(rank)
        else:
            own[rank] = error
    elsewhere = {call_site(there[rank]) for rank in others}
    alone = {r: error for r, error in own.items() if call_site(there[r]) not in elsewhere}
    calls = tuple(fact((rank,), record) for rank, record in sorted(there.items()))
    for ranks, error in by_value(alone) if others else ():
        record = there[ranks[0]]
        yield catalogue.finding(
            "divergent-control-flow.tried-again-unwinding"
            if _tries_again(error, record)
            else "exception-on-one-rank.unwinding",
            ranks,
            waiting=context.victims,
            evidence=(*_error_lines(ranks, error.type, error.text, error.path), *calls),
            error=error.type,
            call=short_name(record),
            standing=context.briefly(tuple(others), most=45),
        )


def _tries_again(error: ThreadError, record: Collective) -> bool:
    """True when `record` is of another pass of the model, or in a function that had raised."""
    if record.part in (Part.FORWARD, Part.BACKWARD):
        return True
    raised = [(place.file, place.function) for place in error.path]
    path = [(place.file, place.function) for place in record.path]
    # A traceback begins in the function that handles the error; a path at the program's first.
    handler = path.index(raised[0]) if raised[0] in path else len(path)
    pairs = zip(error.path, record.path[handler:], strict=False)
    apart = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return any(each in raised for each in path[handler + apart + 1 :])


GOT_TOO_MUCH = re.compile(r"(\d+) vs (\d+)\. Received data size doesn't match")
"""The last message of a process that gloo aborts."""


def _got_too_much(context: Context, died: Iterable[RankReport]) -> Iterator[Finding]:
    """Ranks that gloo aborted as another sent too much: one of both is wrong, or threads raced."""
    for e in died:
        # gloo finds this in C++ and aborts the process that receives, whichever of the two is
        # wrong: there is no exception and no refusal, only the last line of the dead rank's log.
        sizes, last = GOT_TOO_MUCH.search(e.end.last_words), last_record(context, e.rank)
        if sizes is None or last is None or last.over:
            continue
        there = wait_graph.all_at_slot(context.collectives, last)
        ranks = tuple(there)
        if last.peer is not None:
            ranks, there = tuple(sorted((e.rank, last.peer))), {e.rank: last}
        several, at_once = threads_of(context, last.group)
        if several and len({(r.dtype, r.shape) for r in there.values()}) == 1:
            # What they wrote down agrees, and gloo met something else: another thread's call.
            yield catalogue.finding(
                "mismatched-order.too-many-bytes",
                several,
                waiting=context.victims,
                evidence=(fact((e.rank,), last), *at_once),
                dead=(e.rank,),
                got=sizes[1],
                expected=sizes[2],
                call=short_name(last),
            )
            continue
        restart = f"%ddp_restart --ranks {e.rank}"
        yield catalogue.finding(
            "shape-mismatch.too-many-bytes",
            ranks,
            waiting=context.victims,
            evidence=tuple(fact((rank,), record) for rank, record in there.items()),
            dead=(e.rank,),
            got=sizes[1],
            expected=sizes[2],
            call=short_name(last),
            command="%ddp_abort" if context.case.script else restart,
        )


_NO_ERRORS = (MISMATCH, "StopIteration", "StopAsyncIteration")
"""Types that do not count as errors: refused calls, and the end of a loop."""


def _refused(context: Context, refused: set[int]) -> Iterator[Finding]:
    """A refusal of the guard that no rule explains: the ranks' inputs side by side."""
    for rank in sorted(refused):
        own = context.collectives.of.get(rank, ())
        record = next((record for record in reversed(own) if record.phase is Phase.REFUSED), None)
        record = record or last_record(context, rank)
        if record is None:
            continue
        there = wait_graph.all_at_slot(context.collectives, record) | {rank: record}
        brought = {other: numbered(record) for other, record in there.items()}
        ranks = minority(brought) or (rank,)
        yield catalogue.finding(
            "shape-mismatch.refused-on-all"
            if len(ranks) == len(there)
            else "shape-mismatch.refused",
            ranks,
            waiting=context.victims,
            evidence=by_ranks(brought),
            call=short_name(there[ranks[0]]),
            others=tuple(sorted(there.keys() - set(ranks))),
        )
        return  # the others were refused the same


def _dragged_along(context: Context, gone: list[RankReport]) -> set[int]:
    """Ranks that ended because another had, while they were in a collective without it."""
    # When a rank goes, its peers' connections close within milliseconds, a launcher sends SIGTERM
    # to the rest, and the clocks of hosts differ: times of ends prove nothing. What a rank was in
    # does. A rank that ended inside of a collective may have been dragged along by whoever did not
    # come to it; one that ended outside, or in a call that needs no other rank that ended, was
    # first. A rank that died of SIGTERM is taken to be ended by the launcher, unless the others
    # had lost their connection to just that rank before.
    dead = [e for e in gone if e.activity is Activity.DEAD]
    by_others = {e.rank for e in dead if e.end.code in _ENDED_BY_OTHERS}
    dragged = by_others - _missed(context, [e for e in gone if e.rank not in by_others])
    ended = {e.rank for e in gone}
    lacked: dict[int, set[int]] = {}  # who ended in a collective, and which of these was not in it
    for rank in ended:
        last = last_record(context, rank)
        if last is not None and last.phase in (Phase.ISSUED, Phase.FAILED):
            lacked[rank] = ended.intersection(wait_graph.missing(context.case, last))
    # A rank that ended outside of any collective, or that no ended rank waits for, was first.
    dragged.update(
        rank
        for rank, others in lacked.items()
        if any(rank not in lacked.get(other, ()) for other in others)
    )
    return dragged


def _missed(context: Context, others: list[RankReport]) -> set[int]:
    """Ranks without which `others` were in a collective, if these only lost their connections.

    A rank that got a SIGTERM before the others lost it was not ended by a launcher because of them.
    """
    if not all(torch_errors.is_of_others(e.error.text) for e in others):
        return set()
    if not others:
        return set(context.reports)
    last = [record for e in others if (record := last_record(context, e.rank)) is not None]
    return {rank for record in last for rank in wait_graph.missing(context.case, record)}


def last_record(context: Context, rank: int) -> Collective | None:
    """The last thing that a rank issued."""
    records = context.collectives.of.get(rank, ())
    return records[-1] if records else None


def _time(context: Context, finding: Finding) -> int:
    """The earliest of its ranks' last known times."""
    records = [last_record(context, rank) for rank in finding.ranks]
    return min((max(record.issued_ns, record.done_ns) for record in records if record), default=0)
