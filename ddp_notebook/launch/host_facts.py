"""Questions to a machine about itself and its processes.

One table, `QUESTIONS`: the session asks the notebook's own machine by calling it, and another host
through its agent, since /proc, control groups and files are there. Answers are JSON. Pids here are
the machine's own, as in `process_ids.pid_of`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddp_notebook import files
from ddp_notebook.launch import addresses, devices, out_of_memory
from ddp_notebook.launch.process_groups import is_stopped

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Return the CPU cores this process may use, by its affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no cgroup of version 2, or "max"
        quota, period = _CPU_MAX.read_text().split()  # "200000 100000" is 2 cores
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def machine() -> dict[str, Any]:
    """Return what a `placement.Hello` says of this machine alone."""
    torch = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    return {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch,
        "product": sys.modules["ddp_notebook"].__version__,  # of a higher layer
        "cores": cores(),
        "memory_bytes": out_of_memory.bytes_left(),
        "gpus": list(devices.visible_gpus()),
        "for_gpus": devices.torch_is_for_gpus(),
    }


def stopped(pids: Sequence[int]) -> list[int]:
    """Return those processes that wait for SIGCONT."""
    return [pid for pid in pids if is_stopped(pid)]


class ProcessState(NamedTuple):
    """A rank's process as the system knows it; empty where that cannot be read."""

    state: str = ""
    """Of its main thread: sleeping, running, disk-sleep, stopped."""
    main_cpu_s: float = 0.0
    program: str = ""
    """The command of one that has replaced the rank's (execve)."""


def process(pid: int) -> ProcessState:
    """Return what the system knows of a process."""
    state, cpu_s, program = "", 0.0, ""
    with contextlib.suppress(psutil.Error, OSError):
        current = psutil.Process(pid)
        main = next((thread for thread in current.threads() if thread.id == pid), None)
        cpu_s = main.user_time + main.system_time if main else 0.0
        state = str(current.status())
        command = current.cmdline()
        # Whoever gives a process another title changes its command. But a fork has its parent's
        # addresses, in its auxiliary vector, until it executes a program.
        own, parents = (Path(f"/proc/{each}/auxv") for each in (pid, current.ppid()))
        ours = any("ddp_notebook" in word for word in command)
        if not ours and own.read_bytes() != parents.read_bytes():
            program = " ".join(command)
    return ProcessState(state, cpu_s, program)


def signal_group(pid: int, number: int) -> None:
    """Signal a process with all of its process group, as Ctrl-C in a terminal does."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def facing(address: str) -> dict[str, str]:
    """Return this machine's address towards `address`, and the interface that has it.

    Both are empty where there is no way.
    """
    own = ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only chooses the way
        own = str(probe.getsockname()[0])
    interfaces = psutil.net_if_addrs().items()
    has = (name for name, addresses in interfaces if own in [each.address for each in addresses])
    return {"address": own, "interface": next(has, "") if own else ""}


def file_part(path: str, begin: int, size: int) -> str:
    """Return a part of a file, its bytes as characters of Latin-1; empty where there is none."""
    with contextlib.suppress(OSError), files.opened(Path(path)) as stream:
        stream.seek(begin)
        return stream.read(size).decode("latin-1")
    return ""


def digest(path: str) -> str:
    """Return the SHA-256 of a file; empty where it cannot be read."""
    try:
        with files.opened(Path(path)) as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return ""


def free_port(address: str) -> int:
    """Return a port that is free at an address of this machine; 0 where it has no such address."""
    try:
        return addresses.free_port(address)
    except OSError:
        return 0


QUESTIONS: dict[str, Callable[..., Any]] = {
    "stopped": stopped,
    "process": process,
    "signal_group": signal_group,
    "facing": facing,
    "file_part": file_part,
    "digest": digest,
    "free_port": free_port,
    "memory_kills": out_of_memory.kills,
}
