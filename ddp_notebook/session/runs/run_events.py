"""The events of the ranks of one run: who is in it, how each left it, and what it wrote.

A fold of the ranks' events, in the order in which they arrive. It asks no rank and decides nothing.
Events arrive on the thread that receives them; any thread may read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    Traceback,
)
from ddp_notebook.model.fold import MISMATCH, LinePause, LineStops
from ddp_notebook.views.output_log import OutputLog, group, group_live, split_errors


class RunEvents:
    """The events of the ranks of a run, folded; `cell` is its number, by which events name it."""

    def __init__(self, cell: int, ranks: Ranks, script: str = "") -> None:
        self.cell = cell
        self.ranks = ranks
        self.script = script
        """The file's name, when it is a script that runs."""
        self.lock = threading.Lock()
        """Held while events are folded. Whoever decides by `pending` holds it meanwhile: so no
        rank leaves between the look and the decision."""
        self._inside = dict.fromkeys(ranks)
        self.pending = ranks
        """Ranks that are still in the run."""
        self.started: set[int] = set()
        self.finished: dict[int, CellFinished] = {}
        self.died: dict[int, RankExited] = {}
        self.unreached: set[int] = set()
        """Ranks that it could not be sent to."""
        self.replaced: set[int] = set()
        """Ranks that died and have a new process since."""
        self.restarted: Ranks = ()
        """Ranks whose process the user had ended, for a new one."""
        self.withheld: dict[int, int] = {}
        """By rank, how many bytes of its output were not sent."""
        self.changes = 0
        """Grows with every piece of output."""
        self._logs = {rank: OutputLog() for rank in ranks}
        self._shown: dict[int, tuple[int, int]] = {}
        """By rank, how many pieces of output `news` has given, and how long the last one was."""
        self._lines = LineStops()

    # -- who is in it --------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True when no rank is in the run any more."""
        return not self.pending

    @property
    def stops(self) -> dict[int, LineStopped]:
        """Ranks that are paused at a line, and where."""
        return self._lines.now

    @property
    def pauses(self) -> tuple[LinePause, ...]:
        """From when until when its ranks were paused at lines, the newest."""
        with self.lock:
            return self._lines.pauses

    @property
    def left_ns(self) -> Mapping[int, int]:
        """When each rank that has left the run did so."""
        with self.lock:
            ends = (*self.died.values(), *self.finished.values())
        return {end.rank: end.heard_ns for end in ends}

    # -- the fold ------------------------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        """Fold events in; those of other ranks and other runs change nothing."""
        with self.lock:
            for event in events:
                rank = event.rank
                if rank not in self._logs:
                    continue
                match event:
                    case Output() if event.cell == self.cell:
                        self._logs[rank].add(event)
                        self.changes += 1
                    case CellStarted() if event.cell == self.cell:
                        self.started.add(rank)
                    case LineStopped() | LineLeft() if event.cell == self.cell:
                        self._lines.take(event, event.heard_ns)
                    case CellFinished() if event.cell == self.cell:
                        self.finished[rank] = event
                        self._left(event)
                        if event.withheld_bytes:
                            self.withheld[rank] = event.withheld_bytes
                    case Pulse() if event.cell == self.cell and event.withheld_bytes:
                        self.withheld[rank] = event.withheld_bytes
                        self.changes += 1
                    # A process that ends after its rank has finished the run is no death in it.
                    case RankExited() if rank not in self.finished and event.cell in (
                        -1,
                        self.cell,
                    ):
                        self.died[rank] = event
                        self._left(event)
                    case RankSpawned() if rank in self.died:
                        self.replaced.add(rank)

    def _left(self, event: CellFinished | RankExited) -> None:
        if event.rank in self.stops:
            self._lines.take(event, event.heard_ns)
        self._inside.pop(event.rank, None)
        self.pending = tuple(self._inside)

    def not_reached(self, ranks: Ranks) -> None:
        """Note ranks that the run could not be sent to: they are not in it."""
        with self.lock:
            self.unreached.update(ranks)
            for rank in ranks:
                self._inside.pop(rank, None)
            self.pending = tuple(self._inside)

    # -- what they wrote -----------------------------------------------------------------

    def live_groups(self) -> tuple[OutputGroup, ...]:
        """Return the output so far, failed ranks first; a rank only behind counts as equal."""
        with self.lock:
            groups = group_live({rank: log.items() for rank, log in self._logs.items()})

        def failed(group: OutputGroup) -> bool:
            return any(item.what is OutputKind.ERROR for item in group.items)

        return tuple(sorted(groups, key=lambda group: not failed(group)))

    def news(self) -> tuple[OutputGroup, ...]:
        """Return the text output since the last call."""
        fresh: dict[int, tuple[OutputItem, ...]] = {}
        with self.lock:
            for rank, log in self._logs.items():
                items = log.items()
                count, characters = self._shown.get(rank, (0, 0))
                self._shown[rank] = (len(items), len(items[-1].text) if items else 0)
                new = tuple(items[count:])
                # The last piece that was shown may have grown since: a log adds to it while it can.
                if count and count <= len(items) and len(items[count - 1].text) > characters:
                    last = items[count - 1]
                    new = (replace(last, text=last.text[characters:]), *new)
                if new:
                    fresh[rank] = new
        return group(fresh)

    def written(self, rank: int) -> str:
        """Return the text output of `rank` received so far."""
        with self.lock:
            items = self._logs[rank].items() if rank in self._logs else ()
        streams = (OutputKind.STDOUT, OutputKind.STDERR)
        return "".join(item.text for item in items if item.what in streams)

    def errors_and_output(self) -> tuple[tuple[OutputGroup, ...], tuple[OutputGroup, ...]]:
        """Return all tracebacks, and all other output."""
        with self.lock:
            groups = group({rank: log.items() for rank, log in self._logs.items()})
        return split_errors(groups)

    def tracebacks(self) -> tuple[Traceback, ...]:
        """Return the errors of its ranks so far; equal tracebacks are merged."""
        return tuple(
            Traceback(raised.ranks, item.text)
            for raised in self.errors_and_output()[0]
            for item in raised.items
        )

    def with_tracebacks(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return `diagnosis` with the tracebacks of its ranks.

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
