"""What the ranks tell of one run: who started, who finished how, and what they wrote."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import CellFailed, DDPError
from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Diagnosis,
    Event,
    LineLeft,
    LineStopped,
    Output,
    OutputGroup,
    OutputItem,
    OutputKind,
    Pulse,
    RankExited,
    Ranks,
    RankSpawned,
    StepTable,
    Traceback,
    cut,
    format_ranks,
    name_ranks,
)
from ddp_notebook.session.findings import Found
from ddp_notebook.state.descriptions import exit_text
from ddp_notebook.state.fold import MISMATCH
from ddp_notebook.state.output import OutputLog, group, group_live, split_errors

if TYPE_CHECKING:
    from ddp_notebook.session.runs.stall_detector import StallDetector


@dataclass(frozen=True)
class CellResult:
    """How a cell ended, or how it stands while ranks are in it.

    `error` is what the magic raises, None when every rank finished it or is still in it.
    `diagnosis` says what was wrong, where that could be found out; also of a run that went well
    by luck.
    """

    tracebacks: tuple[OutputGroup, ...]
    outputs: tuple[OutputGroup, ...]
    withheld_bytes: Mapping[int, int]
    error: DDPError | None
    diagnosis: Diagnosis | None = None
    steps: StepTable | None = None
    """Before which collectives the ranks are paused, when they are."""
    pending: Ranks = ()
    """Ranks that are still in it: it was detached, is paused, is stuck, or could not be stopped."""

    def raise_for_error(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error


_EXITS = {"ok": "finished", "error": "raised", "interrupted": "interrupted"}


class CellRun:
    """Folds the events of one cell; `done` when every rank finished it or died.

    `number` is the notebook's prompt number, by which it is called; the cell's own by default.
    """

    def __init__(self, cell: int, ranks: Ranks, script: str = "", number: int = 0) -> None:
        self.cell = cell
        self.number = number or cell
        self.began_s = time.monotonic()
        self.sources: Mapping[str, str] = {}
        """The code that runs, by the name that its lines are shown under."""
        self.earlier: Mapping[str, str] = {}
        """The same of the cells before it, whose functions it may call."""
        self.pausing = False
        """Every rank pauses before each collective until it is stepped."""
        self._shown: dict[int, tuple[int, int]] = {}
        self.script = script
        """The file's name, when it is a script that runs."""
        self.ranks = ranks
        self.started: set[int] = set()
        self.finished: dict[int, CellFinished] = {}
        self.died: dict[int, RankExited] = {}
        self._replaced: set[int] = set()
        """Ranks that died and have a new process since."""
        self.lost: set[int] = set()
        self.withheld: dict[int, int] = {}
        self._logs = {rank: OutputLog() for rank in ranks}
        self._lock = threading.Lock()
        self.over = threading.Event()
        """Set when no rank is in it any more, or the session has ended under it."""
        self.detector: StallDetector | None = None
        """What checks whether its ranks make progress; None while nothing does."""
        self.stops: dict[int, LineStopped] = {}
        """Ranks that are paused at a line, and where."""
        self._left_stops: dict[int, int] = {}
        """By rank, the stop that it left last: it may leave one before the event of it is here."""
        self.changes = 0
        """Grows with every piece of output."""
        self.found = Found(self.title, self.number, lambda: self.done or self.over.is_set())
        """What is wrong with it."""

    def take(self, events: Sequence[Event]) -> None:
        """Take in what concerns this cell."""
        with self._lock:
            for event in events:
                if event.rank in self._logs:
                    self._take(event)
        if self.done:
            self.over.set()

    def _take(self, event: Event) -> None:
        match event:
            case Output() if event.cell == self.cell:
                self._logs[event.rank].add(event)
                self.changes += 1
            case CellStarted() if event.cell == self.cell:
                self.started.add(event.rank)
            case LineStopped() | LineLeft() if event.cell == self.cell:
                self._take_stop(event)
            case CellFinished() if event.cell == self.cell:
                self.finished[event.rank] = event
                self.stops.pop(event.rank, None)
                if event.withheld_bytes:
                    self.withheld[event.rank] = event.withheld_bytes
            case Pulse() if event.cell == self.cell and event.withheld_bytes:
                self.withheld[event.rank] = event.withheld_bytes
                self.changes += 1
            case RankExited() if event.rank not in self.finished:
                self.died[event.rank] = event
                self.stops.pop(event.rank, None)
            case RankSpawned() if event.rank in self.died:
                self._replaced.add(event.rank)

    def left(self, rank: int, stop: int) -> None:
        """`rank` was told to go on from this stop: it is paused there no more."""
        with self._lock:
            self._forget_stop(rank, stop)

    def _take_stop(self, event: LineStopped | LineLeft) -> None:
        if isinstance(event, LineLeft):
            self._forget_stop(event.rank, event.stop)
        elif event.stop > self._left_stops.get(event.rank, 0):
            self.stops[event.rank] = event

    def _forget_stop(self, rank: int, stop: int) -> None:
        self._left_stops[rank] = max(stop, self._left_stops.get(rank, 0))
        known = self.stops.get(rank)
        if known is not None and known.stop <= stop:
            del self.stops[rank]

    @property
    def paused(self) -> bool:
        """True while ranks are paused at a line, or pause before each collective."""
        return self.pausing or bool(self.stops)

    @property
    def title(self) -> str:
        """What it is called: ``cell 3``, ``train.py``."""
        return self.script or f"cell {self.number}"

    @property
    def heading(self) -> str:
        """The same at the beginning of a sentence."""
        return self.script or f"Cell {self.number}"

    @property
    def waits_for(self) -> str:
        """Which rank the others wait for, in words; empty for none."""
        detector = self.detector  # once: another thread may take it away
        late = detector.latest if detector is not None else None
        return late.headline if late is not None and late.findings else ""

    @property
    def left_ns(self) -> Mapping[int, int]:
        """When each rank left it that is not in it any more."""
        with self._lock:
            ends = (*self.died.values(), *self.finished.values())
            return {end.rank: end.heard_ns for end in ends}

    @property
    def exits(self) -> Mapping[str, Ranks]:
        """How ranks left it that are not in it any more: finished, raised, ..., in a word."""
        words: dict[str, list[int]] = {}
        with self._lock:
            for rank in self.ranks:
                end = self.finished.get(rank)
                if end is not None:
                    words.setdefault(_EXITS.get(end.outcome, end.outcome), []).append(rank)
                elif rank in self.died:
                    words.setdefault("died", []).append(rank)
                elif rank in self.lost:
                    words.setdefault("never began", []).append(rank)
        return {word: tuple(ranks) for word, ranks in words.items()}

    @property
    def failures(self) -> Mapping[int, str]:
        """How ranks left it that did not finish it, in a few words."""
        with self._lock:
            died = dict.fromkeys((*self.died, *self.lost), "its process ended")
            return died | {
                rank: "interrupted" if end.outcome == "interrupted" else self._raised(end)
                for rank, end in self.finished.items()
                if end.outcome != "ok"
            }

    @property
    def pending(self) -> Ranks:
        """Ranks that are still in the cell."""
        over = self.finished.keys() | self.died.keys() | self.lost
        return tuple(rank for rank in self.ranks if rank not in over)

    @property
    def done(self) -> bool:
        """True when no rank is in the cell any more."""
        return not self.pending

    def live_groups(self) -> tuple[OutputGroup, ...]:
        """The output so far, a rank that is only behind counted as equal; who raised, first."""
        with self._lock:
            groups = group_live({rank: log.items() for rank, log in self._logs.items()})
        return tuple(sorted(groups, key=lambda group: not _has_traceback(group)))

    def news(self) -> tuple[OutputGroup, ...]:
        """What was written since this was asked for last, as far as it is text."""
        with self._lock:
            fresh = {rank: self._fresh(rank, log.items()) for rank, log in self._logs.items()}
        return group({rank: items for rank, items in fresh.items() if items})

    def _fresh(self, rank: int, items: Sequence[OutputItem]) -> tuple[OutputItem, ...]:
        count, characters = self._shown.get(rank, (0, 0))
        self._shown[rank] = (len(items), len(items[-1].text) if items else 0)
        fresh = list(items[count:])
        if count and count <= len(items) and len(items[count - 1].text) > characters:
            fresh.insert(0, replace(items[count - 1], text=items[count - 1].text[characters:]))
        return tuple(fresh)

    def written(self, rank: int) -> str:
        """What `rank` wrote so far, as far as it is text and was sent here."""
        with self._lock:
            return self._written(rank)

    def _written(self, rank: int) -> str:
        items = self._logs[rank].items() if rank in self._logs else ()
        streams = (OutputKind.STDOUT, OutputKind.STDERR)
        return "".join(item.text for item in items if item.what in streams)

    def tracebacks(self) -> tuple[Traceback, ...]:
        """What its ranks raised so far, equal tracebacks as one."""
        return tuple(
            Traceback(raised.ranks, item.text)
            for raised in self._split()[0]
            for item in raised.items
        )

    def with_tracebacks(self, diagnosis: Diagnosis) -> Diagnosis:
        """`diagnosis` with what its ranks raised.

        Where a finding says what is wrong, that our guard refused a collective is no news: it was
        refused on ranks that did right, too.
        """
        refused = {rank for rank, end in self.finished.items() if end.ename == MISMATCH}
        shown = self.tracebacks()
        if diagnosis.wrong:
            shown = tuple(each for each in shown if not refused.issuperset(each.ranks))
        return replace(diagnosis, tracebacks=shown)

    def _split(self) -> tuple[tuple[OutputGroup, ...], tuple[OutputGroup, ...]]:
        """All tracebacks, and all that was written beside them."""
        with self._lock:
            groups = group({rank: log.items() for rank, log in self._logs.items()})
        return split_errors(groups)

    def result(self, interrupted: DDPError | None = None) -> CellResult:
        """How it ended, or how it stands."""
        tracebacks, outputs = self._split()
        error = interrupted or self.error()
        return CellResult(tracebacks, outputs, dict(self.withheld), error, pending=self.pending)

    def standing(self) -> CellResult:
        """How it stands while ranks are in it: what was raised, and what they wrote since that was
        asked last.
        """
        _, outputs = split_errors(self.news())
        return CellResult(self._split()[0], outputs, {}, None, pending=self.pending)

    def error(self) -> DDPError | None:
        """How it failed on the ranks that are not in it any more; None when it did not."""
        lines = [*self._deaths(), *self._exceptions()]
        if lost := self.lost - self.died.keys():
            lines.append(f"{name_ranks(lost)} did not run it: the process could not be reached")
        if not lines:
            return None
        failed = {r for r, f in self.finished.items() if f.outcome != "ok"}
        bad = tuple(sorted(failed | self.died.keys() | self.lost))
        good = tuple(rank for rank in self.ranks if rank not in (*bad, *self.pending))
        if good:
            lines.append(f"{name_ranks(good)} finished")
        text = "; ".join(lines) + "."
        if not self.script and any(f.ename == "SystemExit" for f in self.finished.values()):
            text += (
                " exit() ends the cell on a rank, not the rank: its process and its variables "
                "are still there. To end the ranks: %ddp_shutdown"
            )
        return CellFailed(text, bad)

    def _deaths(self) -> list[str]:
        lines = []
        for rank, exited in sorted(self.died.items()):
            # What stands in its log may be of anything that ran in its process, also before.
            logged = exited.last_words.strip().splitlines()[-1:]
            own = self.written(rank).strip().splitlines()[-1:]
            last = f" (it last wrote: {own[0].strip()})" if own else ""
            last = f" (its log ends: {logged[0].strip()})" if logged else last
            lines.append(f"rank {rank} died, {exit_text(exited.exit_code)}{last}")
        if self.script:
            return lines
        if dead := self.died.keys() - self._replaced:
            lines.append(f"bring back with %ddp_restart --ranks {format_ranks(dead)}")
        if self._replaced:
            a = "a new process" if len(self._replaced) == 1 else "new processes"
            has = "has" if len(self._replaced) == 1 else "have"
            lines.append(f"{name_ranks(self._replaced)} {has} {a} now, without variables")
        return lines

    def _exceptions(self) -> list[str]:
        same: dict[str, list[int]] = {}
        for rank, finished in self.finished.items():
            if finished.outcome == "interrupted":
                same.setdefault("interrupted", []).append(rank)
            elif finished.outcome == "error":
                same.setdefault(self._raised(finished), []).append(rank)
        if "interrupted" in same:
            were = "were" if len(same["interrupted"]) > 1 else "was"
            same[f"{were} interrupted"] = same.pop("interrupted")
        return [f"{name_ranks(ranks)} {what}" for what, ranks in same.items()]

    def _raised(self, finished: CellFinished) -> str:
        first = finished.evalue.strip().splitlines()[0] if finished.evalue.strip() else ""
        where = f"{self.script}, line" if self.script else "cell line"
        line = f" ({where} {finished.line})" if finished.line else ""
        return f"raised {finished.ename}{': ' if first else ''}{cut(first, 200)}{line}"


def _has_traceback(group: OutputGroup) -> bool:
    return any(item.what is OutputKind.ERROR for item in group.items)
