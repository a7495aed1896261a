"""Which of this process's sockets are torch's: those that came while set-up ran."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_before: set[int] = set()
_after: set[int] | None = None


def setup_begins() -> None:
    """What is open now is not torch's."""
    global _after
    _before.clear()
    _before.update(_inodes())
    _after = None


def setup_ended() -> None:
    """What comes from now on is not of this set-up."""
    global _after
    _after = set(_inodes())


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


def shut_down_torchs() -> int:
    """End the connections of this set-up; how many there were."""
    closed = 0
    for inode, fd in sorted(_inodes().items()):
        if inode not in _before and (_after is None or inode in _after):
            closed += _shut_down(fd)
    return closed


def _shut_down(fd: int) -> bool:
    """End the connection behind `fd`, if it is an established TCP one. Never a listening one."""
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
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
