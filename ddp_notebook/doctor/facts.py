"""Asks the system, and a fresh Python, what the checks need. Nothing is changed.

What another system than Linux does not tell is None.
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
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import psutil

from ddp_notebook.doctor.gpus import Gpu
from ddp_notebook.doctor.machine import SHARED_MEMORY, EarlierRank, Folder
from ddp_notebook.doctor.network import Holder, Interface, Lookup, Ports
from ddp_notebook.launch.devices import nvidia_smi

TORCH_TIMEOUT_S = 90.0
"""How long a fresh Python may take to import torch; a cold disk takes a minute."""
_LOOKUP_TIMEOUT_S = 5.0
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_INITS = {"systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "launchd"}
"""What process 1 is called where it is nobody's job."""

_ASK_TORCH = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from ddp_notebook.rank.inspect.facts import gather;"
    "print('\\n' + json.dumps(gather(probe_cuda=True)))"
)


# --------------------------------------------------------------------------- software


def torch_facts(timeout_s: float = TORCH_TIMEOUT_S) -> dict[str, Any]:
    """What `agent.facts.gather` finds in a fresh Python: this one never imports torch.

    When that Python fails or is not done in time, `torch_error` says so.
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
    last = (asked.stderr.strip().splitlines() or ["no word"])[-1]
    return {"torch_error": f"a Python that imports it ends with {asked.returncode}: {last}"}


def installed_version(distribution: str) -> str:
    """The version of an installed distribution, empty when it is not there. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def modules_of(folder: Path) -> Iterator[str]:
    """The names of modules that a Python started in `folder` finds there first."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix == ".py":
                yield path.stem
            elif (path / "__init__.py").exists():
                yield path.name


# --------------------------------------------------------------------------- GPUs


def gpus() -> tuple[Gpu, ...]:
    """All GPUs, whatever CUDA_VISIBLE_DEVICES says; none without nvidia-smi."""
    lines = nvidia_smi("index,uuid,name,memory.used,memory.total")
    return tuple(_gpu(line) for line in lines if line.count(",") >= 4)


def _gpu(line: str) -> Gpu:
    """A GPU from a line such as ``0, GPU-2c1…, NVIDIA H100, 523, 81559`` (in MiB)."""
    index, uuid, *name, used, total = (part.strip() for part in line.split(","))
    return Gpu(index, uuid, ", ".join(name), _mib(used), _mib(total))


def _mib(text: str) -> int:
    return int(text) * 2**20 if text.isdecimal() else 0  # or "[N/A]"


# --------------------------------------------------------------------------- network


def connections() -> Sequence[Any] | None:
    """All TCP and UDP sockets of the machine, as psutil has them; None where one may not see."""
    try:
        found: Sequence[Any] = psutil.net_connections("inet")
    except (psutil.Error, OSError):
        return None
    return found


def local_ports(sockets: Sequence[Any] | None) -> Ports | None:
    """The range the system takes ports from; None where it does not say (not on Linux)."""
    try:
        first, last = (int(word) for word in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return None
    if sockets is None:
        return Ports(first, last, None)
    used = {each.laddr.port for each in sockets if each.laddr}
    return Ports(first, last, sum(first <= port <= last for port in used))


def holders_of(port: int, sockets: Sequence[Any] | None) -> tuple[Holder, ...]:
    """The processes that have `port`; listeners alone if there are any."""
    found = {}
    for each in sockets or ():
        if each.laddr and each.laddr.port == port and each.type == socket.SOCK_STREAM:
            listens = each.status == psutil.CONN_LISTEN
            if listens or each.pid not in found:
                found[each.pid] = Holder(each.pid, _command(each.pid), listens)
    listeners = tuple(holder for holder in found.values() if holder.listens)
    return listeners or tuple(found.values())


def _command(pid: int | None) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(psutil.Process(pid).cmdline())[:120] if pid else ""
    return ""


def try_port(port: int) -> int:
    """0 when `port` can be had on every address of this host, else the errno of the attempt.

    It is bound as torch's store binds it, and let go without listening.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if sys.platform != "win32":  # there it would take a port that another has
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def try_loopback() -> str:
    """Why two sockets of this host cannot reach each other over 127.0.0.1; empty if they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_LOOKUP_TIMEOUT_S)
            with socket.create_connection(listener.getsockname(), _LOOKUP_TIMEOUT_S):
                listener.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def look_up(name: str, timeout_s: float = _LOOKUP_TIMEOUT_S) -> Lookup:
    """The addresses of a host name. A resolver that does not answer in time is an error."""
    answers: list[Lookup] = []

    def ask() -> None:
        began = time.monotonic()
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: it can be no host name at all
            why = getattr(error, "strerror", None) or str(error)
            answers.append(Lookup(name, error=why))
            return
        addresses = tuple(dict.fromkeys(str(each[4][0]) for each in found))
        answers.append(Lookup(name, addresses, took_s=time.monotonic() - began))

    asking = threading.Thread(target=ask, name="ddp-look-up", daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answers[0] if answers else Lookup(name, error=f"no answer within {timeout_s:g} s")


def interfaces() -> Mapping[str, Interface]:
    """The network interfaces by name, with their IP addresses; none where one may not see."""
    families = (socket.AF_INET, socket.AF_INET6)
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except (psutil.Error, OSError):
        return {}
    return {
        name: Interface(
            up=name in states and bool(states[name].isup),
            addresses=tuple(
                each.address.partition("%")[0]
                for each in addresses.get(name, ())
                if each.family in families
            ),
        )
        for name in sorted({*addresses, *states})
    }


# --------------------------------------------------------------------------- machine


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def resource_limit(name: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of this process, as ``RLIMIT_NOFILE``; None where there is none."""
    try:
        resource: Any = import_module("resource")
        limits = resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError, OSError):
        return None, None
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def process_limit() -> tuple[int | None, int]:
    """RLIMIT_NPROC, None where it does not bind, and the threads this user has now."""
    soft, _ = resource_limit("RLIMIT_NPROC")
    if soft is None or os.geteuid() == 0:  # the kernel does not hold the administrator to it
        return None, 0
    mine = os.getuid()
    threads = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == mine:
                threads += process.num_threads()
    return soft, threads


