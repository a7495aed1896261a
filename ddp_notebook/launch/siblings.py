"""Fork servers of one user that would be alike share their memory: one forks the others.

Python, torch and what comes with them are about 240 MB in each fork server that loads them, and
loading takes a second or two. The first notebook starts a server and has it listen; a later one
that finds it listening passes it two pipes and gets a sibling, forked with all that is loaded.
From then on the two have nothing to do with each other: each has its own notebook, its own
children and its own end.

Alike are servers with the same user, Python, module path, environment, limits, control group and
namespaces, with nothing installed in between, and with the same folder, or folders with nothing in
them that Python loads. All of it makes the name under which a server listens, in Linux's abstract
namespace: it goes with who listens, and leaves no file. Both ends check that the other is the same
user. Elsewhere, and whenever anything is in the way, every notebook has a server that it starts
itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_STATUS = ("Uid", "Gid", "Groups", "Umask", "CapEff", "Seccomp", "Cpus_allowed", "Mems_allowed")
_NOT_ASKED = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL")
"""Variables in which shells and terminals keep what is theirs."""
_LOADED = tuple(importlib.machinery.all_suffixes())
_BACKLOG = 128
_SENT_WITHIN_S = 1.0
_CREDENTIALS = struct.Struct("3i")


class Guest(NamedTuple):
    """What the server of another notebook is to have: its pipes, and that notebook's process."""

    commands: int
    events: int
    notebook: int
    """A pidfd: readable when the notebook is gone."""

    def close(self) -> None:
        """Leave them to whom they are for."""
        for fd in self:
            os.close(fd)


class Sibling:
    """A server that another one is to fork for us; of its process as much as of a Popen is used."""

    def __init__(self, commands: int, events: int) -> None:
        self.stdin = os.fdopen(commands, "wb")
        self.stdout = os.fdopen(events, "rb")
        self._pid = 0
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """Its process; 0 before it has told."""
        return self._pid

    def answers(self, within_s: float) -> bool:
        """Whether it says anything, or ends, in that time."""
        return _readable(self.stdout.fileno(), within_s)

    def is_process(self, pid: int) -> None:
        """It has told its process."""
        self._pid = pid
        with contextlib.suppress(OSError):  # it has ended already
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self._pidfd < 0:
            return
        if not _readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)

    def kill(self) -> None:
        """End it at once."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _readable(fd: int, within_s: float | None) -> bool:
    """Not by select: a notebook may have more than 1,024 files open."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(None if within_s is None else 1000.0 * within_s))


def meeting_point(python_path: Sequence[str]) -> str:
    """Where a server that this process would start meets those that are like it; empty: nowhere."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))  # older systems, and some containers, have none
        alike = [
            (sys.executable, sys.version),
            list(python_path),
            _folder(),
            _environment(),
            os.getpriority(os.PRIO_PROCESS, 0),
            [line for line in _lines("status") if line.partition(":")[0] in _STATUS],
            _lines("limits"),
            _lines("cgroup"),
            sorted(str(each.readlink()) for each in Path("/proc/self/ns").iterdir()),
            _installed(python_path),
        ]
    except OSError:  # also: /proc is not to be read, or not this folder
        return ""
    digest = hashlib.sha256(json.dumps(alike).encode("utf-8", "surrogateescape")).hexdigest()
    return f"\0ddp-notebook-{os.getuid()}-{digest[:32]}"


def _folder() -> str:
    """This folder, where something in it could be loaded; else nothing: it might be any other."""
    with os.scandir() as entries:
        for entry in entries:
            loaded = entry.name.endswith(_LOADED) or entry.name == "matplotlibrc"
            if loaded or (entry.is_dir() and Path(entry, "__init__.py").exists()):
                return str(Path.cwd())
    return ""


def _environment() -> list[tuple[str, str]]:
    """The variables on which it can depend how a server turns out; `JPY_` are the notebook's."""
    named = sorted(os.environ.items())
    return [each for each in named if each[0] not in _NOT_ASKED and each[0][:4] != "JPY_"]


def _lines(name: str) -> list[str]:
    return Path("/proc/self", name).read_text("utf-8", "replace").splitlines()


def _installed(python_path: Sequence[str]) -> list[int]:
    """When this package was changed last, and when something was last installed."""
    ours = max(each.stat().st_mtime_ns for each in _PACKAGE.rglob("*.py"))
    folders = [Path(each) for each in python_path if each.endswith("-packages")]
    return [ours, *(each.stat().st_mtime_ns for each in folders if each.is_dir())]


def listen(point: str) -> socket.socket | None:
    """Be the one whom others ask; None when somebody is, or there is no such point."""
    if not point:
        return None
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(point)
        door.listen(_BACKLOG)
    except OSError:
        door.close()
        return None
    door.setblocking(False)
    return door


def ask(point: str) -> Sibling | None:
    """Ask who listens at `point` to fork a sibling for this process; None when that cannot be."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # a queue that is full is no reason to wait
        asking.connect(point)
        if not _who(asking):
            return None
        commands_read, commands_write = os.pipe()
        events_read, events_write = os.pipe()
        sibling = Sibling(commands_write, events_read)
        try:
            socket.send_fds(asking, [b"?"], [commands_read, events_write])
        except OSError:
            sibling.stdin.close()
            sibling.stdout.close()
            return None
        finally:
            os.close(commands_read)
            os.close(events_write)
        return sibling
    return None


def admit(door: socket.socket) -> Guest | None:
    """Who asks for a sibling; None when it is not the same user, or has gone again."""
    with contextlib.suppress(OSError):
        connection, _ = door.accept()
        with connection:
            pid = _who(connection)
            if not pid:
                return None
            connection.settimeout(_SENT_WITHIN_S)
            _, fds, _, _ = socket.recv_fds(connection, 1, 2)
            if len(fds) == 2:
                with contextlib.suppress(OSError):  # it has ended
                    return Guest(fds[0], fds[1], os.pidfd_open(pid))
            for fd in fds:
                os.close(fd)
    return None


def _who(connection: socket.socket) -> int:
    """The process at the other end; 0 for another user's, or one of a container beside ours."""
    pid, user, _ = _peer(connection)
    return pid if user == os.getuid() else 0


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, as the system knows them.

    The process is 0 when this one's namespace does not have it.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(told)
    return pid, user, group
