"""What this rank's newest training steps were made of: its own parts, and where it waited.

Marks are made as the parts of a step begin: a kind, the clock and, of some, for how long the thread
has been ready to run without a core. A mark takes some microseconds, so of short steps only some
are marked. What the steps were made of is found out when somebody asks.

A step ends where the rank has reduced its gradients with the others: at the end of a backward
that handed over buckets or, where no backward does, at an optimizer's step after a collective.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ddp_notebook.model import Place, StepPart, StepTimes, TimedStep
from ddp_notebook.model.collective_log import Waited
from ddp_notebook.rank.bench.host_load import RunQueue
from ddp_notebook.rank.collectives.call_sites import CallSites, place_of

if TYPE_CHECKING:
    from ddp_notebook.rank.collectives.observer import Observer
    from ddp_notebook.rank.training.tracker import Tracker

(
    LOADING,
    LOADED,
    FORWARD,
    INNER,
    FORWARDED,
    BACKWARD,
    BUCKET,
    REDUCED,
    STEP,
    STEPPED,
) = range(10)
"""A DataLoader is asked for a batch and has given it; the forward of a DDP object begins, the one
of its module begins, and it is over; a backward begins, hands over a bucket, and is over; an
optimizer begins its step and has made it."""

UNKNOWN = -1
"""Stands for a time without a core that was not read."""

_QUEUE_READ = frozenset({FORWARD, BACKWARD, BUCKET, REDUCED, STEPPED})
_MARK = struct.Struct("<qqq")
_MOST = 6000
_BYTES = _MOST * _MARK.size
_FIRST_BUCKETS, _EVERY_BUCKET = 4, 16
"""Of the buckets of a backward, those at which the time without a core is read."""
_LINES_EVERY, _LINES_OF = 512, 12
"""Of so many marks the first have the user's line looked up: it may be another loop by now."""
_SHORT_NS, _OF_SHORT, _JUDGED = 5_000_000, 4, 64
"""Of steps that are shorter, one of so many is marked; that is judged every so many steps."""
_now_ns, _this_thread = time.monotonic_ns, threading.get_ident


class StepMarks:
    """The newest marks of the thread that trains, of one run at a time."""

    def __init__(self, call_sites: CallSites) -> None:
        self._users_line = call_sites.users_line
        self._ring = bytearray()
        self._queue: RunQueue | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.places: dict[int, Place | None] = {}
        """The line of each kind of mark, as it was last looked up."""
        self.written = 0
        """How many marks the run has made, including overwritten ones."""
        self._thread = 0
        self._on, self._ended = True, False
        self._one_of = 1
        self._backwards = self._judged_ns = 0
        self._buckets = self._bucket_ns = 0
        self._bucket_queued_ns = UNKNOWN

    def end(self) -> None:
        """Mark nothing more in this run: in a pipeline times tell nothing, see `StepTimer`."""
        self._on, self._ended = False, True

    def mark(self, kind: int, number: int = 0) -> None:
        """Mark that a part begins now. Only the first thread that marks is recorded."""
        if self._on and (_this_thread() == self._thread or self._adopt()):
            self._write(kind, number, _now_ns(), self._queued_ns(kind))
            if self.written % _LINES_EVERY < _LINES_OF or kind not in self.places:
                line = self._users_line()
                self.places[kind] = place_of(line)

    def bucket(self) -> None:
        """A bucket is handed over. Only the last of a backward becomes a mark, once it is over."""
        if self._on and _this_thread() == self._thread:
            self._buckets = seen = self._buckets + 1
            looked_at = seen <= _FIRST_BUCKETS or not seen % _EVERY_BUCKET
            self._bucket_queued_ns = self._queued_ns(BUCKET) if looked_at else UNKNOWN
            self._bucket_ns = _now_ns()

    def reduced(self) -> None:
        """A backward is over."""
        if self._ended or _this_thread() != self._thread:
            return
        if self._buckets:
            self._write(BUCKET, 0, self._bucket_ns, self._bucket_queued_ns)
            self._buckets = 0
        self._backwards = count = self._backwards + 1
        now_ns = _now_ns()
        if not count % _JUDGED:
            short = now_ns - self._judged_ns < _JUDGED * _SHORT_NS
            self._judged_ns, self._one_of = now_ns, _OF_SHORT if short else 1
        ends, self._on = self._on, (count + 1) % self._one_of == 0
        if ends or self._on:
            self._write(REDUCED, 0, now_ns, self._queued_ns(REDUCED))

    def _write(self, kind: int, number: int, at_ns: int, queued_ns: int) -> None:
        written = self.written
        at = written % _MOST * _MARK.size
        _MARK.pack_into(self._ring, at, number << 8 | kind, at_ns, queued_ns)
        self.written = written + 1

    def _queued_ns(self, kind: int) -> int:
        queue = self._queue
        return queue.waited_ns() if queue is not None and kind in _QUEUE_READ else UNKNOWN

    def marks(self) -> list[tuple[int, int, int, int]]:
        """The newest marks, the oldest first: kind, number, ns on the clock, ns without a core."""
        ring, written = bytes(self._ring), self.written
        first = max(0, written - _MOST + 1)  # the oldest may be half overwritten
        found = []
        for number in range(first, written):
            what, at_ns, waited_ns = _MARK.unpack_from(ring, number % _MOST * _MARK.size)
            found.append((what & 0xFF, what >> 8, at_ns, waited_ns))
        return found

    def _adopt(self) -> bool:
        if self._thread:
            return False
        self._thread, self._judged_ns = _this_thread(), _now_ns()
        if not self._ring:
            self._ring = bytearray(_BYTES)
        if self._queue is not None:
            self._queue.close()
        self._queue = RunQueue()
        return True


