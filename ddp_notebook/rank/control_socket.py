"""The control socket: a unix socket at which a process is asked, and an engine gets its orders.

It is the one of three channels between a session and a rank whose messages are taken while the main
thread is blocked, which ipyparallel's are not (`cluster/cluster.py`); events leave by a third one,
as no one asks for them (`events.py`).

A message is its length in four bytes, and JSON. A question is ``{"question": name, "about":
request}``, one a connection; what `Handlers.answer` gives for it comes back, from a thread of ours.
A connection that begins with ``{"orders": number}`` (`process_ids.py`) stays, and is read by
`Orders`: so no order waits for an answer to be ready, and none needs the file of the socket, which
may be removed meanwhile.

Only this user gets in: the folder is looked at (`is_private`: 0700, and whose), the socket is 0600,
and the system says whose the other end is (`is_mine`). Who connects looks at the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.launch.process_ids import own_process_id
from ddp_notebook.launch.session_folder import require_private
from ddp_notebook.rank.component import Component

Answers = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""The function that answers: the name of a question and what it is about, to JSON."""

LENGTH = struct.Struct("!I")
MOST_BYTES = 1 << 24
"""Of an answer."""
_MOST_ASKED_BYTES = 1 << 16
_READ_WITHIN_S = 1.0
"""Who connects and then sends nothing keeps the others waiting for no longer."""
_LONGEST_ADDRESS_BYTES = 100
_DESCRIPTORS = Path("/proc/self/fd")
_PEER = struct.Struct("3i")
"""Of Linux: the pid, uid and gid of the other end."""


def is_mine(connection: socket.socket) -> bool:
    """Return True when the other end is this user's, as far as this system tells.

    Where it does not tell (not Linux), the folder of the socket alone keeps others out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[1]) == os.geteuid()


def connected(path: Path) -> socket.socket:
    """Return a connection, which does not block, to the process of this user's that listens at
    `path`. Raises OSError."""
    require_private(path.parent)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # its queue may be full, or it may be stopped
        with reachable(path) as address:
            connection.connect(address)
        if not is_mine(connection):
            raise PermissionError(f"{path} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """An address for the socket at `path`, which may be longer than an address can be (Linux).

    Folders of temporary files, and those of jobs, have long names on some machines.
    """
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS_BYTES or not _DESCRIPTORS.is_dir():
        yield str(path)
        return
    # The kernel follows this path once, when it binds or connects, so the descriptor can be closed
    # afterwards. The socket itself stands in its folder, under its own name.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(folder) / path.name)
    finally:
        os.close(folder)


class ControlSocket(Component):
    """Listens at `path`; `answer(question, about)` answers, on a thread of ours."""

    take_orders: Callable[[socket.socket], None] | None = None
    """Takes a connection over which orders come; None where none are carried out."""

    def __init__(self, path: Path, answer: Answers) -> None:
        self.path = path
        self._answer = answer
        self._listener: socket.socket | None = None
        self._pid = 0
        self._made: os.stat_result | None = None

    def attach(self) -> None:
        """Listen from now on. Where that cannot be, this process can only not be asked."""
        with contextlib.suppress(OSError):
            self.listen()

    def listen(self) -> None:
        """The same. Raises OSError: its folder is not there or not this user's alone, or the path
        is too long (not Linux)."""
        require_private(self.path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()  # of a process that was here before, and is dead
            with reachable(self.path) as address:
                listener.bind(address)
            self.path.chmod(0o600)
            self._made = self.path.lstat()
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        self._listener, self._pid = listener, os.getpid()
        # A forked child is another process: it must not seem to listen when this one is dead.
        # Python keeps such a function for good: one that listens again after `close` has two, and
        # the second finds nothing to close.
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._serve, name="ddp-questions", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        if self._listener is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._leave()
            with contextlib.suppress(OSError):  # where another process listens by now, it stays
                if self._made is not None and os.path.samestat(self.path.lstat(), self._made):
                    self.path.unlink()

    def _leave(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _serve(self) -> None:
        while (listener := self._listener) is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is None:
                    return
                time.sleep(_READ_WITHIN_S)  # no file descriptor is left: perhaps later
                continue
            with connection, contextlib.suppress(OSError, ValueError, RecursionError):
                connection.settimeout(_READ_WITHIN_S)
                if not is_mine(connection):
                    continue
                (size,) = LENGTH.unpack(_read(connection, LENGTH.size))
                if size > _MOST_ASKED_BYTES:
                    continue
                asked = json.loads(_read(connection, size))
                if not isinstance(asked, dict):
                    continue
                about = asked.get("about", {})
                if self.take_orders is not None and asked.get("orders") == own_process_id():
                    # A copy of the descriptor: this one is closed at the end of the block.
                    self.take_orders(connection.dup())
                elif isinstance(about, dict):
                    connection.sendall(framed(self._answer(str(asked.get("question", "")), about)))


def framed(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def first_message(received: bytearray) -> bytes:
    """Take the first message out of what was received; nothing while it is not whole."""
    if len(received) < LENGTH.size:
        return b""
    end = LENGTH.size + LENGTH.unpack_from(received)[0]
    message = bytes(received[LENGTH.size : end]) if len(received) >= end else b""
    if message:
        del received[:end]
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("it asked for nothing")
        data += piece
    return bytes(data)
