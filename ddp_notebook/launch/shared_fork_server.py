"""Shares a loaded fork server among one user's notebooks: it forks a fork server for each.

Python, torch and the modules they need take about 240 MB and a second or two in each fork server
that loads them. The first notebook starts a fork server, which listens on a socket. A later
notebook connects, passes two pipes, and gets a fork server of its own, forked with everything
loaded. After that the two are independent: each has its own notebook, children and end.

Only equal servers are shared: same user, Python, module path, environment, limits, control group
and namespaces, nothing installed in between, and the same folder unless neither folder holds
anything that Python would load. A hash of all that is the name of the socket, in a folder that only
the user can enter; not in Linux's abstract namespace, where a container with the host's network
could connect. Each end checks that the other has the same user, groups, capabilities, root,
namespaces and control group; the kernel reports the peer's process. On other systems, and on any
failure, a notebook starts its own fork server.

`client.py` uses `address`, `listen` and `request`; `fork_server.py` uses `ListeningSocket`.
No other module knows about the sharing.
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
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_notebook.launch.session_folder import is_private

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
_LONGEST_ADDRESS_BYTES = 90
_FREEDOM = (
    *("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)


# --------------------------------------------------------------------------- the address


def address(python_path: Sequence[str]) -> str:
    """The address of the fork servers that are equal to one that this process would start.

    Empty where nothing can be shared.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))  # missing on old kernels, in some containers
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
    made = str(Path(tempfile.gettempdir(), f"ddp-notebook-{os.getuid()}", digest[:32]))
    return made if len(os.fsencode(made)) <= _LONGEST_ADDRESS_BYTES else ""


def _folder_with_modules() -> str:
    """The current folder if Python could load modules from it, else empty: any matches."""
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
    """A fork server that another notebook's server forks for us; the used subset of Popen."""

    def __init__(self, connection: socket.socket, commands: int, events: int) -> None:
        self._connection = connection
        self.stdin = os.fdopen(commands, "wb")
        self.stdout = os.fdopen(events, "rb")
        self._pid = 0
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """Its pid; 0 until its first event has arrived."""
        return self._pid

    def answers(self, timeout_s: float) -> bool:
        """Whether it sends an event, or ends, in that time."""
        return _readable(self.stdout.fileno(), timeout_s)

    def identify(self) -> bool:
        """Reads its pid from the kernel once its first event has arrived; False without one.

        A pid in the event could be forged, and this process is killed in the end.
        """
        with contextlib.suppress(OSError), self._connection as connection:
            _, control, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            for level, kind, data in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, user, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                    if user == os.getuid() and pid > 0:
                        self._pid, self._pidfd = pid, os.pidfd_open(pid)
        return self._pidfd >= 0

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self._pidfd < 0:
            return
        if not _readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Signal it, if it exists."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def __del__(self) -> None:
        self._connection.close()
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
    if not address or not is_private(Path(address).parent):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        sock.setblocking(False)  # a full queue is then an error and does not block
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.connect(address)
        if not _peer_pid(sock):
            sock.close()
            return None
        commands_read, commands_write = os.pipe()
        events_read, events_write = os.pipe()
        server = ForkedServer(sock, commands_write, events_read)
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
    sock.close()
    return None


# --------------------------------------------------------------------------- the server's end


class Client(NamedTuple):
    """A notebook that asks for a fork server: the pipes for that server, and its own process."""

    commands: int
    events: int
    connection: int
    """The socket on which it asked."""
    notebook: int
    """A pidfd: readable when the notebook's process has ended."""

    def introduce(self) -> None:
        """In the server that was forked for it: have the kernel tell which process that is."""
        with contextlib.suppress(OSError), socket.socket(fileno=self.connection) as connection:
            connection.send(b"!")

    def close(self) -> None:
        """Close them in a process that does not serve this client."""
        for fd in self:
            os.close(fd)


