"""The state of one run: which ranks started, how they finished, and their output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
    by_value,
    cut,
    format_ranks,
    name_ranks,
    verb,
    without_ports,
)
from ddp_notebook.session.findings import Found
from ddp_notebook.state.descriptions import exit_text
from ddp_notebook.state.fold import MISMATCH
from ddp_notebook.state.line_stops import LinePause, LineStops
from ddp_notebook.state.output import OutputLog, group, group_live, split_errors

if TYPE_CHECKING:
    from ddp_notebook.session.processes.started_ranks import StartedRanks
    from ddp_notebook.session.runs.stall_detector import StallDetector


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
    pending: Ranks = ()
    """Ranks still in the run: it is detached, paused or stuck, or could not be stopped."""

    def raise_for_error(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a cell or a script is run and waited for: see `Session.run_cell`."""

    number: int = 0
    """The notebook's prompt number; 0: the run's own."""
    wait: str = "progress"
    hold: bool = False
    detach: bool = False
    started: Callable[[CellRun], None] | None = None
    """Called once the run has begun."""

    @property
    def patient(self) -> bool:
        """It goes on also when no rank makes progress."""
        return self.hold or self.wait == "forever"


_EXITS = {"ok": "finished", "error": "raised", "interrupted": "interrupted"}


class CellRun:
    """Folds the events of one cell; `done` once every rank has finished it or died.

    `number` is the notebook's prompt number, by which it is called; the cell's own by default.
    """

    def __init__(self, cell: int, ranks: Ranks, script: str = "", number: int = 0) -> None:
        self.cell = cell
        self.number = number or cell
        self.began_s = time.monotonic()
        self.sources: Mapping[str, str] = {}
        """The source code of the run, by the file name under which its lines are shown."""
        self.earlier: Mapping[str, str] = {}
        """The sources of earlier cells, whose functions it may call."""
        self.generation = 0
        """Which process group its ranks had when it began, as `Snapshot.generation` counts."""
        self.pausing = False
        """Every rank pauses before each collective until it is stepped."""
        self.script = script
        """The file's name, when it is a script that runs."""
        self.ranks = ranks
        self._shown: dict[int, tuple[int, int]] = {}
        """By rank, how many pieces of output `news` has given, and how long the last one was."""
        self.started: set[int] = set()
        self.finished: dict[int, CellFinished] = {}
        self.died: dict[int, RankExited] = {}
        self.restarted: Ranks = ()
        """Ranks whose process the user had ended, for a new one."""
        self._replaced: set[int] = set()
        """Ranks that died and have a new process since."""
        self.lost: set[int] = set()
        self.withheld: dict[int, int] = {}
        self._logs = {rank: OutputLog() for rank in ranks}
        self._lock = threading.Lock()
        self.over = threading.Event()
        """Set when no rank is in it any more, or the session has ended under it."""
        self.detector: StallDetector | None = None
        """The stall detector of this run; None while there is none."""
        self.started_ranks: StartedRanks | None = None
        """The ranks that its processes start themselves, if it is a script; else None."""
        self._lines = LineStops()
        self.changes = 0
        """Grows with every piece of output."""
        self.found = Found(self.title, self.number, lambda: self.done or self.over.is_set())
        """What is wrong with it."""

    def take(self, events: Sequence[Event]) -> None:
        """Process the events of this cell."""
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
                self._lines.take(event, event.heard_ns)
            case CellFinished() if event.cell == self.cell:
                self.finished[event.rank] = event
                self._lines.take(event, event.heard_ns)
                if event.withheld_bytes:
                    self.withheld[event.rank] = event.withheld_bytes
            case Pulse() if event.cell == self.cell and event.withheld_bytes:
                self.withheld[event.rank] = event.withheld_bytes
                self.changes += 1
            case RankExited() if event.rank not in self.finished and event.cell in (-1, self.cell):
                self.died[event.rank] = event
                self._lines.take(event, event.heard_ns)
            case RankSpawned() if event.rank in self.died:
                self._replaced.add(event.rank)

    @property
    def stops(self) -> dict[int, LineStopped]:
        """Ranks that are paused at a line, and where."""
        return self._lines.now

    @property
    def pauses(self) -> tuple[LinePause, ...]:
        """From when until when its ranks were paused at lines, the newest."""
        with self._lock:
            return self._lines.pauses

    @property
    def paused(self) -> bool:
        """True while ranks are paused at a line, or pause before each collective."""
        return self.pausing or bool(self.stops)

    @property
    def title(self) -> str:
        """Its title: ``cell 3``, ``train.py``."""
        return self.script or f"cell {self.number}"

    @property
    def heading(self) -> str:
        """The same at the beginning of a sentence."""
        return self.script or f"Cell {self.number}"

    @property
    def waits_for(self) -> str:
        """A text naming the rank that the others wait for, or that stands still; empty for none."""
        detector = self.detector  # once: another thread may take it away
        if detector is None:
            return ""
        return detector.latest.headline if detector.latest.findings else detector.standing

    @property
    def left_ns(self) -> Mapping[int, int]:
        """When each rank that has left the run did so."""
        with self._lock:
            ends = (*self.died.values(), *self.finished.values())
            return {end.rank: end.heard_ns for end in ends}

    @property
    def exits(self) -> Mapping[str, Ranks]:
        """How each rank that has left the run did so, in a word: finished, raised, ..."""
        with self._lock:
            ends = {r: _EXITS.get(end.outcome, end.outcome) for r, end in self.finished.items()}
            words = dict.fromkeys(self.lost, "never began") | dict.fromkeys(self.died, "died")
        return {word: ranks for ranks, word in by_value(words | ends)}

    @property
    def failures(self) -> Mapping[int, str]:
        """How the ranks that did not finish the run left it, in a few words."""
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
        """The output so far, failed ranks first; a rank that is only behind counts as equal."""
        with self._lock:
            groups = group_live({rank: log.items() for rank, log in self._logs.items()})
        return tuple(sorted(groups, key=lambda group: not _has_traceback(group)))

    def news(self) -> tuple[OutputGroup, ...]:
        """The text output since the last call."""
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
        """The text output of `rank` received so far."""
        with self._lock:
            return self._written(rank)

    def _written(self, rank: int) -> str:
        items = self._logs[rank].items() if rank in self._logs else ()
        streams = (OutputKind.STDOUT, OutputKind.STDERR)
        return "".join(item.text for item in items if item.what in streams)

    def tracebacks(self) -> tuple[Traceback, ...]:
        """The errors of its ranks so far; equal tracebacks are merged."""
        return tuple(
            Traceback(raised.ranks, item.text)
            for raised in self._split()[0]
            for item in raised.items
        )

    def with_tracebacks(self, diagnosis: Diagnosis) -> Diagnosis:
        """`diagnosis` with the tracebacks of its ranks.

        If a finding names the problem, tracebacks of our guard are left out: it also refuses
        collectives on ranks that are correct.
        """
        refused = {rank for rank, end in self.finished.items() if end.ename == MISMATCH}
        shown = self.tracebacks()
        if diagnosis.wrong:
            shown = tuple(
                traceback for traceback in shown if not refused.issuperset(traceback.ranks)
            )
        return replace(diagnosis, tracebacks=shown)

    def _split(self) -> tuple[tuple[OutputGroup, ...], tuple[OutputGroup, ...]]:
        """All tracebacks, and all other output."""
        with self._lock:
            groups = group({rank: log.items() for rank, log in self._logs.items()})
        return split_errors(groups)

    def result(self, interrupted: DDPError | None = None) -> CellResult:
        """How it ended, or how it stands."""
        tracebacks, outputs = self._split()
        error = interrupted or self.error()
        return CellResult(tracebacks, outputs, dict(self.withheld), error, pending=self.pending)

    def standing(self) -> CellResult:
        """The current state while ranks are in it: errors, and the output since the last call."""
        _, outputs = split_errors(self.news())
        return CellResult(self._split()[0], outputs, {}, None, pending=self.pending)

    def error(self) -> DDPError | None:
        """How it failed on the ranks that have left it; None if it did not."""
        deaths, others = self._deaths(), []
        if lost := self.lost - self.died.keys():
            others.append(f"{name_ranks(lost)} did not run it: the process could not be reached")
        if not (raised := self._exceptions()) and not deaths and not others:
            return None
        failed = {r for r, f in self.finished.items() if f.outcome != "ok"}
        bad = tuple(sorted(failed | self.died.keys() | self.lost))
        good = tuple(rank for rank in self.ranks if rank not in (*bad, *self.pending))
        if good:
            others.append(f"{name_ranks(good)} finished")
        text, brief = (
            f"{'; '.join([*deaths, *lines, *others])}.{self._about_exit()}"
            for lines in (raised, self._exceptions(brief=True))
        )
        return CellFailed(text, bad, brief)

    def _about_exit(self) -> str:
        """What exit() does in a cell, if a rank has called it there."""
        if self.script or all(f.ename != "SystemExit" for f in self.finished.values()):
            return ""
        return (
            " exit() ends the cell on a rank, not the rank: its process and its variables "
            "are still there. To end the ranks: %ddp_shutdown"
        )

    def _deaths(self) -> list[str]:
        lines = []
        if ended := tuple(rank for rank in self.restarted if rank not in self.pending):
            lines.append(f"{verb(ended, 'was', 'were')} ended by %ddp_restart")
        for rank, exited in sorted(self.died.items()):
            if rank in self.restarted:
                continue
            # Its log may contain output of anything that ran in its process, also of earlier runs.
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
            new = verb(self._replaced, "has a new process", "have new processes")
            lines.append(f"{new} now, without variables")
        return lines

    def _exceptions(self, brief: bool = False) -> list[str]:
        ends = self.finished.values()
        raised = {end.rank: self._raised(end, brief) for end in ends if end.outcome == "error"}
        lines = [f"{name_ranks(ranks)} {what}" for ranks, what in by_value(raised)]
        # Of ranks that were ended for a new process, some are interrupted before.
        left = [end.rank for end in ends if end.outcome == "interrupted"]
        if stopped := tuple(rank for rank in left if rank not in self.restarted):
            lines.append(f"{verb(stopped, 'was', 'were')} interrupted")
        return lines

    def _raised(self, finished: CellFinished, brief: bool = False) -> str:
        message = without_ports(finished.evalue).strip()
        told_above = brief and finished.ename != "SystemExit"  # which has no traceback
        first = message.splitlines()[0] if message and not told_above else ""
        where = f"{self.script}, line" if self.script else "cell line"
        line = f" ({where} {finished.line})" if finished.line else ""
        return f"raised {finished.ename}{': ' if first else ''}{cut(first, 200)}{line}"


def _has_traceback(group: OutputGroup) -> bool:
    return any(item.what is OutputKind.ERROR for item in group.items)
