"""Which of this process's sockets are torch's: those that came while set-up ran."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_before: set[int] = set()
_after: set[int] | None = None
_before_call: set[int] = set()
_of_groups: set[int] = set()
"""Those of groups that were made after set-up."""


def setup_begins() -> None:
    """What is open now is not torch's."""
    global _after
    _before.clear()
    _before.update(_inodes())
    _of_groups.clear()
    _after = None


def call_begins() -> None:
    """What listens from now on, until the call of `init_process_group` returns, is torch's."""
    _before_call.clear()
    _before_call.update(_inodes())


def setup_ended() -> None:
    """What comes from now on is not of this set-up."""
    global _after
    _after = set(_inodes())


def open_now() -> frozenset[int]:
    """The sockets that are open, for `came_with_group`."""
    return frozenset(_inodes())


def came_with_group(before: frozenset[int]) -> None:
    """What is open now and was not `before` is torch's: a group was made meanwhile."""
    _of_groups.update(_inodes().keys() - before)


def _inodes() -> dict[int, int]:
    """The sockets of this process, inode to fd; empty where /proc is missing."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = entry.stat()
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(entry.name)
    return found


def listening() -> list[str]:
    """Where sockets listen that came since `call_begins`, as ``address:port``."""
    found = []
    for inode, fd in sorted(_inodes().items()):
        if inode not in _before_call and (address := _listening_at(fd)):
            found.append(address)
    return found


def _listening_at(fd: int) -> str:
    """Where the TCP socket behind `fd` listens; empty when it does not."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        inet = listener.family in (socket.AF_INET, socket.AF_INET6)
        if inet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = listener.getsockname()[:2]
            return f"{host}:{port}"
    return ""


def shut_down_torchs() -> int:
    """End the connections of this set-up, and of groups made since; how many there were."""
    closed = 0
    for inode, fd in sorted(_inodes().items()):
        of_setup = inode not in _before and (_after is None or inode in _after)
        if of_setup or inode in _of_groups:
            closed += _shut_down(fd)
    return closed


def _shut_down(fd: int) -> bool:
    """End the TCP connection behind `fd`, also one that is only being made. Never a listener."""
    try:
        connection = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # shutting a listener down aborts the process
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
