"""The session's folder on another host, and what passes between the two over the wire.

There ranks find what they find on one host. Their collective logs and their output are copied to
the same names here, block by block, before anything that they say afterwards arrives: so who reads
a log here sees no less than what the ranks' events and answers tell. A connection to a control
socket here leads to the one there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from ddp_notebook.launch.wire import Wire
from ddp_notebook.model import collective_log

_LOG = re.compile(r"(output|script-\d{1,9})/ring-\d{1,5}")
_TEXT = re.compile(r"log/rank-\d{1,5}\.log|store\.log|script-\d{1,9}/rank-\d{1,5}\.(out|err)")
SOCKET = re.compile(r"(script-\d{1,9}/)?ask-\d{1,5}")
"""The names of all files that pass, in the session's folder: what an agent names is no path."""
_BLOCK_BYTES = 1 << 14
_PIECE_BYTES = 1 << 10
"""The pieces at which the sent part of a changed block begins and ends."""
_BEHIND = 256
"""So many collectives before the newest may still be marked as done; others are looked for later,
when everything is compared."""
_LATEST_TEXT_BYTES = 1 << 18
"""The latest part of a text that grows faster than it can be sent; readers look at its end."""
_LARGEST_TEXT_BYTES = 1 << 40
_READ_BYTES = 1 << 16
_MOST_KEPT_BYTES = 1 << 25
"""The most that may wait for a reader of a connection: the largest answer, and some."""
_TRIED_FOR_S, _TRIED_EACH_S = 1.0, 0.01
"""A new process listens soon after it was started."""


# -- files, from there to here ---------------------------------------------------------------


class Mirror:
    """There: sends what has changed in the twin `folder`. On the wire's thread only."""

    def __init__(self, folder: Path, send: Callable[..., None]) -> None:
        self._folder = folder
        self._send = send
        self._logs: dict[str, _Log] = {}
        self._sizes: dict[str, int] = {}

    def look(self, *, all_of_it: bool = False) -> None:
        """Send what is new in the collective logs; with `all_of_it`, changes of old records too."""
        for log in self._logs.values():
            log.send_new(self._send, all_of_it=all_of_it)

    def look_for_files(self) -> None:
        """Find new collective logs, and send what is new in the texts."""
        for path in (*self._folder.glob("*/r*-*"), self._folder / "store.log"):
            name = str(path.relative_to(self._folder))
            with contextlib.suppress(OSError, ValueError):
                if _TEXT.fullmatch(name):
                    self._send_text(name, path)
                elif _LOG.fullmatch(name) and name not in self._logs:
                    self._logs[name] = _Log(name, path)

    def forget(self, folder: str) -> None:
        """Leave out what was in a folder that is gone."""
        self._logs = {n: log for n, log in self._logs.items() if not n.startswith(f"{folder}/")}

    def _send_text(self, name: str, path: Path) -> None:
        size, sent = path.stat().st_size, self._sizes.get(name, 0)
        if size == sent:
            return
        begin = max(sent, size - _LATEST_TEXT_BYTES) if size > sent else 0
        with path.open("rb") as stream:
            stream.seek(begin)
            text = stream.read(_LATEST_TEXT_BYTES)
        self._sizes[name] = begin + len(text)
        for at in range(0, len(text), _READ_BYTES):
            self._send("part", name, begin + at, blob=text[at : at + _READ_BYTES])


