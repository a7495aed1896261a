"""Marks of when the parts of each training step begin on this rank, made as they begin.

A mark is a kind, the clock and, of some, for how long the thread has been ready to run without a
core. Of short steps only some are marked, see `_JUDGED`. The parts of the steps are
computed on request.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

from ddp_notebook.model import Place
from ddp_notebook.rank.collectives.call_sites import CallSites

LOADING, LOADED, FORWARD, INNER, FORWARDED, BACKWARD, BUCKET, REDUCED, STEP, STEPPED = range(10)
"""A DataLoader is asked for a batch and has given it; the forward of a DDP object begins, the one
of its module begins, and it is over; a backward begins, hands over a bucket, and is over; an
optimizer begins its step and has made it."""

UNKNOWN = -1
"""Stands for a time without a core that was not read."""

_QUEUE_READ = frozenset({FORWARD, BACKWARD, BUCKET, REDUCED, STEPPED})
_MARK = struct.Struct("<qqq")
_MOST = 6000
_BYTES = _MOST * _MARK.size
_JUDGED, _BETWEEN_NS, _FEWEST_OF = 32, 100_000_000, 16
"""After so many steps it is judged how many of them are marked: one in so long a time, one of so
many at least. To mark a step takes 0.15 ms where the caches are full of the user's data."""
_now_ns, _this_thread = time.monotonic_ns, threading.get_ident


class RunQueue:
    """How long the thread that creates it was runnable and had no core. Close it after use."""

    def __init__(self, path: Path = Path("/proc/thread-self/schedstat")) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:  # another system than Linux
            self._file = None

    def waited_ns(self) -> int:
        """Since the thread began, in ns; 0 if not known. Takes about a microsecond."""
        # A thread's ns on a core, ns in the run queue, number of runs: Linux's sched-stats.rst.
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file is not None else 0

    def close(self) -> None:
        """Close the file. From now on the time is 0."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


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
        if not self._on:
            return
        if _this_thread() != self._thread:
            if self._thread:
                return
            self._thread, self._judged_ns = _this_thread(), _now_ns()
            if not self._ring:
                self._ring = bytearray(_BYTES)
            if self._queue is not None:
                self._queue.close()
            self._queue = RunQueue()
        self._write(kind, number, _now_ns(), self._queued_ns(kind))
        # Of so many marks the first have the user's line looked up: it may be another loop by now.
        if self.written % 512 < 12 or kind not in self.places:
            self.places[kind] = self._users_line()

    def bucket(self) -> None:
        """A bucket is handed over. Only the last of a backward becomes a mark, once it is over."""
        if self._on and _this_thread() == self._thread:
            self._buckets = seen = self._buckets + 1
            # Of the buckets of a backward, those at which the time without a core is read.
            looked_at = seen <= 4 or not seen % 16
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
            step_ns = (now_ns - self._judged_ns) // _JUDGED
            # A power of two: ranks do not agree on it, and the steps that one marks which thinks
            # them shorter are then among those of the others. Only what all have is compared.
            self._one_of = 1
            while self._one_of * step_ns < _BETWEEN_NS and self._one_of < _FEWEST_OF:
                self._one_of *= 2
            self._judged_ns = now_ns
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
        # The main thread writes on: up to `written` all marks are in the copy, but for those that
        # newer ones have replaced before it was made, and one more that is being replaced.
        written = self.written
        ring = bytes(self._ring)
        first = max(0, self.written - _MOST + 1)
        found = []
        for number in range(first, written):
            what, at_ns, waited_ns = _MARK.unpack_from(ring, number % _MOST * _MARK.size)
            found.append((what & 0xFF, what >> 8, at_ns, waited_ns))
        return found
