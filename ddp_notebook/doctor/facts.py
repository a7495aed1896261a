"""What the checks need to know, asked of the system and of a fresh Python. Changes nothing.

What only Linux tells is None on other systems.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ddp_notebook.doctor.machine import SHARED_MEMORY, EarlierRank, Folder
from ddp_notebook.doctor.network import Holder, Interface, Lookup, Ports
from ddp_notebook.launch import session_folder
from ddp_notebook.launch.out_of_memory import (
    CONTROL_GROUPS,
    MEMBERSHIP,
    Limit,
    control_groups,
    read_number,
)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

TORCH_TIMEOUT_S = 90.0
"""How long a fresh Python may take to import torch; a cold disk takes a minute."""
_LOOKUP_TIMEOUT_S = 5.0
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_INITS = {"systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "launchd"}
"""Names of process 1 where it is an init system and not a job itself."""

_ASK_TORCH = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from ddp_notebook.rank.inspect.facts import gather;"
    "print('\\n' + json.dumps(gather(probe_cuda=True)))"
)


# --------------------------------------------------------------------------- software


def torch_facts(timeout_s: float = TORCH_TIMEOUT_S) -> dict[str, Any]:
    """What `rank.inspect.facts.gather` returns in a fresh Python: this one never imports torch.

    When that Python fails or takes too long, `torch_error` says so.
    """
    command = [sys.executable, "-c", _ASK_TORCH, json.dumps(sys.path)]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": f"importing it takes longer than {timeout_s:.0f} s"}
    except OSError as error:
        return {"torch_error": f"{sys.executable} cannot be started: {error}"}
    lines = asked.stdout.splitlines()
    if asked.returncode == 0 and lines:
        with contextlib.suppress(ValueError):
            facts: dict[str, Any] = json.loads(lines[-1])
            return facts
    last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return {"torch_error": f"a Python that imports it ends with {asked.returncode}: {last}"}


def installed_version(distribution: str) -> str:
    """The version of a distribution, empty when it is not installed. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def modules_of(folder: Path) -> Iterator[str]:
    """The names of the modules that a Python started in `folder` would import from there."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix == ".py":
                yield path.stem
            elif (path / "__init__.py").exists():
                yield path.name


# --------------------------------------------------------------------------- network


def connections() -> Sequence[Any] | None:
    """All TCP and UDP sockets of the machine, as from psutil; None where that is forbidden."""
    with contextlib.suppress(psutil.Error, OSError):
        sockets: Sequence[Any] = psutil.net_connections("inet")
        return sockets
    return None


def local_ports(sockets: Sequence[Any] | None) -> Ports | None:
    """The range that the system takes free ports from; None on other systems than Linux."""
    try:
        first, last = (int(word) for word in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return None
    if sockets is None:
        return Ports(first, last, None)
    used = {connection.laddr.port for connection in sockets if connection.laddr}
    return Ports(first, last, sum(first <= port <= last for port in used))


def holders_of(port: int, sockets: Sequence[Any] | None) -> tuple[Holder, ...]:
    """The processes that hold TCP port `port`; only listeners if there are any."""
    holders = {}
    for sock in sockets or ():
        if sock.laddr and sock.laddr.port == port and sock.type == socket.SOCK_STREAM:
            listens = sock.status == psutil.CONN_LISTEN
            if listens or sock.pid not in holders:
                holders[sock.pid] = Holder(sock.pid, _command(sock.pid), listens)
    listeners = tuple(holder for holder in holders.values() if holder.listens)
    return listeners or tuple(holders.values())


def _command(pid: int | None) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(psutil.Process(pid).cmdline())[:120] if pid else ""
    return ""


def try_port(port: int) -> int:
    """0 when `port` can be bound on every address of this host, else the errno of the attempt.

    It is bound as torch's store binds it, and closed without listening.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if sys.platform != "win32":  # there it would take another process's port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def try_loopback() -> str:
    """Why a connection over 127.0.0.1 fails; empty if it succeeds."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_LOOKUP_TIMEOUT_S)
            with socket.create_connection(listener.getsockname(), _LOOKUP_TIMEOUT_S):
                listener.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def look_up(name: str, timeout_s: float = _LOOKUP_TIMEOUT_S) -> Lookup:
    """The addresses of a host name; `error` if the resolver fails or does not answer in time."""
    answers: list[Lookup] = []

    def ask() -> None:
        began = time.monotonic()
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a possible host name
            why = getattr(error, "strerror", None) or str(error)
            answers.append(Lookup(name, error=why))
            return
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in answer))
        answers.append(Lookup(name, addresses, took_s=time.monotonic() - began))

    # getaddrinfo has no timeout of its own.
    thread = threading.Thread(target=ask, name="ddp-look-up", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else Lookup(name, error=f"no answer within {timeout_s:g} s")


def interfaces() -> Mapping[str, Interface]:
    """The network interfaces by name, with their IP addresses; none where that is forbidden."""
    families = (socket.AF_INET, socket.AF_INET6)
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except (psutil.Error, OSError):
        return {}
    return {
        name: Interface(
            up=name in states and bool(states[name].isup),
            addresses=tuple(
                address.address.partition("%")[0]
                for address in addresses.get(name, ())
                if address.family in families
            ),
        )
        for name in sorted({*addresses, *states})
    }


# --------------------------------------------------------------------------- machine


def available_bytes() -> int:
    """Memory that is available without swapping."""
    return int(psutil.virtual_memory().available)


def resource_limit(name: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of this process, as ``RLIMIT_NOFILE``; None where there is none."""
    try:
        limits = resource.getrlimit(getattr(resource, name))
    except (AttributeError, OSError):  # another system's limit, or Windows: no such module
        return None, None
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def process_limit() -> tuple[int | None, int]:
    """RLIMIT_NPROC, None where there is no limit, and how many threads this user has now."""
    soft, _ = resource_limit("RLIMIT_NPROC")
    if soft is None or os.geteuid() == 0:  # the kernel does not apply it to root
        return None, 0
    user = os.getuid()
    threads = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == user:
                threads += process.num_threads()
    return soft, threads


