"""Ranks whose process ended: how, what is known of why, and how to get them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    same: dict[tuple[int | None, bool | None], list[RankReport]] = {}
    for report in _without_interrupted(dead, waiting):
        same.setdefault((report.end.code, _lacked_memory(report)), []).append(report)
    for (code, lacked), reports in same.items():
        ranks = tuple(report.rank for report in reports)
        others = f"; the others wait for {them(ranks)}, or lost their connection to {them(ranks)}"
        remedy, command = _bring_back(case, ranks)
        yield Finding(
            _category(code, lacked),
            ranks,
            f"{_how(code, lacked)}{meanwhile or (others if waiting else '')}",
            f"{'Use less memory per rank. ' if lacked else ''}{remedy}: {command}".removesuffix(
                ": "
            ),
            waiting,
            (*facts, *(line for e in reports for line in _known(e, last.get(e.rank, "")))),
            commands=(command,) if command else (),
        )


def died(exits: Mapping[int, RankExited], *, script: bool = False) -> tuple[Finding, ...]:
    """The same of ranks whose processes ended in a run, where no rank can be asked any more.

    Those of a `script` were its own.
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


def _without_interrupted(dead: Sequence[RankReport], waiting: Ranks) -> Iterator[RankReport]:
    """Without those that an interrupt of the user's ended, if no rank waits for them."""
    for report in dead:
        if (
            waiting
            or report.end.code != 1
            or report.end.last_words.split()[-1:] != ["KeyboardInterrupt"]
        ):
            yield report


def _lacked_memory(report: RankReport) -> bool | None:
    """Whether the kernel killed it for lack of memory; None of other ends, and where unknown."""
    if report.end.code != _SIGKILL or report.end.oom_kills < 0:
        return None
    return report.end.oom_kills > 0


def _category(code: int | None, lacked: bool | None) -> Category:
    if code == 0:
        return Category.EARLY_EXIT
    return Category.OOM_ON_ONE_RANK if lacked else Category.RANK_DIED


def _how(code: int | None, lacked: bool | None) -> str:
    if code is None:
        return "the process ended"
    if code != _SIGKILL:
        return exit_text(code)
    # SIGKILL has no sender that could be asked. The kernel counts what it killed for lack of memory
    # (oom_kill of the cgroup): a count that rose meanwhile is most likely this process.
    why = {
        True: "most likely by the kernel, which killed processes for lack of memory meanwhile",
        False: "by its own code, another program or a kill -9, and not by the kernel for "
        "lack of memory",
        None: "by the system for lack of memory, or by a kill -9",
    }
    return f"killed by signal 9 (SIGKILL): {why[lacked]}"


def _bring_back(case: Case, ranks: Ranks) -> tuple[str, str]:
    """The remedy, and the magic that does it; empty if none is needed."""
    if (
        case.script
        and not case.waiting
        and all(e.end.code == 0 for e in case.ranks if e.rank in ranks)
    ):
        return (
            "Let all ranks end together: where one may have to end, decide it on all ranks "
            "(all_reduce a flag), then dist.barrier()",
            "",
        )
    if case.script:
        if case.waiting:
            return "End the others too; the session's own ranks are not touched", "%ddp_abort"
        return "Run it again when that is corrected; the session's own ranks are not touched", ""
    # Ranks that wait for it in a cell or a script do not notice its end, and the new process can
    # join only when they are out.
    if any(other.rank in case.waiting and other.path for other in case.ranks):
        new = agree(ranks, "it a new process", "them new processes")
        return f"Free the others, which gives {new} too", "%ddp_abort"
    return f"Bring {them(ranks)} back", f"%ddp_restart --ranks {format_ranks(ranks)}"


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
