"""The event receiver: reads the ranks' events from a socket that only this user can reach."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ddp_notebook.model import Event, EventsLost, decode_events
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.rank.events import signature

_POLL_MS = 200


def bind(socket: Any, path: Path) -> str:
    """Bind `socket` for the ranks: if possible at `path`, in this user's own folder."""
    if zmq.has("ipc"):
        socket.bind(f"ipc://{path}")
        return f"ipc://{path}"
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


class EventReceiver:
    """Calls `receive` with events as they arrive, on its own thread.

    Messages that are not signed with a key of this session are dropped. A gap in a rank's sequence
    numbers becomes an `EventsLost`.
    """

    def __init__(self, folder: Path, receive: Callable[[Sequence[Event]], None]) -> None:
        self._closing = False
        self._sources: tuple[_Source, ...] = ()
        self.key = self.add_source(receive)
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        self.url = bind(self._socket, folder / "events.sock")
        self._thread = threading.Thread(target=self._listen, name="ddp-receiver", daemon=True)
        self._thread.start()

    def add_source(self, receive: Callable[[Sequence[Event]], None]) -> str:
        """Accept events of other processes of the same ranks; returns their signing key."""
        source = _Source(secrets.token_bytes(32), receive)
        self._sources = (*self._sources, source)
        return source.key.hex()

    def remove_source(self, key: str) -> None:
        """Accept no more events signed with `key`."""
        self._sources = tuple(source for source in self._sources if source.key.hex() != key)

    def expect_from_start(self, rank: int) -> None:
        """`rank` of the session is a new process: it counts its events from 1 again."""
        self._sources[0].next_seq.pop(rank, None)

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
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                    if source := self._source_of(frames):
                        heard.setdefault(source, []).extend(source.read(frames[1]))
            for source, events in heard.items():
                if events:
                    source.hand_over(events)
        self._socket.close(linger=0)
        self._context.term()

    def _source_of(self, frames: list[bytes]) -> _Source | None:
        """Whose key a message is signed with; None for no key of ours."""
        for source in self._sources if len(frames) == 2 else ():
            if hmac.compare_digest(frames[0], signature(frames[1], source.key)):
                return source
        return None


class _Source:
    """Processes that sign with one key: one for each rank, which counts its events."""

    def __init__(self, key: bytes, receive: Callable[[Sequence[Event]], None]) -> None:
        self.key = key
        self.receive = receive
        self.next_seq: dict[int, int] = {}

    def hand_over(self, events: list[Event]) -> None:
        """The loop must not end: without it no event arrives. What fails counts as lost."""
        try:
            self.receive(events)
        except Exception:  # noqa: BLE001  # a defect of ours
            now_ns = time.monotonic_ns()
            counts = Counter(event.rank for event in events)
            lost = [EventsLost(rank=rank, count=n, heard_ns=now_ns) for rank, n in counts.items()]
            with contextlib.suppress(Exception):
                self.receive(lost)

    def read(self, payload: bytes) -> list[Event]:
        """The events of a message, and how many are missing before them."""
        now_ns = time.monotonic_ns()
        try:
            received = decode_events(payload, now_ns)
        except (DecodeError, AttributeError, TypeError):  # the last two: where Python's own is None
            # They count as lost when the next ones arrive.
            return []
        events: list[Event] = []
        for event in received:
            missing = event.seq - self.next_seq.get(event.rank, event.seq)
            if missing > 0:
                events.append(EventsLost(rank=event.rank, count=missing, heard_ns=now_ns))
            self.next_seq[event.rank] = event.seq + 1
            events.append(event)
        return events
