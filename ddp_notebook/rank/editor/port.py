"""A port on loopback for one editor of this user's, and what it says to debugpy and back."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.1
_MOST_BYTES = 1 << 16
_CONNECTIONS = Path("/proc/net/tcp")
"""Of Linux: the connections of this network namespace, each with the uid that it belongs to."""


class Port:
    """Listens at `number` until somebody of this user's has connected, or it is closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=1)
        self._pid = os.getpid()
        self.number: int = self._listener.getsockname()[1]
        self.closed = threading.Event()
        # A forked child is no rank: it must not keep the port open.
        os.register_at_fork(after_in_child=self._listener.close)

    def close(self) -> None:
        """Let nobody in any more. Thread-safe."""
        self.closed.set()
        with contextlib.suppress(OSError):  # a thread that waits there would keep it open
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def accept(self, within_s: float) -> socket.socket | None:
        """The first of this user's that connects; None if nobody does. Then the port is closed."""
        until_s = time.monotonic() + within_s
        with contextlib.suppress(OSError, ValueError), self._listener:  # it may be closed meanwhile
            while time.monotonic() < until_s:
                if not _readable((self._listener,)):
                    continue
                connection, _ = self._listener.accept()
                if is_mine(connection):
                    self.close()
                    os.register_at_fork(after_in_child=connection.close)
                    return connection
                connection.close()
        self.close()
        return None


def is_mine(connection: socket.socket) -> bool:
    """Whether the other end on this host is a process of this user's, or of root.

    True as well where the system does not tell (not Linux).
    """
    if not _CONNECTIONS.exists():
        return True
    (address, port), wanted = connection.getpeername(), connection.getsockname()
    ends = [_as_listed(address, port), _as_listed(*wanted)]
    for line in _CONNECTIONS.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return int(fields[7]) in (os.geteuid(), 0)
    return False


def _as_listed(address: str, port: int) -> str:
    """As the system lists it: the address in the byte order of the host."""
    number = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    return f"{number:08X}:{port:04X}"


def pass_on(
    editor: socket.socket,
    debugpy: socket.socket,
    look: Callable[[], bool],
    left: Callable[[], None],
) -> None:
    """Pass on what both say until debugpy is gone, or `look`, called often, says that it is over.

    `left`: the editor is gone. What debugpy says from then on is read, and passed on to nobody.
    """
    there = True
    with editor, debugpy:
        while look():
            for end in _readable((editor, debugpy) if there else (debugpy,)):
                data = _received(end)
                if end is debugpy and not data:
                    return
                other = editor if end is debugpy else debugpy
                if there and not (data and _sent(other, data)):
                    there = False
                    left()


def _received(end: socket.socket) -> bytes:
    """What it says; nothing when it is gone."""
    try:
        return end.recv(_MOST_BYTES)
    except OSError:
        return b""


def _sent(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except OSError:
        return False
    return True


def _readable(ends: tuple[socket.socket, ...]) -> list[socket.socket]:
    return select.select(ends, (), (), _LOOK_EVERY_S)[0]
