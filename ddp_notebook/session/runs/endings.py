"""How a run ended, in words: what failed, who was interrupted, who no longer makes progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.errors import CellFailed, CellInterrupted, DDPError, Stuck
from ddp_notebook.model import (
    CellFinished,
    Diagnosis,
    Ledger,
    OutputGroup,
    Ranks,
    Snapshot,
    StepTable,
    by_value,
    cut,
    exit_text,
    format_ranks,
    name_ranks,
    them,
    verb,
    without_ports,
)
from ddp_notebook.session.guards import doings

if TYPE_CHECKING:
    from ddp_notebook.session.runs.run_events import RunEvents


@dataclass(frozen=True)
class CellResult:
    """The result of a cell, or its current state while ranks are in it.

    `error` is what the magic raises, None if every rank finished it or is still in it. `diagnosis`
    is set if a problem was found, also for a run that succeeded only by luck.
    """

    tracebacks: tuple[OutputGroup, ...]
    outputs: tuple[OutputGroup, ...]
    withheld_bytes: Mapping[int, int]
    error: DDPError | None
    diagnosis: Diagnosis | None = None
    steps: StepTable | None = None
    """Before which collectives the ranks are paused, when they are."""
    ledger: Ledger | None = None
    """One training step of it, if that was asked for."""
    pending: Ranks = ()
    """Ranks still in the run: it is detached, paused or stuck, or could not be stopped."""

    def raise_for_error(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error


_EXITS = {"ok": "finished", "error": "raised", "interrupted": "interrupted"}


def exits(events: RunEvents) -> Mapping[str, Ranks]:
    """Return how each rank that has left the run did so, in a word: finished, raised, ..."""
    words = dict.fromkeys(events.unreached, "never began") | dict.fromkeys(events.died, "died")
    for rank, end in tuple(events.finished.items()):
        words[rank] = _EXITS.get(end.outcome, end.outcome)
    return {word: ranks for ranks, word in by_value(words)}


def failures(events: RunEvents) -> Mapping[int, str]:
    """Return how each rank that did not finish the run left it, in a few words."""
    texts = dict.fromkeys((*events.died, *events.unreached), "its process ended")
    for rank, end in tuple(events.finished.items()):
        if end.outcome != "ok":
            texts[rank] = "interrupted" if end.outcome == "interrupted" else _raised(events, end)
    return texts


def failure(events: RunEvents) -> CellFailed | None:
    """Return the error of a run that failed on ranks that have left it; None if it did not."""
    ends = tuple(events.finished.values())
    bad = {end.rank for end in ends if end.outcome != "ok"} | events.died.keys() | events.unreached
    if not bad:
        return None
    deaths, others = _deaths(events), []
    if lost := events.unreached - events.died.keys():
        others.append(f"{name_ranks(lost)} did not run it: the process could not be reached")
    errors = [end for end in ends if end.outcome == "error"]
    # Of ranks that were ended for a new process, some are interrupted before.
    left = [end.rank for end in ends if end.outcome == "interrupted"]
    stopped = tuple(rank for rank in left if rank not in events.restarted)
    if not (errors or stopped or deaths or others):
        return None
    if good := tuple(
        rank for rank in events.ranks if rank not in bad and rank not in events.pending
    ):
        others.append(f"{name_ranks(good)} finished")
    if stopped:
        others.insert(0, f"{verb(stopped, 'was', 'were')} interrupted")

    def said(*, brief: bool) -> str:
        texts = {end.rank: _raised(events, end, brief=brief) for end in errors}
        raised = (f"{name_ranks(ranks)} {what}" for ranks, what in by_value(texts))
        return f"{'; '.join([*deaths, *raised, *others])}.{about_exit}"

    about_exit = ""
    if not events.script and any(end.ename == "SystemExit" for end in ends):
        about_exit = (
            " exit() ends the cell on a rank, not the rank: its process and its variables "
            "stay. To end the ranks: %ddp_shutdown"
        )
    return CellFailed(said(brief=False), tuple(sorted(bad)), said(brief=True))


def _deaths(events: RunEvents) -> list[str]:
    lines = []
    if ended := tuple(rank for rank in events.restarted if rank not in events.pending):
        lines.append(f"{verb(ended, 'was', 'were')} ended by %ddp_restart")
    for rank, exited in sorted(events.died.items()):
        if rank in events.restarted:
            continue
        # Its log may contain output of anything that ran in its process, also of earlier runs.
        logged = exited.last_words.strip().splitlines()[-1:]
        own = events.written(rank).strip().splitlines()[-1:]
        last = f" (it last wrote: {own[0].strip()})" if own else ""
        last = f" (its log ends: {logged[0].strip()})" if logged else last
        lines.append(f"rank {rank} died, {exit_text(exited.exit_code)}{last}")
    if events.script:
        return lines
    if dead := events.died.keys() - events.replaced:
        lines.append(f"bring back with %ddp_restart --ranks {format_ranks(dead)}")
    if events.replaced:
        new = verb(events.replaced, "has a new process", "have new processes")
        lines.append(f"{new} now, without variables")
    return lines


def _raised(events: RunEvents, end: CellFinished, *, brief: bool = False) -> str:
    message = without_ports(end.evalue).strip()
    told_above = brief and end.ename != "SystemExit"  # which has no traceback
    first = message.splitlines()[0] if message and not told_above else ""
    line = f" ({_where(events)} {end.line})" if end.line else ""
    return f"raised {end.ename}{': ' if first else ''}{cut(first, 200)}{line}"


def _where(events: RunEvents) -> str:
    return f"{events.script}, line" if events.script else "cell line"


def interruption(events: RunEvents, snapshot: Snapshot) -> CellInterrupted:
    """Return the error of a run that the user interrupted: who stopped, who is still in it."""
    ends, lines = tuple(events.finished.values()), []
    at = sorted({end.line for end in ends if end.outcome == "interrupted"} - {0})
    place = f"{_where(events)}{'s' * (len(at) > 1)}"
    where = f" at {place} {', '.join(map(str, at))}" if at else ""
    ways = {"interrupted": f"stopped{where}", "ok": "had finished", "error": "had raised an error"}
    for outcome, what in ways.items():
        if left := tuple(end.rank for end in ends if end.outcome == outcome):
            lines.append(f"{name_ranks(left)} {what}")
    if events.died:
        lines.append(f"{name_ranks(events.died)} died")
    begun = tuple(sorted(events.started.intersection(events.pending)))
    lines += [f"{name_ranks(ranks)} still in {doing}" for ranks, doing in doings(begun, snapshot)]
    if begun:
        lines.append(
            f"get {them(begun)} back with %ddp_abort, or with new processes: %ddp_restart --ranks "
            f"{format_ranks(begun)}"
        )
    if late := set(events.pending) - events.started:
        lines.append(f"{verb(late, 'has', 'have')} not begun it yet, and will be stopped then")
    return CellInterrupted(f"The cell was interrupted: {'; '.join(lines)}.", events.pending)


def stuck(diagnosis: Diagnosis) -> Stuck:
    """Return the error of a run whose ranks no longer make progress."""
    lines = [f"{diagnosis.headline.removesuffix('.')}."]
    if diagnosis.findings:
        lines.append(f"Fix: {diagnosis.findings[0].remedy}")
    lines.append(
        "The ranks stay as they are. Look closer: %ddp_why. Free them: %ddp_abort (variables stay)"
    )
    return Stuck("\n".join(lines), diagnosis)