# -- steps made of marks ---------------------------------------------------------------

Mark = tuple[int, int, int, int]
_MOST_ROWS = 300
_OWN = {
    LOADING: StepPart.DATA,
    LOADED: StepPart.LOOP,
    FORWARD: StepPart.FORWARD,
    INNER: StepPart.FORWARD,
    FORWARDED: StepPart.LOSS,
    BACKWARD: StepPart.BACKWARD,
    BUCKET: StepPart.BACKWARD,
    REDUCED: StepPart.AFTER,
    STEP: StepPart.OPTIMIZER,
    STEPPED: StepPart.LOOP,
}
"""The part of the step that a mark of each kind begins."""
_WAITS = {
    (BUCKET, REDUCED),
    (FORWARD, INNER),
}
"""Between two such marks DDP waits for the others: for gradients, or for rank 0's buffers."""
_LEFT_OUT = (REDUCED, REDUCED)
"""Between two such marks are steps that were not marked."""


class StepTimer:
    """Reports the newest steps of this rank on request."""

    def __init__(self, marks: StepMarks, tracker: Tracker, observer: Observer, rank: int) -> None:
        self._marks = marks
        self._tracker = tracker
        self._observer = observer
        self._rank = rank

    def times(self) -> StepTimes:
        """The steps of the current or the last run. Any thread may ask at any time."""
        log = self._observer.log
        waited = log.waited() if log is not None else Waited()
        key = self._key(waited.groups)
        rows: list[TimedStep] = []
        if key and not waited.paused and not waited.to_peers and not self._tracker.broken:
            rows = steps(self._marks.marks(), waited.spans)[-_MOST_ROWS:]
        places = {
            _OWN[kind]: place
            for kind, place in list(self._marks.places.items())
            if place is not None and kind not in (LOADED, STEPPED)
        }
        return StepTimes(
            self._rank,
            self._observer.run,
            socket.gethostname(),
            _cores(),
            key,
            tuple(rows),
            places,
        )

    def _key(self, groups: Sequence[str]) -> str:
        """Equal on ranks that train one model together; empty where times tell nothing.

        The host does not know when work on a GPU is done: its own times tell nothing.
        """
        stepped = [
            optimizer for optimizer in list(self._tracker.optimizers.values()) if optimizer.steps
        ]
        shapes = sorted(optimizer.made_of for optimizer in stepped)
        if not shapes or not groups or any(optimizer.on_device for optimizer in stepped):
            return ""
        return f"{' '.join(shapes)} {' '.join(sorted(groups))}"


