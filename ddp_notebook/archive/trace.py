"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

In the trace-event format: a process per rank, in it a thread for setup and cells, and one for
collectives; where some of them overlap, as those of a backward pass do, as many threads as are
needed. Arrows join the parts that the ranks have in one collective.

Everything is on one axis, CLOCK_MONOTONIC of the session's host, in microseconds from the first
thing that was kept. Collectives are stamped with that clock by the ranks. Events have the wall
clock of their sender, which is carried over by the two clocks as they were read together when
the run was saved. Where that gives a time after the event arrived, or long before, a clock was
set meanwhile or is another host's, and the time of arrival counts. What was not over when the
run was saved is drawn until then, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Collective,
    Event,
    EventsLost,
    Phase,
    RankExited,
    RankSpawned,
    RankState,
    Stage,
    StageFailed,
    StageFinished,
    StagePaused,
    StageStarted,
    Status,
    exit_text,
)
from ddp_notebook.model.fold import LineStops


def trace(saved: SavedRun) -> dict[str, Any]:
    """Return the run as a trace: a JSON object with ``traceEvents``."""
    axis = _Axis(saved)
    events: list[dict[str, Any]] = []
    arrows = _Arrows()
    # Viewers tell processes by their numbers, which are not known of all, nor unique across hosts.
    pids = [state.pid for state in saved.snapshot.ranks]
    real = len(set(pids)) == len(pids) and all(0 < pid < 2**31 for pid in pids)
    for number, state in enumerate(saved.snapshot.ranks, 1):
        pid = state.pid if real else number
        events += _rank(saved, state, pid, axis, arrows)
    return {"traceEvents": [*events, *arrows.events()], "displayTimeUnit": "ms"}


class _Axis:
    """Turns the clocks of a saved run into microseconds from its beginning."""

    def __init__(self, saved: SavedRun) -> None:
        self.end_ns = saved.snapshot.taken_ns
        self._offset_ns = saved.wall_ns - self.end_ns
        stamps = [self.of(m.event, m.at_ns) for m in saved.moments[:500] if m.event is not None]
        self.start_ns = min([saved.began_ns, *stamps])

    def of(self, event: Event, heard_ns: int) -> int:
        """When an event happened, on the monotonic clock."""
        sent_ns = event.time_ns - self._offset_ns
        # One that would have been on its way for longer has a clock that cannot be trusted.
        return sent_ns if event.time_ns and 0 <= heard_ns - sent_ns < 5_000_000_000 else heard_ns

    def us(self, time_ns: int) -> float:
        """Return a time as a trace has it."""
        return max(0, time_ns - self.start_ns) / 1000


@dataclass
class _Slice:
    """Something that takes time."""

    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


# -- one rank ------------------------------------------------------------------------------


def _rank(
    saved: SavedRun, state: RankState, pid: int, axis: _Axis, arrows: _Arrows
) -> Iterator[dict[str, Any]]:
    rank = state.rank
    # Viewers want the numbers of all threads to differ.
    main = (rank + 1) * 1000
    where = " · ".join(filter(None, (state.device, state.host)))
    yield _meta("process_name", pid, main, name=f"rank {rank}")
    yield _meta("process_labels", pid, main, labels=where)
    yield _meta("process_sort_index", pid, main, sort_index=rank)
    yield _thread(pid, main, "setup and cells")
    events = _EventSlices(saved, state, axis)
    for span in events.slices:
        yield _complete(span, pid, main, axis)
    for name, time_ns, args in events.instants:
        yield _event("i", name, "event", axis.us(time_ns), pid, main, s="p", args=args)
    lanes: list[int] = []  # by number, the end of the last collective there
    left_ns = saved.left_ns.get(rank, 0)
    for collective in saved.collectives.of.get(rank, ()):
        if not collective.over and left_ns > collective.issued_ns:
            call = replace(collective.call, freed=True)
            collective = replace(collective, phase=Phase.FAILED, done_ns=left_ns, call=call)
        spans = _slices_of(collective, axis)
        # Viewers take overlapping slices of one thread for nested calls, so buckets of one backward
        # pass need a thread each: the first that is free, of 64 at most.
        begin_ns = spans[0].begin_ns
        free = (lane for lane, end_ns in enumerate(lanes) if end_ns <= begin_ns)
        lane = min(next(free, len(lanes)), 63)
        lanes[lane : lane + 1] = [max([spans[-1].end_ns, *lanes[lane : lane + 1]])]
        thread = main + 1 + lane
        for span in spans:
            yield _complete(span, pid, thread, axis)
        arrows.add(collective, axis.us(collective.issued_ns), pid, thread)
    for lane in range(len(lanes)):
        name = f"collectives ({lane + 1})" if lane else "collectives"
        yield _thread(pid, main + 1 + lane, name)


