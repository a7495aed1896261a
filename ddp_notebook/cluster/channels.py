"""Receives the ranks' events: the channel for what a rank tells without being asked.

They do not pass through ipyparallel because they have to leave a rank while its main thread is
blocked, and not through a rank's control socket because many processes send to one that listens.

Who may connect is decided by the system: the socket is 0600, in the session's folder, which is
0700, and libzmq asks the kernel for the user of the other end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ddp_notebook.launch.session_folder import require_private
from ddp_notebook.model import Event, EventsLost, codec, decode_events

_POLL_MS = 200


class EventReceiver:
    """Calls `receive` with events as they arrive, on its own thread.

    Each message names the source that it belongs to, because a rank may be two processes, its own
    and a script's, which count their events apart. A gap in the count becomes an `EventsLost`.
    """

    def __init__(self, folder: Path, receive: Callable[[Sequence[Event]], None]) -> None:
        self._closing = False
        self._numbers = itertools.count()
        self._sources: dict[bytes, _Source] = {}
        self.source = self.add_source(receive)
        """The source of the ranks' own processes and of the store's."""
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        # No limit on this side: with this queue full those of the ranks would fill, and they drop
        # what does not fit (see `rank/events.py`).
        self._socket.rcvhwm = 0
        with contextlib.suppress(zmq.ZMQError):  # a libzmq without it: the folder keeps others out
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        require_private(folder)
        path = folder / "events.sock"
        self.url = f"ipc://{path}"
        self._socket.bind(self.url)
        path.chmod(0o600)
        self._thread = threading.Thread(target=self._listen, name="ddp-receiver", daemon=True)
        self._thread.start()

    def add_source(self, receive: Callable[[Sequence[Event]], None]) -> str:
        """Accept events of other processes of the same ranks; return the name of their source."""
        name = str(next(self._numbers))
        self._sources = {**self._sources, name.encode(): _Source(receive)}
        return name

    def remove_source(self, name: str) -> None:
        """Drop what still arrives from this source."""
        # A new dict: the thread that listens reads the one it has.
        self._sources = {n: source for n, source in self._sources.items() if n != name.encode()}

    def expect_from_start(self, rank: int) -> None:
        """Expect a new process of `rank`, which counts its events from 1 again."""
        self._sources[self.source.encode()].next_seq.pop(rank, None)

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    def _listen(self) -> None:
        while not self._closing:
            if not self._socket.poll(_POLL_MS):
                continue
            heard: dict[_Source, list[Event]] = {}
            with contextlib.suppress(zmq.Again):
                while True:  # faster than polling first
                    name, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                    if source := self._sources.get(name):
                        heard.setdefault(source, []).extend(source.read(payload))
            for source, events in heard.items():
                if events:
                    source.hand_over(events)
        self._socket.close(linger=0)
        self._context.term()


class _Source:
    """Processes of ranks; a rank has at most one, which counts its events."""

    def __init__(self, receive: Callable[[Sequence[Event]], None]) -> None:
        self.receive = receive
        self.next_seq: dict[int, int] = {}

    def hand_over(self, events: list[Event]) -> None:
        """Hand events to whoever listens; those of a batch that cannot be taken count as lost."""
        try:
            self.receive(events)
        except Exception:  # noqa: BLE001  # a defect of ours; without this thread no event arrives
            now_ns = time.monotonic_ns()
            counts = Counter(event.rank for event in events)
            lost = [EventsLost(rank=rank, count=n, heard_ns=now_ns) for rank, n in counts.items()]
            with contextlib.suppress(Exception):
                self.receive(lost)

    def read(self, payload: bytes) -> list[Event]:
        """Return the events of a message, with an `EventsLost` where some before them are missing.

        What cannot be decoded counts as lost when the next events arrive.
        """
        now_ns = time.monotonic_ns()
        try:
            received = decode_events(payload, now_ns)
        except codec.DecodeError:
            return []
        events: list[Event] = []
        for event in received:
            missing = event.seq - self.next_seq.get(event.rank, event.seq)
            if missing > 0:
                events.append(EventsLost(rank=event.rank, count=missing, heard_ns=now_ns))
            self.next_seq[event.rank] = event.seq + 1
            events.append(event)
        return events
