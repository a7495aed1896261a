"""The event sender: takes events from any thread, sends them to the session from one of ours.

It is the channel for what no one asks for; `cluster/channels.py` says why it is not another one.

A message is two frames: the name of the source, which tells the processes of a script from the
ranks' own, and a JSON list of events. The socket never blocks the rank: what does not fit in the
queue is dropped, and the gap in `seq` tells the session how much.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import zmq

from ddp_notebook.model import CellFinished, CellStarted, Event, Pulse, encode_events
from ddp_notebook.rank.rank_process import Events

PULSE_S = 0.25
"""How often a rank sends a sign of life, with what it is doing."""

_E = TypeVar("_E", bound=Event)


class EventSender(Events):
    """Sends this rank's events. One per process; `emit` may be called from any thread.

    `collect` is called by the sending thread before each sending, so that buffered output
    leaves in order; it returns after how many seconds it wants to be called again, or None.
    `pulse` gives the fields of a sign of life.
    """

    def __init__(self, rank: int, url: str, source: str) -> None:
        super().__init__()
        self.rank = rank
        self._source = source.encode()
        self._pending: deque[Event] = deque()
        # Two locks, always taken in this order: `_sending`, then `_lock`. `emit` takes only the
        # second, for as long as an append takes: a thread that emits never waits for one that
        # sends.
        self._lock = threading.Lock()
        self._seq = 0
        self._wake = threading.Event()
        self._flushed = threading.Condition()
        self._sent_seq = 0
        self._closing = False
        self._pid = os.getpid()
        self._sending = threading.Lock()
        """Held while using the socket and taking events from `_pending`, so that order is kept."""
        # `linger`: `term` waits so long for what is not sent yet, and no longer: the session may be
        # gone.
        self._context = zmq.Context()  # our own: the engine may end its instance before us
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = 10_000
        self._socket.linger = 500
        self._socket.connect(url)
        self._thread = threading.Thread(target=self._send_loop, name="ddp-events", daemon=True)
        self._thread.start()

    def emit(self, kind: type[_E], **fields: Any) -> None:
        """Send an event of `kind` about this rank, soon."""
        if self._append(kind, fields):
            self._wake.set()

    def emit_now(self, kind: type[_E], **fields: Any) -> None:
        """Like `emit`, but from this thread: waking the sending thread would cost a cell more.

        Raises what makes that impossible.
        """
        if self._append(kind, fields):
            self._send_pending()

    @contextlib.contextmanager
    def at_work(self, doing: str) -> Iterator[None]:
        """Within, the board shows this rank as running, and `doing` that; no cell runs."""
        pulse = self.pulse
        self.pulse = lambda: {**pulse(), "doing": doing}
        self.emit_now(CellStarted, cell=0)
        try:
            yield
        finally:
            self.pulse = pulse
            self.emit_now(CellFinished, cell=0, outcome="ok")

    def _append(self, kind: type[_E], fields: dict[str, Any]) -> bool:
        if os.getpid() != self._pid:
            return False  # a forked child (a DataLoader worker) is not the rank
        with self._lock:
            self._seq += 1
            self._pending.append(
                kind(rank=self.rank, seq=self._seq, time_ns=time.time_ns(), **fields)
            )
        return True

    def wake(self) -> None:
        """Have the sending thread collect output soon."""
        self._wake.set()

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until all events so far were handed to the socket; False if it took too long."""
        target = self._seq
        self._wake.set()
        with self._flushed:
            return self._flushed.wait_for(lambda: self._sent_seq >= target, timeout_s)

    def close(self) -> None:
        """Send what is left and stop."""
        self.flush()
        self._closing = True
        self._wake.set()
        self._thread.join(1.0)

    def _send_loop(self) -> None:
        try:
            again_s: float | None = None
            pulse_at = time.monotonic() + PULSE_S
            while not self._closing:
                self._wake.wait(max(0.0, min(again_s or PULSE_S, pulse_at - time.monotonic())))
                self._wake.clear()
                try:
                    again_s = self.collect()
                    if time.monotonic() >= pulse_at:
                        self.emit(Pulse, **self.pulse())
                        # `emit` has woken this very thread, which would go round once more for
                        # nothing. Output that wakes it in this moment is forgotten as well, and
                        # leaves with the next pulse.
                        self._wake.clear()
                        pulse_at = time.monotonic() + PULSE_S
                except Exception as error:  # noqa: BLE001  # the one boundary: see _disable
                    again_s = None
                    self._disable(error)
                with contextlib.suppress(Exception):  # what is lost is missing in the counting
                    self._send_pending()
        finally:
            with self._sending:
                self._socket.close()
            self._context.term()

    def _disable(self, error: Exception) -> None:
        """A defect of ours must not hurt the rank: collect no more, say so, go on sending."""
        self.collect = lambda: None
        self.pulse = lambda: {"doing": f"(its observer failed and took itself out: {error!r})"}

    def _send_pending(self) -> None:
        with self._sending:
            with self._lock:
                events = list(self._pending)
                self._pending.clear()
            if not events or self._socket.closed:
                return
            try:
                payload = encode_events(events)
                with contextlib.suppress(zmq.Again):
                    self._socket.send_multipart([self._source, payload], flags=zmq.NOBLOCK)
            finally:
                # Also for what was dropped or cannot be encoded: it is never sent later, and
                # `flush` would wait for it until its time is up.
                with self._flushed:
                    self._sent_seq = events[-1].seq
                    self._flushed.notify_all()