def listen(address: str) -> socket.socket | None:
    """Listen at `address`; None when another server does already, or the address is empty."""
    if not address:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = f"{address}.{os.getpid()}"
    try:
        folder = Path(address).parent
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_private(folder):
            raise PermissionError(f"{folder} is not this user's alone")
        sock.bind(new)
        sock.listen(_BACKLOG)
        _remove_dead(address)
        os.link(new, address)  # last, so that none finds it closed; one of several wins
    except OSError:
        sock.close()
        return None
    finally:
        with contextlib.suppress(OSError):
            Path(new).unlink()
    sock.setblocking(False)
    return sock


def _remove_dead(address: str) -> None:
    """Remove the socket of a server that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except ConnectionRefusedError:
            Path(address).unlink(missing_ok=True)
        except OSError:  # none is there; or one is, and busy
            pass


class ListeningSocket:
    """Accepts a fork server's clients: one of all equal servers listens at `address`."""

    def __init__(self, address: str, fd: int = -1) -> None:
        self.address = address
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        self._file = file_of(address) if fd >= 0 else None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor that is readable when a client waits; none while another one listens."""
        return () if self._socket is None else (self._socket.fileno(),)

    def accept(self) -> Client | None:
        """The next client; None when there is none. Listens first, if no other server does."""
        # Not Path.exists(): it raises where another user has made a folder of that name.
        if self._socket is None and self.address and file_of(self.address) is None:
            self._socket = listen(self.address)
            self._file = file_of(self.address) if self._socket is not None else None
        return accept(self._socket) if self._socket is not None else None

    def close(self) -> None:
        """Stop listening, in a forked child."""
        self._file = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def remove(self) -> None:
        """Leave the address to another server, at the end of this one."""
        remove(self.address, self._file)


def file_of(address: str) -> tuple[int, int] | None:
    """Identifies the socket at `address`, to tell it from a later one; None without one."""
    try:
        status = Path(address).lstat() if address else None
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status is not None else None


def remove(address: str, file: tuple[int, int] | None) -> None:
    """Remove a socket, if it is still the one that was there, and an empty folder."""
    if file is not None and file_of(address) == file:
        with contextlib.suppress(OSError):
            Path(address).unlink()
            Path(address).parent.rmdir()


def accept(listener: socket.socket) -> Client | None:
    """The next client; None if it is another user's, sends no pipes, or has already left."""
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
                    notebook = os.pidfd_open(pid)
                    return Client(fds[0], fds[1], os.dup(connection.fileno()), notebook)
            for fd in fds:
                os.close(fd)
    return None


def _peer_pid(connection: socket.socket) -> int:
    """The pid of the peer; 0 for another user's process, and for a more restricted one.

    Otherwise a process could leave its container or sandbox through our server, or we enter it.
    """
    pid, user, _ = _peer_credentials(connection)
    if user != os.getuid() or pid <= 0:
        return 0
    try:
        return pid if _freedom(str(pid)) == _freedom("self") else 0
    except OSError:  # it has ended, or may not be inspected
        return 0


def _freedom(process: str) -> list[str]:
    """A process's privileges and location: user, groups, capabilities, root, namespaces, control
    group, and the label of a security module such as AppArmor."""
    folder = Path("/proc", process)
    status = (folder / "status").read_text("utf-8", "replace").splitlines()
    namespaces = sorted(str(link.readlink()) for link in (folder / "ns").iterdir())
    limits = [line for line in status if line.partition(":")[0] in _FREEDOM]
    label = ""
    with contextlib.suppress(OSError):  # there is none
        label = (folder / "attr/current").read_text("utf-8", "replace")
    group = (folder / "cgroup").read_text("utf-8", "replace")
    return [*limits, *namespaces, str((folder / "root").readlink()), group, label]


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, from the kernel.

    The process is 0 when it is in another process namespace than this one.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(data)
    return pid, user, group