class _Log:
    """A rank's collective log, as it was sent last. Raises ValueError while it is not whole."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        with path.open("rb") as stream:
            self._map = mmap.mmap(
                stream.fileno(), collective_log.FILE_BYTES, access=mmap.ACCESS_READ
            )
        self._blocks = [b""] * -(-collective_log.FILE_BYTES // _BLOCK_BYTES)
        self._run = self._written = self._text_bytes = 0

    def send_new(self, send: Callable[..., None], *, all_of_it: bool) -> None:
        """Send what has changed since the last time."""
        # The header is read first and sent last: at no moment has a reader one that promises more
        # than there is. The rank writes in that order, too.
        header = self._map[: collective_log.RECORDS_FROM]
        _, run, written, text_bytes = collective_log.HEADER.unpack_from(header)
        first = max(0, min(self._written, written) - _BEHIND)
        if all_of_it or run != self._run or written - first >= collective_log.CAPACITY:
            numbers = set(range(len(self._blocks)))
        else:
            numbers = {0, *(_block_of_record(n) for n in range(first, written, _RECORDS_APART))}
            if written:
                numbers.add(_block_of_record(written - 1, collective_log.RECORD_BYTES - 1))
            texts = (collective_log.TEXTS_FROM + n for n in (self._text_bytes, text_bytes))
            begin, end = (at // _BLOCK_BYTES for at in texts)
            numbers.update(range(begin, end + 1) if text_bytes != self._text_bytes else ())
        self._run, self._written, self._text_bytes = run, written, text_bytes
        for number in sorted(numbers, reverse=True):
            begin = number * _BLOCK_BYTES
            now = self._map[begin : begin + _BLOCK_BYTES]
            if number == 0:
                now = header + now[len(header) :]
            if now != (before := self._blocks[number]):
                self._blocks[number] = now
                at, changed = _changed(before or bytes(len(now)), now)
                if changed:
                    send("part", self._name, begin + at, blob=changed)


_RECORDS_APART = _BLOCK_BYTES // collective_log.RECORD_BYTES // 2
"""Of records so far apart none lies between in a block of its own."""


def _block_of_record(number: int, offset: int = 0) -> int:
    at = number % collective_log.CAPACITY * collective_log.RECORD_BYTES + offset
    return (collective_log.RECORDS_FROM + at) // _BLOCK_BYTES


def _changed(before: bytes, now: bytes) -> tuple[int, bytes]:
    """Return the part that differs, to whole pieces, and where it begins."""
    pieces = [
        at
        for at in range(0, len(now), _PIECE_BYTES)
        if now[at : at + _PIECE_BYTES] != before[at : at + _PIECE_BYTES]
    ]
    if not pieces:
        return 0, b""
    return pieces[0], now[pieces[0] : pieces[-1] + _PIECE_BYTES]


def write_part(folder: Path, name: Any, begin: Any, part: bytes) -> None:
    """Here: write what a mirror has sent into the session's `folder`.

    Raises ValueError and TypeError for what no mirror sends, OSError where it cannot be written.
    """
    log = _LOG.fullmatch(name)
    largest = collective_log.FILE_BYTES if log else _LARGEST_TEXT_BYTES
    if not (log or _TEXT.fullmatch(name)) or not 0 <= begin <= largest - len(part):
        raise ValueError(f"no file of a session: {name!r:.100}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / name, flags, 0o600)
    try:
        if log and os.fstat(descriptor).st_size != collective_log.FILE_BYTES:
            os.ftruncate(descriptor, collective_log.FILE_BYTES)
        os.pwrite(descriptor, part, begin)
    finally:
        os.close(descriptor)


# -- connections, from here to there ---------------------------------------------------------


class Connections:
    """Connections to the control sockets of a host's ranks; there is one of these at each end.

    On the wire's thread only. A number names a connection; the notebook's end gives it.
    """

    def __init__(self, wire: Callable[[], Wire], folder: Path, before: Callable[[], None]) -> None:
        self._wire = wire
        self._folder = folder
        self._before = before
        """Called before anything that was read is sent."""
        self._open: dict[int, socket.socket] = {}
        self._kept: dict[int, bytearray] = {}
        """The bytes that the readers of connections have not taken yet."""
        self._ending: set[int] = set()
        """Connections that the other end has ended; they stay until all is taken."""
        self._listeners: dict[str, socket.socket] = {}
        self._next = 0

    # -- here ------------------------------------------------------------------------------

    def listen(self, path: Path) -> None:
        """Lead connections to the socket `path` here to the one there."""
        name = str(path.relative_to(self._folder))
        self.close_listener(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(256)
        listener.setblocking(False)
        self._listeners[name] = listener
        self._wire().watch(listener, zmq.POLLIN, lambda: self._accept(name))

    def close_listener(self, path: Path) -> None:
        """Connections to `path` lead nowhere any more."""
        listener = self._listeners.pop(str(path.relative_to(self._folder)), None)
        if listener is not None:
            self._wire().unwatch(listener)
            listener.close()

    def _accept(self, name: str) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listeners[name].accept()
            self._next += 1
            self._wire().send("open", self._next, name)
            self._add(self._next, connection)

    # -- there -----------------------------------------------------------------------------

    def open(self, number: int, name: str, tries_until_s: float = 0.0) -> None:
        """Connect to the socket `name` of this folder; soon, while no process listens there yet."""
        if not SOCKET.fullmatch(name):
            raise ValueError(f"no socket of a session: {name!r:.100}")
        now_s = time.monotonic()
        tries_until_s = tries_until_s or now_s + _TRIED_FOR_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._kept.setdefault(number, bytearray())
        try:
            connection.connect(str(self._folder / name))
        except OSError:
            connection.close()
            if now_s >= tries_until_s:
                self._shut(number)
            else:
                again = partial(self.open, number, name, tries_until_s)
                self._wire().call(again, after_s=_TRIED_EACH_S)
            return
        self._add(number, connection)
        self._write(number)

    # -- at both ends ----------------------------------------------------------------------

    def take(self, kind: str, number: int, data: bytes) -> None:
        """Take what the other end has sent: data for a connection, or its end."""
        if kind == "data" and number in self._kept:
            self._kept[number] += data
            if len(self._kept[number]) > _MOST_KEPT_BYTES:
                self._shut(number)
            elif number in self._open:
                self._write(number)
        elif kind == "shut" and number in self._kept:
            self._ending.add(number)
            if number in self._open:
                self._write(number)

    def close(self) -> None:
        """End all of them."""
        for number in tuple(self._kept):
            self._shut(number, tell=False)
        for name in tuple(self._listeners):
            self.close_listener(self._folder / name)

    def _add(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._open[number] = connection
        self._kept.setdefault(number, bytearray())
        self._watch(number)

    def _watch(self, number: int) -> None:
        events = zmq.POLLIN | (zmq.POLLOUT if self._kept[number] else 0)
        self._wire().watch(self._open[number], events, lambda: self._ready(number))

    def _ready(self, number: int) -> None:
        connection = self._open[number]
        if self._kept[number]:
            self._write(number)
        if number not in self._open:
            return
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._before()
        if data:
            self._wire().send("data", number, blob=data)
        else:
            self._shut(number)

    def _write(self, number: int) -> None:
        kept = self._kept[number]
        try:
            while kept:
                del kept[: self._open[number].send(kept)]
        except BlockingIOError:
            pass
        except OSError:
            self._shut(number)
            return
        if number in self._ending and not kept:
            self._shut(number, tell=False)
        else:
            self._watch(number)

    def _shut(self, number: int, *, tell: bool = True) -> None:
        connection = self._open.pop(number, None)
        self._kept.pop(number, None)
        self._ending.discard(number)
        if connection is not None:
            self._wire().unwatch(connection)
            connection.close()
        if tell:
            self._wire().send("shut", number)
