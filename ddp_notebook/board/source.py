"""A session's state for a live board: read often, without asking the ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ddp_notebook.board import tab_contents
from ddp_notebook.board.timeline import Tails
from ddp_notebook.errors import DDPError
from ddp_notebook.launch.gpu_use import GpuUse
from ddp_notebook.model import Collective, Diagnosis, Place, RankState, Snapshot, Status
from ddp_notebook.model.fold import LinePause, state_at
from ddp_notebook.session.stepping import source_of
from ddp_notebook.views.board_rows import BoardFacts
from ddp_notebook.views.step_rows import of_run

if TYPE_CHECKING:
    from ddp_notebook.session.runs.run import CellRun
    from ddp_notebook.session.session import Session


_rank_key = attrgetter(
    *(f.name for f in fields(RankState) if f.name not in ("cell", "heard_ns", "since_ns"))
)
"""A key of what is shown of a rank, without ages."""
_session_key = attrgetter(
    *(f.name for f in fields(Snapshot) if f.name not in ("ranks", "taken_ns"))
)
"""A key of what is shown of the session besides its ranks, without its age."""


def ended_badly(run: CellRun | None) -> bool:
    """Return True if a run may have ended with a fault; not where its ranks were freed."""
    ended = run.events.finished.values() if run is not None else ()
    freed = any(end.outcome == "interrupted" for end in ended)
    return not freed and any(end.trained or end.outcome != "ok" for end in ended)


def _raised_in(run: CellRun | None, snapshot: Snapshot) -> dict[int, Sequence[Place]]:
    """Return the lines at which ranks raised in the run; none once they were freed, or are new."""
    if run is None or run.generation != snapshot.generation:
        return {}
    return {rank: end.path for rank, end in run.events.finished.items() if end.outcome == "error"}


class BoardSource:
    """Follows a session. For one thread at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tails = Tails()
        self._key: object = None
        self._still_since_s = time.monotonic()
        self._asked = False
        self._old: Diagnosis | None = None
        self._found: Diagnosis | None = None
        self._stops_key: object = None
        self._stops: dict[str, Any] = {}
        self._gpu_use = GpuUse()

    @property
    def run(self) -> int:
        """The number of the current or last run; 0 for none."""
        return self._tails.run

    @property
    def title(self) -> str:
        """The title of that run."""
        run = self._session.runs.current
        return run.title if run is not None and run.cell == self.run else ""

    def began_us(self, epoch_ns: int) -> int:
        """When that run began, in microseconds since the epoch."""
        run = self._session.runs.current
        return (int(run.began_s * 1e9) - epoch_ns) // 1000 if run is not None else 0

    @property
    def checking(self) -> bool:
        """True while a run that has ended is examined: whether it is wrong is not known yet."""
        run = self._session.runs.current
        if run is None or run.found.judged or not (run.done and ended_badly(run)):
            return False
        ended_ns = max(run.events.left_ns.values(), default=0)
        # By then a run that has ended is examined, or nothing waits for it.
        return time.monotonic_ns() - ended_ns < 10 * 1_000_000_000

    @property
    def left_ns(self) -> Mapping[int, int]:
        """When each rank that has left the run did so."""
        run = self._session.runs.current
        return run.events.left_ns if run is not None and run.cell == self.run else {}

    @property
    def pauses(self) -> Sequence[LinePause]:
        """From when until when ranks were paused at lines in that run."""
        run = self._session.runs.current
        return run.events.pauses if run is not None and run.cell == self.run else ()

    @property
    def gpu_held(self) -> Mapping[int, int]:
        """The GPU memory that each rank holds, in bytes, as last known."""
        return self._gpu_use.held

    def look(self) -> tuple[BoardFacts, tuple[Collective, ...]]:
        """The current state, and the collectives that are new or have changed."""
        session = self._session
        snapshot, run, logs = session.record.snapshot, session.runs.current, session.pool.logs
        news: tuple[Collective, ...] = ()
        if run is not None and logs is not None:
            # The collective logs are closed from another thread when the session ends.
            with contextlib.suppress(ValueError):
                news = of_run(self._tails.follow(logs, run), run.events.left_ns)
        diagnosis = self._diagnosis(snapshot, bool(news))
        processes = session.pool.processes
        if processes is not None and processes.far is None and (gpus := processes.devices.gpus):
            uses = self._gpu_use.lines(gpus, {state.pid: state.rank for state in snapshot.ranks})
            snapshot = replace(snapshot, notes=(*snapshot.notes, *uses))
        store, stops = session.setup.store, session.runs.stops
        facts = BoardFacts(snapshot, diagnosis=diagnosis, store=store, stops=stops)
        if run is None:
            return facts, news
        own = run.started_ranks  # which the script started itself: they are shown in its place
        if own is not None and (started := own.shown(run.title, diagnosis)) is not None:
            return started, news
        facts = replace(
            facts,
            collectives=self._tails.collectives,
            pending=run.pending,
            sources=run.sources,
            raised=_raised_in(run, snapshot),
            members=run.ranks,
        )
        return facts, news

    def stops(self) -> dict[str, Any]:
        """The lines at which ranks are paused, with the code around and its breakpoints."""
        stops, breakpoints = self._session.runs.stops, self._session.breakpoints.known
        key = (stops, breakpoints)
        if key != self._stops_key:
            self._stops_key, self._stops = key, {}
            run = next((run for run in self._session.runs.all[::-1] if run.stops), None)
            # The collective logs are closed from another thread when the session ends.
            with contextlib.suppress(ValueError):
                if stops and run is not None:
                    title = run.step_table().title
                    texts = {stop.file: source_of(run, stop.file) for stop in stops.values()}
                    self._stops = tab_contents.source_json(title, stops, texts, breakpoints)
        return self._stops

    def key(self) -> object:
        """A key that changes whenever a board would show something else, apart from ages.

        Takes some microseconds; a look takes a thousand.
        """
        session = self._session
        snapshot, run, logs = session.record.snapshot, session.runs.current, session.pool.logs
        # The collective logs are mapped files: how much was written is cheap to read.
        written: tuple[tuple[int, int], ...] = ()
        if run is not None and logs is not None:
            with contextlib.suppress(ValueError):
                # Of a run without collectives nothing is drawn, whichever it is.
                written = tuple(each for each in logs.written(run.ranks) if each[1])
        known = (*map(_rank_key, snapshot.ranks), _session_key(snapshot))
        pending = run.pending if run is not None else ()
        stops = tuple((rank, stop.stop) for rank, stop in session.runs.stops.items())
        started = run.started_ranks if run is not None and not run.done else None
        looked = started.looked if started is not None else 0
        return known, pending, written, self._found, session.benchmarks.current, stops, looked

    def past(self, at_ns: int) -> Snapshot:
        """The state as it was at `at_ns`, as far back as it is kept."""
        now, kept = self._session.record.kept()
        return now if at_ns >= now.taken_ns else state_at(kept.start, kept.moments, at_ns)

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        """The user asked why; `diagnosis` is the answer."""
        self._found = diagnosis

    # -- what is wrong -----------------------------------------------------------------

    def _diagnosis(self, snapshot: Snapshot, moved: bool) -> Diagnosis | None:
        """The findings about the current state; looked for again while it does not change."""
        run = self._session.runs.current
        detector = run.detector if run is not None else None
        key = tuple((s.status, s.stage, s.entering, s.cause) for s in snapshot.ranks)
        if moved or key != self._key:
            # What was found is of the past. What a detector has found when the board is opened
            # holds until ranks move.
            opened = self._key is None
            self._old = detector.latest if detector is not None and not opened else None
            self._key, self._still_since_s = key, time.monotonic()
            self._asked, self._found = False, None
        if detector is not None:
            if detector.latest is not self._old:
                self._found = detector.latest
        elif self._found is None and run is not None and run.generation == snapshot.generation:
            # With another group, its ranks were freed, or are new: then these are of the past.
            # A run's cell has shown them when it is over, or its ranks are stuck.
            self._found = run.found.diagnosis if not run.done or ended_badly(run) else None
        # The ranks are asked why when nothing has changed for this long; longer in setup, where
        # ranks that are about to meet look for a moment as if some were missing.
        in_setup = snapshot.with_status(Status.SETTING_UP, Status.STARTING)
        still = time.monotonic() - self._still_since_s > (1.2 if in_setup else 0.5)
        can_answer = snapshot.ranks and not snapshot.ended and self._session.running
        # A benchmark would measure the question too.
        quiet = still and can_answer and self._session.benchmarks.current is None
        unknown = self._found is None and detector is None and not self._asked
        if unknown and quiet and (not snapshot.ready or ended_badly(run)):  # may be wrong
            self._asked = True
            threading.Thread(target=self._ask, args=(key,), name="ddp-why", daemon=True).start()
        return self._found

    def _ask(self, key: object) -> None:
        with contextlib.suppress(DDPError):
            diagnosis = self._session.why_now()
            # Ranks may have moved while they were asked: then the answer is about the past.
            if key == self._key:
                self._found = diagnosis
