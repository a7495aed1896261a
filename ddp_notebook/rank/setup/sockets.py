"""Which of this process's sockets are torch's: those that came while it set up or made a group."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_torchs: set[int] = set()
_before: set[int] | None = None
"""What was open when set-up began, while it goes on."""
_before_group: set[int] | None = None
"""What was open when torch began to make a group, while it does."""
_before_call: set[int] = set()


def setup_begins() -> None:
    """What is open now is not torch's; what comes from now on is."""
    global _before, _before_group
    _torchs.clear()
    _before, _before_group = set(_inodes()), None


def group_begins() -> None:
    """What comes from now on belongs to a group that torch makes."""
    global _before_group
    _before_group = set(_inodes())


def group_ended() -> None:
    """What comes from now on does not belong to that group."""
    global _before_group
    if _before_group is not None:
        _torchs.update(_inodes().keys() - _before_group)
        _before_group = None


def call_begins() -> None:
    """What listens from now on, until the call of `init_process_group` returns, is torch's."""
    _before_call.clear()
    _before_call.update(_inodes())


def setup_ended() -> None:
    """What comes from now on is not of this set-up."""
    global _before
    if _before is not None:
        _torchs.update(_inodes().keys() - _before)
        _before = None


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
    """End the connections of torch's groups and of a set-up that goes on; how many there were."""
    befores = [before for before in (_before, _before_group) if before is not None]
    closed = 0
    for inode, fd in sorted(_inodes().items()):
        if inode in _torchs or any(inode not in before for before in befores):
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
            if connection.type != socket.SOCK_STREAM:
                return False  # a question to the resolver, which would be asked again and again
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # shutting a listener down aborts the process
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