def shared_memory() -> tuple[int, int] | None:
    """Total and free bytes of /dev/shm, None where it is missing."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None
    return usage.total, usage.free


def package_made_s() -> float:
    """When the package's files were made: seconds since 1970."""
    return Path(__file__).stat().st_mtime


def temporary_folder() -> Folder:
    """The temporary folder, and whether something can be written there."""
    try:
        path = tempfile.gettempdir()
    except OSError as error:  # none of those Python knows can be written to
        return Folder(os.environ.get("TMPDIR", ""), str(error), 0, None)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return Folder(path, error.strerror or str(error), 0, None)
    return Folder(path, "", shutil.disk_usage(path).free, _free_files(path))


def _free_files(path: str) -> int | None:
    if not hasattr(os, "statvfs"):
        return None
    state = os.statvfs(path)
    return state.f_favail if state.f_files else None  # some file systems do not count them


def earlier_ranks() -> tuple[EarlierRank, ...] | None:
    """Processes with RANK in their environment whose parent has ended, of those one may see.

    They are the children of process 1 then, or of the user's own systemd. Where process 1
    may be a job itself, as in a container, it cannot be told: None.
    """
    processes = list(psutil.process_iter(["pid", "ppid", "name"]))
    inits = {each.info["pid"] for each in processes if each.info["name"] in _INITS}
    if 1 not in inits:
        return None
    orphans = (each for each in processes if each.info["ppid"] in inits)
    return tuple(filter(None, map(_as_rank, orphans)))


def _as_rank(process: Any) -> EarlierRank | None:
    """A process as a rank; None when it is none, or may not be looked at."""
    with contextlib.suppress(psutil.Error, OSError):
        environment = process.environ()
        if {"RANK", "WORLD_SIZE"} <= environment.keys() and process.pid != os.getpid():
            return EarlierRank(process.pid, environment["RANK"], " ".join(process.cmdline()))
    return None
