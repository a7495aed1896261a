"""An ordered, signed stream of messages each way between the notebook and a host's agent.

It is carried by the control relay of the session's ipyparallel controller, which passes on whatever
one of its two sides addresses to the other: so nothing listens for it, and the way is the one that
engines have. The relay drops what it cannot deliver, and checks no one: hence the numbers and the
signatures here. What was lost is sent again, in order (go-back-N); what does not fit into the
window makes the sender wait, and so the ranks, which drop and count.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import hmac
import itertools
import json
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from socket import socketpair
from typing import Any

import zmq

WINDOW, WINDOW_BYTES = 512, 8 << 20
"""How much may be on its way, not yet acknowledged: the controller's queues have no limit."""
BEAT_S = 0.25
AGAIN_S, AGAIN_AT_MOST_S = 1.0, 4.0
"""After so long without an acknowledgement it is sent again; each time later."""
SILENT_S = 1.0
"""After so long a silence the other end is cut off, or has ended."""
_HEAD = struct.Struct("!QQ")
"""A packet's number, 0 for one that only acknowledges, and the last number that arrived."""
_SIGNATURE_BYTES = 32
_LENGTH = struct.Struct("!I")
_READS_AT_ONCE = 64
_DELIMITER = b"<IDS|MSG>"
"""Of Jupyter's messages: the hub, which is shown what is relayed, logs an error where it lacks."""


class Stream:
    """One end of it, without sockets, threads or a clock. `near` is the notebook's end."""

    def __init__(self, key: bytes, now_s: float, *, near: bool) -> None:
        self._key = key
        self._signs, self._expects = (b"near", b"far") if near else (b"far", b"near")
        self._unsent: deque[bytes] = deque()
        self._unacked: deque[bytes] = deque()
        self._sent = 0
        """The number of the last packet that was sent."""
        self._heard = 0
        """The number of the last packet that was taken."""
        self._owes = False
        """Something arrived that was not acknowledged yet."""
        self._left_bytes = self._way_bytes = 0
        self._beat_s = self._progress_s = self._again_at_s = now_s
        self._again_s = AGAIN_S
        self.heard_s = now_s
        """When the other end was last seen."""

    @property
    def full(self) -> bool:
        """True while more should not be put: the other end does not take what there is."""
        waiting = len(self._unsent) + len(self._unacked)
        return waiting >= WINDOW or self._left_bytes >= WINDOW_BYTES

    @property
    def empty(self) -> bool:
        """True when the other end has taken everything."""
        return not self._unsent and not self._unacked

    def put(self, body: bytes) -> None:
        """Send a message, in its turn."""
        self._unsent.append(body)
        self._left_bytes += len(body)

    def take(self, packet: bytes, now_s: float) -> bytes | None:
        """Return the message of a packet; None if it has none, or not the next one.

        Raises ValueError for a packet that is not the other end's.
        """
        signature, rest = packet[:_SIGNATURE_BYTES], packet[_SIGNATURE_BYTES:]
        if len(rest) < _HEAD.size or not hmac.compare_digest(
            signature, self._signature(self._expects, rest)
        ):
            raise ValueError("a packet that the other end has not signed")
        if now_s - self.heard_s > SILENT_S:  # it is back: what was lost is sent again soon
            self._again_s, self._progress_s = AGAIN_S, now_s
        self.heard_s = now_s
        number, acknowledged = _HEAD.unpack_from(rest)
        while self._unacked and self._sent - len(self._unacked) < acknowledged:
            size = len(self._unacked.popleft())
            self._left_bytes -= size
            self._way_bytes -= size
            self._again_s, self._progress_s = AGAIN_S, now_s
        if number == 0:
            return None
        self._owes = True
        if number != self._heard + 1:  # it was taken before, or one before it is missing
            return None
        self._heard = number
        return rest[_HEAD.size :]

    def due(self, now_s: float) -> list[bytes]:
        """Return the packets to send now."""
        bodies: list[tuple[int, bytes]] = []
        if self._unacked and now_s - self._progress_s >= self._again_s:
            first = self._sent - len(self._unacked) + 1
            bodies = list(enumerate(self._unacked, first))
            # While the other end is silent one packet knocks: all of them, again and again, would
            # fill the queues on the way.
            if self.heard_s < self._again_at_s:
                bodies = bodies[:1]
            self._progress_s = self._again_at_s = now_s
            self._again_s = min(2 * self._again_s, AGAIN_AT_MOST_S)
        while self._unsent and len(self._unacked) < WINDOW and self._way_bytes < WINDOW_BYTES:
            if not self._unacked:
                self._progress_s = now_s
            body = self._unsent.popleft()
            self._unacked.append(body)
            self._way_bytes += len(body)
            self._sent += 1
            bodies.append((self._sent, body))
        if not bodies and (self._owes or now_s - self._beat_s >= BEAT_S):
            bodies = [(0, b"")]
        if bodies:
            self._beat_s, self._owes = now_s, False
        packets = (_HEAD.pack(number, self._heard) + body for number, body in bodies)
        return [self._signature(self._signs, packet) + packet for packet in packets]

    def _signature(self, by: bytes, rest: bytes) -> bytes:
        # `person` is who signs: what an end has sent is not taken when it comes back to it.
        return hashlib.blake2b(
            rest, key=self._key, person=by, digest_size=_SIGNATURE_BYTES
        ).digest()


def packed(message: list[Any], blob: bytes) -> bytes:
    """Return a message as the body of a packet: JSON, and bytes after it."""
    head = json.dumps(message).encode()
    return _LENGTH.pack(len(head)) + head + blob