_SHOWN = (
    *("dtype", "bytes", "tensors", "group", "slot", "number", "api"),
    *("reduce_op", "root", "peer", "label"),
)
"""The fields of a collective that are shown as they are."""


def _slices_of(collective: Collective, axis: _Axis) -> list[_Slice]:
    """Return a collective from its issue to its end; before it the pause of its rank, if any."""
    named = collective.phase in (Phase.FAILED, Phase.REFUSED, Phase.HELD)
    phase = "paused" if not collective.over else collective.phase
    phase = "freed" if collective.call.freed else phase
    name = f"{collective.operation} ({phase})" if named else collective.operation
    place = collective.place
    args = {
        "phase": collective.phase.value,
        "shape": list(collective.shape),
        **{name: getattr(collective, name) for name in _SHOWN},
        "part of DDP": getattr(collective.part, "value", ""),
        "place": "" if place is None else str(place),
        "line": getattr(place, "text", ""),
        "freed": "no rank waits for it any more" * collective.call.freed,
        "unfinished": None if collective.over else True,
    }
    # What is unknown of it is left out.
    known = {name: value for name, value in args.items() if value not in ("", None, [])}
    begin_ns = collective.issued_ns
    end_ns = max(collective.done_ns or axis.end_ns, begin_ns)
    slices = [_Slice(name, "collective", begin_ns, end_ns, known)]
    if collective.call.held_ns > 0:
        paused_ns, paused = begin_ns - collective.call.held_ns, f"{collective.operation} (paused)"
        slices.insert(0, _Slice(paused, "paused", paused_ns, begin_ns, {"phase": Phase.HELD.value}))
    return slices


# -- setup and cells ----------------------------------------------------------------------