def _cores() -> tuple[int, ...]:
    """The cores that the main thread may use: affinity is each thread's own."""
    known = hasattr(os, "sched_getaffinity")
    return tuple(sorted(os.sched_getaffinity(os.getpid()))) if known else ()


def steps(marks: Sequence[Mark], spans: Sequence[tuple[int, int]]) -> list[TimedStep]:
    """The steps between these marks; `spans` are the collectives in which the thread waited.

    The first is left out: it may have begun before.
    """
    marks = _with_queue(marks)
    by_bucket = any(kind == BUCKET for kind, *_ in marks)
    at_its_end = REDUCED if by_bucket else STEP
    rows: list[TimedStep] = []
    step, within = _Step(), _Spans(spans)
    for one, other in pairwise(marks):
        kind, number, begin_ns, queued_ns = one
        following, _, end_ns, queued_then_ns = other
        waited_ns = within.between(begin_ns, end_ns)
        if (kind, following) == _LEFT_OUT:
            step = _Step()
            continue
        if kind == BACKWARD:
            step.number = number
        step.reduced |= kind == BUCKET if by_bucket else waited_ns > 0
        if (kind, following) in _WAITS:
            waited_ns = end_ns - begin_ns
        step.add(_OWN[kind], end_ns - begin_ns, waited_ns, queued_then_ns - queued_ns)
        if following == at_its_end and step.reduced:
            rows.append(step.row())
            step = _Step()
    return rows[1:]


class _Spans:
    """The collectives in which a thread waited, read in their order."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._at = 0

    def between(self, begin_ns: int, end_ns: int) -> int:
        """For how long the thread waited between two moments, in ns."""
        waited_ns = 0
        while self._at < len(self._spans) and self._spans[self._at][1] <= end_ns:
            issued_ns, done_ns = self._spans[self._at]
            self._at += 1
            if issued_ns >= begin_ns:
                waited_ns += done_ns - issued_ns
        return waited_ns


def _with_queue(marks: Sequence[Mark]) -> list[Mark]:
    """The marks with their time without a core, interpolated between two that were read."""
    known = [at for at, mark in enumerate(marks) if mark[3] != UNKNOWN]
    filled = list(marks)
    for begin, end in pairwise(known):
        (*_, begin_ns, from_ns), (*_, end_ns, to_ns) = marks[begin], marks[end]
        rate = (to_ns - from_ns) / max(1, end_ns - begin_ns)
        for at in range(begin + 1, end):
            kind, number, at_ns, _ = marks[at]
            filled[at] = (kind, number, at_ns, from_ns + int((at_ns - begin_ns) * rate))
    return filled[known[0] : known[-1] + 1] if known else []


class _Step:
    """One training step while its parts are added up."""

    def __init__(self) -> None:
        self.number = 0
        self.reduced = False
        self.own_ns = dict.fromkeys(StepPart, 0.0)
        self.waited_ns = self.queued_ns = 0.0

    def add(self, part: StepPart, wall_ns: int, waited_ns: int, queued_ns: int) -> None:
        """Add time to a part. Time without a core is left out."""
        waiting = min(1.0, waited_ns / wall_ns) if wall_ns > 0 else 0.0
        queued_own_ns = queued_ns * (1 - waiting)
        self.waited_ns += waited_ns
        self.queued_ns += queued_own_ns
        self.own_ns[part] += max(0.0, wall_ns - waited_ns - queued_own_ns)

    def row(self) -> TimedStep:
        """The finished step as a row."""
        return TimedStep(
            self.number,
            int(self.waited_ns) // 1000,
            int(self.queued_ns) // 1000,
            tuple(int(self.own_ns[part]) // 1000 for part in StepPart),
        )