def unpacked(body: bytes) -> tuple[str, list[Any], bytes]:
    """Return a message's kind, what else it says, and its bytes. Raises ValueError."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        kind, *rest = json.loads(body[_LENGTH.size : end])
    except (struct.error, TypeError, RecursionError) as error:
        raise ValueError(f"no message: {error}") from None
    return str(kind), rest, body[end:]


class Wire:
    """One end of a stream, at an address of the controller's relay, with a thread.

    `receive` gets each message's kind, fields and bytes there. `name` is this end's; `other` is the
    other end's, empty where its first packet tells it. An end that `renews` connects anew, under a
    new name, while it hears nothing: TCP would try again only after as long as the link was cut.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        name: str,
        other: str,
        receive: Callable[[str, list[Any], bytes], None],
        *,
        near: bool,
    ) -> None:
        self._address, self._name, self._other = address, name, other.encode()
        self._renews = not near
        self._receive = receive
        self._names = itertools.count()
        self._stream = Stream(key, time.monotonic(), near=near)
        self._changed = threading.Condition()
        """Guards the stream; notified when there is room in it."""
        self._closing = False
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._watched: dict[Any, tuple[int, Callable[[], None]]] = {}
        self._woken, self._wakes = socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._context: Any = zmq.Context()
        self._sockets: list[Any] = []
        self._connect()
        self._thread = threading.Thread(target=self._loop, name="ddp-wire", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """The time since the other end was last seen."""
        return time.monotonic() - self._stream.heard_s

    @property
    def full(self) -> bool:
        """True while the other end does not take what there is."""
        return self._stream.full

    def send(self, *message: Any, blob: bytes = b"") -> None:
        """Send a message. While the window is full it waits, except on the wire's own thread."""
        body = packed(list(message), blob)
        own = threading.current_thread() is self._thread
        with self._changed:
            while self._stream.full and not own and not self._closing:
                self._changed.wait(0.5)
            self._stream.put(body)
        if not own:
            self._wake()

    # -- what else runs on its thread ------------------------------------------------------

    def call(self, function: Callable[[], None], after_s: float = 0.0) -> None:
        """Call a function on the wire's thread, soon or after some seconds."""
        due_s = time.monotonic() + after_s
        self._calls.append(
            lambda: heapq.heappush(self._timers, (due_s, next(self._order), function))
        )
        self._wake()

    def watch(self, source: Any, events: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever a socket is ready. On the wire's thread only.

        Those that are read are left alone while the window is full: what they bring waits there.
        """
        self._watched[source] = events, handler

    def unwatch(self, source: Any) -> None:
        """Watch it no longer. On the wire's thread only."""
        self._watched.pop(source, None)

    # -- the end ---------------------------------------------------------------------------

    def close(self, flush_s: float = 1.0) -> None:
        """Wait until all has arrived, but no longer than this; then stop."""
        deadline_s = time.monotonic() + flush_s
        with self._changed:
            while not self._stream.empty and time.monotonic() < deadline_s:
                self._changed.wait(0.02)
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    # -- its thread ------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; or the wire is closed
            self._wakes.send(b"\0")

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = f"{self._name}.{next(self._names)}".encode()
        socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(self._address)
        self._sockets.append(socket)
        while len(self._sockets) > 2:  # the one before may still bring something
            self._sockets.pop(0).close(0)
        self._connected_s = time.monotonic()

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for socket in self._sockets:
                socket.close(50)
            self._context.destroy(50)
            for end in (self._woken, self._wakes):
                end.close()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        poller = zmq.Poller()
        for source in (self._woken, *self._sockets):
            poller.register(source, zmq.POLLIN)
        for source, (events, _) in self._watched.items():
            if not (self._stream.full and events == zmq.POLLIN):
                poller.register(source, events)
        now_s = time.monotonic()
        next_s = min([now_s + BEAT_S / 2, *(due_s for due_s, _, _ in self._timers[:1])])
        ready = dict(poller.poll(max(0, math.ceil((next_s - now_s) * 1000))))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        for socket in tuple(self._sockets):
            with contextlib.suppress(zmq.Again):
                for _ in range(_READS_AT_ONCE):
                    self._take(socket.recv_multipart(zmq.NOBLOCK))
        while self._calls:
            self._calls.popleft()()
        while self._timers and self._timers[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # a folder is gone: who needs it is told elsewhere
                heapq.heappop(self._timers)[2]()
        for source, (_, handler) in tuple(self._watched.items()):
            # One of a handler before may have ended this one.
            if source in self._watched and {source, source.fileno()} & ready.keys():
                handler()
        with self._changed:
            # Nobody is addressed before the other end has told its name.
            packets = self._stream.due(time.monotonic()) if self._other else []
        for packet in packets:
            self._sockets[-1].send_multipart([self._other, _DELIMITER, packet])
        # Later each time: through an ssh that is cut off, each waits there until it is back.
        patience_s = min(4.0, max(SILENT_S, self.silent_s / 4))
        silent = self._renews and self.silent_s > SILENT_S
        if silent and time.monotonic() - self._connected_s > patience_s:
            self._connect()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        # Anyone who reaches the relay may send anything, and the other end is believed no more.
        with contextlib.suppress(ValueError, TypeError, LookupError, OSError):
            with self._changed:
                body = self._stream.take(frames[2], time.monotonic())
                self._changed.notify_all()
            self._other = frames[0]
            if body is not None:
                self._receive(*unpacked(body))


def relay_address(connection: Mapping[str, Any]) -> str:
    """Return the relay's address by a connection file of the controller, of either side."""
    return f"{connection['interface']}:{connection['control']}"