class _EventSlices:
    """One rank's events as slices that follow each other, and instants."""

    def __init__(self, saved: SavedRun, state: RankState, axis: _Axis) -> None:
        self.slices: list[_Slice] = []
        self.instants: list[tuple[str, int, dict[str, Any]]] = []
        self._saved = saved
        self._open: _Slice | None = None
        self._stops = [LineStops()]
        """Of each cell."""
        # The activity at the time of the first event that was kept.
        before = saved.start.ranks[state.rank]
        if before.status is Status.RUNNING:
            self._begin(self._cell_name(0, before.cell), "cell", saved.began_ns)
        elif before.entering is not None and before.status is Status.SETTING_UP:
            self._begin(before.entering.value, "setup", saved.began_ns)
        for moment in saved.moments:
            event = moment.event
            if event is not None and event.rank == state.rank:
                time_ns = axis.of(event, moment.at_ns)
                self._take(event, time_ns)
                if isinstance(event, CellStarted):
                    self._stops.append(LineStops())
                self._stops[-1].take(event, time_ns)
        if self._open is not None:
            self._close(axis.end_ns, unfinished=True)
        for pause in (pause for stops in self._stops for pause in stops.pauses):
            args = {"place": str(pause.place), "line": pause.place.text, "why": pause.why}
            # One that came while the run was being saved began after what was saved.
            ended_ns = pause.ended_ns or max(axis.end_ns, pause.began_ns)
            name = f"line {pause.place.line} (paused)"  # inside the slice of its cell
            self.slices.append(
                _Slice(name, "paused", pause.began_ns, ended_ns, _without_empty(args))
            )

    def _take(self, event: Event, time_ns: int) -> None:
        match event:
            case RankSpawned():
                self._begin(Stage.LAUNCHED.value, "setup", time_ns, pid=event.pid)
            case StageStarted():
                self._begin(event.stage.value, "setup", time_ns, waits_for=event.waiting_for)
            case StagePaused():
                self._begin(f"paused before {event.stage.value}", "held", time_ns)
            case StageFinished():
                self._close(time_ns, found=event.detail)
            case StageFailed():
                self._close(time_ns, failed=event.cause)
                self._mark(f"{event.stage.value} failed", time_ns, cause=event.cause)
            case CellStarted():
                name = self._cell_name(event.cell, event.number)
                self._begin(name, "cell", time_ns, cell=event.cell)
            case CellFinished():
                self._close(time_ns, outcome=event.outcome, error=event.ename, line=event.line)
            case RankExited():
                self._close(time_ns, outcome=exit_text(event.exit_code))
                self._mark(exit_text(event.exit_code), time_ns, pid=event.pid)
            case EventsLost():
                self._mark(f"{event.count} messages lost", time_ns)

    def _cell_name(self, cell: int, number: int) -> str:
        if self._saved.script and cell and cell == self._saved.run:
            return self._saved.script
        return f"cell {number or cell}" if number or cell else "benchmark"

    def _mark(self, name: str, time_ns: int, **args: Any) -> None:
        self.instants.append((name, time_ns, _without_empty(args)))

    def _begin(self, name: str, category: str, time_ns: int, **args: Any) -> None:
        self._close(time_ns)
        self._open = _Slice(name, category, time_ns, time_ns, _without_empty(args))

    def _close(self, time_ns: int, **args: Any) -> None:
        span, self._open = self._open, None
        if span is not None:
            span.end_ns = max(span.begin_ns, time_ns)
            span.args.update(_without_empty(args))
            self.slices.append(span)


def _without_empty(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value not in ("", 0)}


# -- arrows --------------------------------------------------------------------------------


class _Arrows:
    """Joins the parts of one collective, from the rank that issued it first to the last.

    Equal slots of one group meet. Sends and receives are left out: their slots do not. A group
    that is made again counts its slots from 0.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int, int], list[tuple[float, int, int]]] = {}
        self._counted: dict[tuple[str, int], tuple[int, int]] = {}
        """Per group and rank: how often it was made again, and the last slot."""

    def add(self, collective: Collective, ts: float, pid: int, tid: int) -> None:
        """One rank's part of a collective."""
        if collective.is_point_to_point:
            return
        group, slot = collective.group, collective.slot
        times, last = self._counted.get((group, pid), (0, -1))
        # A slot that goes back means that the group was made again: its collectives are others than
        # those before.
        times += slot <= last
        self._counted[group, pid] = times, slot
        if collective.phase is not Phase.REFUSED:
            self._parts.setdefault((group, times, slot), []).append((ts, pid, tid))

    def events(self) -> Iterator[dict[str, Any]]:
        """The arrows, as events."""
        for number, parts in enumerate(self._parts.values(), 1):
            parts.sort()
            last = len(parts) - 1
            for place, (ts, pid, tid) in enumerate(parts if last else ()):
                phase = "s" if not place else "f" if place == last else "t"
                yield _event(phase, "meets", "meets", ts, pid, tid, id=number, bp="e")


# -- the format ----------------------------------------------------------------------------


def _complete(span: _Slice, pid: int, tid: int, axis: _Axis) -> dict[str, Any]:
    begin_us = axis.us(span.begin_ns)
    took_us = round(axis.us(span.end_ns) - begin_us, 3)
    return _event("X", span.name, span.category, begin_us, pid, tid, dur=took_us, args=span.args)


def _event(
    phase: str, name: str, category: str, ts: float, pid: int, tid: int, **more: Any
) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": phase, "ts": ts, "pid": pid, "tid": tid, **more}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return _meta("thread_name", pid, tid, name=name)


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
