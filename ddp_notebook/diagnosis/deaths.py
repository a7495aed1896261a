"""Ranks whose process ended: how, what is known of why, and how to get them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import (
    Activity,
    Case,
    Finding,
    ProcessEnd,
    RankExited,
    RankReport,
    Ranks,
    by_value,
    exit_text,
    format_bytes,
)

_SIGKILL = -9


def deaths(
    case: Case,
    dead: Sequence[RankReport],
    waiting: Ranks,
    last: Mapping[int, str] = MappingProxyType({}),
    meanwhile: str = "",
    facts: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """A finding for all that ended in the same way.

    `last` is what ranks did last, `meanwhile` what others do since, in words; `facts` come first.
    """
    if not waiting:  # who was ended by an interrupt of the user's is not missed
        interrupted = (1, ["KeyboardInterrupt"])
        dead = [e for e in dead if (e.end.code, e.end.last_words.split()[-1:]) != interrupted]
    for ranks, (kind, code) in by_value({e.rank: _kind(e.end) for e in dead}):
        after = meanwhile
        if waiting and not meanwhile:
            after = catalogue.words("rank-died.ended.needed", ranks=ranks, waiting=waiting)
        yield catalogue.finding(
            kind,
            ranks,
            waiting=waiting,
            evidence=(
                *facts,
                *chain.from_iterable(
                    _known(e, last.get(e.rank, "")) for e in dead if e.rank in ranks
                ),
            ),
            how=exit_text(code) if code is not None else "",
            meanwhile=after,
            cure=_bring_back(case, ranks),
        )


def died(exits: Mapping[int, RankExited], *, script: bool = False) -> tuple[Finding, ...]:
    """Return findings for processes that ended in a run, where no rank can be asked any more.

    The processes of a `script` were its own.
    """
    dead = [
        RankReport(
            rank,
            Activity.DEAD,
            end=ProcessEnd(
                code=exited.exit_code,
                last_words=exited.last_words,
                peak_bytes=exited.peak_bytes,
                oom_kills=exited.oom_kills,
            ),
        )
        for rank, exited in sorted(exits.items())
    ]
    return tuple(deaths(Case(tuple(dead), script=script), dead, ()))


def _kind(end: ProcessEnd) -> tuple[str, int | None]:
    """Return the kind of an end, and its exit code."""
    kind = "rank-died.exited"
    if end.code is None:
        kind = "rank-died.ended"
    elif end.code == 0:
        kind = "early-exit.exited"
    elif end.code == _SIGKILL:
        # SIGKILL has no sender that could be asked. The kernel counts what it killed for lack of
        # memory (oom_kill of the cgroup): a count that rose meanwhile is most likely this process.
        kind = "rank-died.killed" if end.oom_kills else "rank-died.killed-by-someone"
        kind = "oom-on-one-rank.killed" if end.oom_kills > 0 else kind
    elif end.code < 0:
        kind = "rank-died.by-signal"
    return kind, end.code


def _bring_back(case: Case, ranks: Ranks) -> str:
    """Return how to get ranks back."""
    # Ranks that wait for it in a cell or a script do not notice its end, and the new process can
    # join only when they are out.
    in_a_run = any(other.rank in case.waiting and other.path for other in case.ranks)
    key = "rank-died.ended.abort" if in_a_run else "rank-died.ended.restart"
    if case.script and case.waiting:
        key = "rank-died.ended.end-script"
    elif case.script:
        well = all(e.end.code == 0 for e in case.ranks if e.rank in ranks)
        key = "rank-died.ended.end-together" if well else "rank-died.ended.run-again"
    return catalogue.words(key, ranks=ranks)


def _known(report: RankReport, last: str) -> Iterator[str]:
    """Lines of evidence about one rank."""
    who = f"rank {report.rank}"
    how = exit_text(code) if (code := report.end.code) is not None else "the process ended"
    at = f" at {report.path[-1]}" if report.path else ""
    yield f"{who}: {how}{at}{f', after {last}' if last else ''}"
    if report.end.code == _SIGKILL:
        if report.end.peak_bytes:
            yield f"{who}: used at most {format_bytes(report.end.peak_bytes)} of memory"
        if (kills := report.end.oom_kills) >= 0:
            yield catalogue.words("rank-died.killed.kills", kills=kills)
    for line in report.end.last_words.strip().splitlines()[-1:]:
        yield f"{who}: its log ends with: {line.strip()}"
