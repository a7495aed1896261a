"""Notebooks of one user share a loaded fork server: it forks a fork server for each of them.

Python, torch and the modules they need take about 240 MB and a second or two in each fork server
that loads them. The first notebook starts a fork server, which listens on a socket. A later
notebook connects, passes two pipes, and gets a fork server of its own, forked with everything
loaded. After that the two are independent: each has its own notebook, children and end.

Only equal servers are shared: same user, Python, module path, environment, limits, control group
and namespaces, nothing installed in between, and the same folder unless neither folder holds
anything that Python would load. A hash of all that is the socket's address, in Linux's abstract
namespace, which leaves no file. Both ends check that the other belongs to the same user. On other
systems, and whenever anything is in the way, a notebook starts a fork server of its own.

`client.py` uses `address`, `listen` and `request`; `fork_server.py` uses `ListeningSocket`.
Nothing else knows of the sharing.
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
_STATUS_FIELDS = (
    *("Uid", "Gid", "Groups", "Umask", "CapEff", "Seccomp", "Cpus_allowed", "Mems_allowed"),
)
_IGNORED_VARIABLES = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL")
"""Variables of shells, terminals and pytest, which no server depends on."""
_MODULE_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_BACKLOG = 128
_RECEIVE_TIMEOUT_S = 1.0
_CREDENTIALS = struct.Struct("3i")


# --------------------------------------------------------------------------- the address


def address(python_path: Sequence[str]) -> str:
    """The address of the fork servers that are equal to one that this process would start.

    Empty where nothing can be shared.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))  # older kernels, and some containers, have none
        identity = [
            (sys.executable, sys.version),
            list(python_path),
            _folder_with_modules(),
            _environment(),
            os.getpriority(os.PRIO_PROCESS, 0),
            [line for line in _proc_lines("status") if line.partition(":")[0] in _STATUS_FIELDS],
            _proc_lines("limits"),
            _proc_lines("cgroup"),
            sorted(str(link.readlink()) for link in Path("/proc/self/ns").iterdir()),
            _modification_times(python_path),
        ]
    except OSError:  # also: /proc or this folder may not be read
        return ""
    digest = hashlib.sha256(json.dumps(identity).encode("utf-8", "surrogateescape")).hexdigest()
    return f"\0ddp-notebook-{os.getuid()}-{digest[:32]}"


def _folder_with_modules() -> str:
    """The current folder if Python could load something from it, else empty: any will do."""
    with os.scandir() as entries:
        for entry in entries:
            loadable = entry.name.endswith(_MODULE_SUFFIXES) or entry.name == "matplotlibrc"
            if loadable or (entry.is_dir() and Path(entry, "__init__.py").exists()):
                return str(Path.cwd())
    return ""


def _environment() -> list[tuple[str, str]]:
    """The variables that a server may depend on; those that begin with JPY_ are the notebook's."""
    return [
        (name, value)
        for name, value in sorted(os.environ.items())
        if name not in _IGNORED_VARIABLES and not name.startswith("JPY_")
    ]


def _proc_lines(name: str) -> list[str]:
    return Path("/proc/self", name).read_text("utf-8", "replace").splitlines()


def _modification_times(python_path: Sequence[str]) -> list[int]:
    """When this package was changed last, and when each site-packages folder was, in ns."""
    package = max(path.stat().st_mtime_ns for path in _PACKAGE.rglob("*.py"))
    folders = [Path(path) for path in python_path if path.endswith("-packages")]
    return [package, *(folder.stat().st_mtime_ns for folder in folders if folder.is_dir())]


# --------------------------------------------------------------------------- the notebook's end


class ForkedServer:
    """A fork server that another notebook's is to fork for us; as much of a Popen as is used."""

    def __init__(self, commands: int, events: int) -> None:
        self.stdin = os.fdopen(commands, "wb")
        self.stdout = os.fdopen(events, "rb")
        self._pid = 0
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """Its process; 0 until its first event, which says it."""
        return self._pid

    def answers(self, timeout_s: float) -> bool:
        """Whether it sends an event, or ends, in that time."""
        return _readable(self.stdout.fileno(), timeout_s)

    def set_pid(self, pid: int) -> None:
        """Its first event has come, from the process `pid`."""
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


def _readable(fd: int, timeout_s: float | None) -> bool:
    # Not select(2), which fails for descriptors above 1,023: a notebook may have more open.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000.0 * timeout_s))


def request(address: str) -> ForkedServer | None:
    """Ask the server that listens at `address` to fork one for this process.

    None when none listens, it is another user's, or its queue is full.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)  # a full queue is an error then, and no wait
        sock.connect(address)
        if not _peer_pid(sock):
            return None
        commands_read, commands_write = os.pipe()
        events_read, events_write = os.pipe()
        server = ForkedServer(commands_write, events_read)
        try:
            socket.send_fds(sock, [b"?"], [commands_read, events_write])
        except OSError:
            server.stdin.close()
            server.stdout.close()
            return None
        finally:
            os.close(commands_read)
            os.close(events_write)
        return server
    return None


# --------------------------------------------------------------------------- the server's end


class Client(NamedTuple):
    """A notebook that asks for a fork server: the pipes for that server, and its own process."""

    commands: int
    events: int
    notebook: int
    """A pidfd: readable when the notebook's process has ended."""

    def close(self) -> None:
        """Close them in a process that does not serve this client."""
        for fd in self:
            os.close(fd)


def listen(address: str) -> socket.socket | None:
    """Listen at `address`; None when another server does already, or the address is empty."""
    if not address:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


class ListeningSocket:
    """Where a fork server gets its clients: one of all equal servers listens at `address`."""

    def __init__(self, address: str, fd: int = -1) -> None:
        self.address = address
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor that is readable when a client waits; none while another one listens."""
        return () if self._socket is None else (self._socket.fileno(),)

    def accept(self) -> Client | None:
        """The next client; None when there is none. Listens first, if no other server does."""
        if self._socket is None:
            self._socket = listen(self.address)
        return accept(self._socket) if self._socket is not None else None

    def close(self) -> None:
        """Listen no more, in a forked child."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def accept(listener: socket.socket) -> Client | None:
    """The next client; None when it is another user's, sends no pipes, or has gone again."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            pid = _peer_pid(connection)
            if not pid:
                return None
            connection.settimeout(_RECEIVE_TIMEOUT_S)
            _, fds, _, _ = socket.recv_fds(connection, 1, 2)
            if len(fds) == 2:
                with contextlib.suppress(OSError):  # the notebook has ended
                    return Client(fds[0], fds[1], os.pidfd_open(pid))
            for fd in fds:
                os.close(fd)
    return None


def _peer_pid(connection: socket.socket) -> int:
    """The process at the other end; 0 for another user's, and for one in another container."""
    pid, user, _ = _peer_credentials(connection)
    return pid if user == os.getuid() else 0


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, from the kernel.

    The process is 0 when it is in another process namespace than this one.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(data)
    return pid, user, group
