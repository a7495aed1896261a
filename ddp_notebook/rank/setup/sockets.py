"""Which of this process's sockets are torch's: those that were opened while it set up a group."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from pathlib import Path

from ddp_notebook.rank.component import Component

_NEEDED = 4
"""Descriptors that ending the connections takes at once: a folder, a copy of a socket, one more."""


class TorchSockets(Component):
    """torch does not expose its sockets, so they are identified by the time of their opening."""

    def __init__(self) -> None:
        # By inode: the number of a descriptor is given to the next file as soon as a socket is
        # closed, and its inode is not.
        self._torchs: set[int] = set()
        self._before_setup: set[int] | None = None
        """The sockets that were open when setup began, during setup."""
        self._before_group: set[int] | None = None
        """The sockets that were open when torch began to make a group, while it does."""
        self._before_call: set[int] = set()

    def setup_begins(self) -> None:
        """End the connections of earlier groups. Sockets opened from now on are torch's.

        The groups are destroyed next. Destroying a gloo group waits up to half an hour for its
        unfinished collectives, and nothing could free the rank meanwhile.
        """
        self.shut_down()
        self._torchs.clear()
        self._before_setup, self._before_group = set(_inodes()), None

    def setup_ended(self) -> None:
        """Sockets opened from now on do not belong to this setup."""
        if self._before_setup is not None:
            self._torchs.update(_inodes().keys() - self._before_setup)
            self._before_setup = None

    def group_begins(self) -> None:
        """Sockets opened from now on belong to a group that torch makes."""
        self._before_group = set(_inodes())

    def group_ended(self) -> None:
        """Sockets opened from now on do not belong to that group."""
        if self._before_group is not None:
            self._torchs.update(_inodes().keys() - self._before_group)
            self._before_group = None

    def call_begins(self) -> None:
        """Listeners from now on, until `init_process_group` returns, are torch's."""
        self._before_call.clear()
        self._before_call.update(_inodes())

    def listening(self) -> list[str]:
        """Where sockets listen that were opened since `call_begins`, as ``address:port``."""
        addresses = []
        for inode, fd in sorted(_inodes().items()):
            if inode not in self._before_call and (address := _listening_at(fd)):
                addresses.append(address)
        return addresses

    def shut_down(self) -> int:
        """End the connections of torch's groups and of a setup in progress; returns how many."""
        befores = [each for each in (self._before_setup, self._before_group) if each is not None]
        closed = 0
        for inode, fd in sorted(_inodes().items()):
            if inode in self._torchs or any(inode not in before for before in befores):
                closed += _shut_down(fd)
        return closed

    def end(self, *, groups: bool) -> None:
        """End all TCP connections, as if the process had ended; optionally not those of groups.

        Listeners are replaced: a store's thread that fails to accept aborts the process. A process
        that may open no more files is allowed as many as the system gives it.
        """
        opened: list[int] = []
        try:
            while len(opened) < _NEEDED:
                opened.append(os.open(os.devnull, os.O_RDWR))
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            opened = opened or [os.open(os.devnull, os.O_RDWR)]
        null, *spare = opened
        for descriptor in spare:
            os.close(descriptor)
        for inode, fd in sorted(_inodes().items()):
            if _listening_at(fd):
                os.dup2(null, fd)
            elif groups or inode not in self._torchs:
                _shut_down(fd)
        os.close(null)


def _inodes() -> dict[int, int]:
    """The sockets of this process, inode to fd; empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = entry.stat()
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(entry.name)
    return found


def _listening_at(fd: int) -> str:
    """Where the TCP socket `fd` listens; empty if it does not."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        inet = listener.family in (socket.AF_INET, socket.AF_INET6)
        if inet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = listener.getsockname()[:2]
            return f"{host}:{port}"
    return ""


def _shut_down(fd: int) -> bool:
    """End the TCP connection `fd`, also one that is still connecting. Never a listener."""
    try:
        # Of a copy, as Python's object closes what it is given. `shutdown` ends the connection
        # itself, whatever the number of its descriptors, and leaves torch's own open: closed, its
        # number could be another file's while torch still uses it.
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
