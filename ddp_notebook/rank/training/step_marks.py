"""Marks of when the parts of each training step begin on this rank, made as they begin.

A mark is a kind, the clock, and for how long the thread has been ready to run without a core. It
takes a microsecond or two; what the steps were made of is found out when somebody asks.
"""

from __future__ import annotations

import struct
import threading
import time

from ddp_notebook.model import Place
from ddp_notebook.rank.bench.host_load import RunQueue
from ddp_notebook.rank.collectives.call_sites import CallSites

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

_MARK = struct.Struct("<qqq")
_MOST = 6000
_BYTES = _MOST * _MARK.size
_LINES_EVERY, _LINES_OF = 512, 12
"""Of so many marks the first have the user's line looked up: it may be another loop by now."""
_now_ns, _this_thread = time.monotonic_ns, threading.get_ident


class StepMarks:
    """The newest marks of the thread that trains, of one run at a time."""

    def __init__(self, call_sites: CallSites) -> None:
        self._users_line = call_sites.users_line
        self._ring = bytearray()
        self._queue: RunQueue | None = None
        self.places: dict[int, Place | None] = {}
        """The line of each kind of mark, as it was last looked up."""
        self.written = 0
        """How many marks the run has, those that were overwritten too."""
        self._thread = 0

    def begin(self) -> None:
        """A run begins."""
        self.written, self._thread = 0, 0
        self.places = {}

    def mark(self, kind: int, number: int = 0) -> None:
        """Something begins now. Of other threads than the first that marks, nothing is kept."""
        if _this_thread() != self._thread and not self._adopt():
            return
        written = self.written
        queue = self._queue
        waited_ns = queue.waited_ns() if queue is not None else 0
        at = written % _MOST * _MARK.size
        _MARK.pack_into(self._ring, at, number << 8 | kind, _now_ns(), waited_ns)
        self.written = written + 1
        if kind != BUCKET and (written % _LINES_EVERY < _LINES_OF or kind not in self.places):
            line = self._users_line()
            self.places[kind] = Place(*line) if line else None

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
        self._thread = _this_thread()
        if not self._ring:
            self._ring = bytearray(_BYTES)
        if self._queue is not None:
            self._queue.close()
        self._queue = RunQueue()
        return True
