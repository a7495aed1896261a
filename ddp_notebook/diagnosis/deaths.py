"""Ranks whose process ended: how, what is known of why, and how to get them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Finding,
    ProcessEnd,
    RankExited,
    RankReport,
    Ranks,
    agree,
    by_value,
    exit_text,
    format_bytes,
    format_ranks,
    them,
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
    for ranks, (category, how) in by_value({e.rank: _kind(e.end) for e in dead}):
        others = f"; the others wait for {them(ranks)}, or lost their connection to {them(ranks)}"
        remedy, commands = _bring_back(case, ranks)
        if category is Category.OOM_ON_ONE_RANK:
            remedy = f"Use less memory per rank. {remedy}"
        yield Finding(
            category,
            ranks,
            f"{how}{meanwhile or (others if waiting else '')}",
            remedy,
            waiting,
            (
                *facts,
                *chain.from_iterable(
                    _known(e, last.get(e.rank, "")) for e in dead if e.rank in ranks
                ),
            ),
            commands=commands,
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


def _kind(end: ProcessEnd) -> tuple[Category, str]:
    """Return the category of an end, and how it was in words."""
    if end.code is None:
        return Category.RANK_DIED, "the process ended"
    if end.code != _SIGKILL:
        return Category.RANK_DIED if end.code else Category.EARLY_EXIT, exit_text(end.code)
    # SIGKILL has no sender that could be asked. The kernel counts what it killed for lack of memory
    # (oom_kill of the cgroup): a count that rose meanwhile is most likely this process.
    category, why = Category.RANK_DIED, "by the system for lack of memory, or by a kill -9"
    if end.oom_kills > 0:
        category = Category.OOM_ON_ONE_RANK
        why = "most likely by the kernel, which killed processes for lack of memory meanwhile"
    elif end.oom_kills == 0:
        why = "by its own code, another program or a kill -9, and not by the kernel for "
        why += "lack of memory"
    return category, f"killed by signal 9 (SIGKILL): {why}"


def _bring_back(case: Case, ranks: Ranks) -> tuple[str, tuple[str, ...]]:
    """Return the remedy, and the magics that do it; none if none is needed."""
    if case.script:
        if case.waiting:
            return (
                "End the others too; the session's own ranks are not touched: %ddp_abort",
                ("%ddp_abort",),
            )
        if all(e.end.code == 0 for e in case.ranks if e.rank in ranks):
            return (
                "Let all ranks end together: where one may have to end, decide it on all ranks "
                "(all_reduce a flag), then dist.barrier()",
                (),
            )
        return "Run it again when that is corrected; the session's own ranks are not touched", ()
    # Ranks that wait for it in a cell or a script do not notice its end, and the new process can
    # join only when they are out.
    if any(other.rank in case.waiting and other.path for other in case.ranks):
        new = agree(ranks, "it a new process", "them new processes")
        return f"Free the others, which gives {new} too: %ddp_abort", ("%ddp_abort",)
    restart = f"%ddp_restart --ranks {format_ranks(ranks)}"
    return f"Bring {them(ranks)} back: {restart}", (restart,)


def _known(report: RankReport, last: str) -> Iterator[str]:
    """Lines of evidence about one rank."""
    who = f"rank {report.rank}"
    how = exit_text(code) if (code := report.end.code) is not None else "the process ended"
    at = f" at {report.path[-1]}" if report.path else ""
    yield f"{who}: {how}{at}{f', after {last}' if last else ''}"
    if report.end.code == _SIGKILL:
        if report.end.peak_bytes:
            yield f"{who} used {format_bytes(report.end.peak_bytes)} of memory at most"
        if (kills := report.end.oom_kills) >= 0:
            processes = "process" if kills == 1 else "processes"
            yield (
                f"the kernel killed {kills or 'no'} {processes} for lack of memory meanwhile "
                "(oom_kill)"
            )
    for line in report.end.last_words.strip().splitlines()[-1:]:
        yield f"the last line in the log of {who}: {line.strip()}"