def shared_memory() -> tuple[int, int] | None:
    """Total and free bytes of /dev/shm, None where it is missing."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None
    return usage.total, usage.free


def temporary_folder() -> Folder:
    """The folder in which that of a session is made, and whether it can be written to."""
    try:
        path = str(session_folder.parents()[0])
    except OSError as error:  # Python tried several and can write to none
        return Folder(os.environ.get("TMPDIR", ""), str(error), 0, None)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return Folder(path, error.strerror or str(error), 0, None)
    free_files = session_folder.files_left(path)
    return Folder(path, "", shutil.disk_usage(path).free, free_files)


def earlier_ranks() -> tuple[EarlierRank, ...] | None:
    """Processes with RANK in their environment whose parent has ended, as far as one may look.

    Such processes are children of process 1, or of the user's systemd. None where process 1 may
    be a job itself, as in a container: there they cannot be recognized.
    """
    processes = list(psutil.process_iter(["pid", "ppid", "name"]))
    inits = {process.info["pid"] for process in processes if process.info["name"] in _INITS}
    if 1 not in inits:
        return None
    orphans = (process for process in processes if process.info["ppid"] in inits)
    return tuple(filter(None, map(_as_rank, orphans)))


def _as_rank(process: Any) -> EarlierRank | None:
    """A process as a rank; None when it is none, or one may not look."""
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
        if {"RANK", "WORLD_SIZE"} <= environment.keys() and process.pid != os.getpid():
            return EarlierRank(process.pid, environment["RANK"], " ".join(process.cmdline()))
    return None


# --------------------------------------------------------------------------- containers


def container_processes(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> Limit | None:
    """The tightest limit on processes and threads together; None without one."""
    limits = []
    for folder in control_groups("pids", root, membership):
        allowed, used = read_number(folder, "pids.max"), read_number(folder, "pids.current")
        if allowed is not None and used is not None:
            limits.append(Limit(allowed, used))
    return min(limits, key=lambda limit: limit.left, default=None)
