"""Checks of the machine: memory, files, processes, cores, clock, folders. Functions of facts."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddp_notebook.doctor.containers import Limit
from ddp_notebook.model import format_bytes, name_ranks
from ddp_notebook.model.doctor import Check

_MIB = 2**20
_GIB = 2**30

RANK_BYTES = 300 * _MIB
"""What a rank wants: Python, torch, an engine, and room for a small model."""
_BARE_RANK_BYTES = 100 * _MIB
"""What a forked rank takes before any model: 60 to 95 MiB were measured."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # looked at, not written to

_RANK_ADDRESSES = 5 * _GIB // 4
"""Address space a rank on CPUs needs for torch and its threads: 1.1 GiB was too little."""
_EASY_ADDRESSES = 64 * _GIB
"""CUDA reserves many times the memory it uses; threads reserve their stacks."""

_RANK_THREADS = 16
"""Threads of a rank beside the first of those that compute: 13 were measured."""
_SESSION_THREADS = 40
"""Threads of the controller, the store keeper, the fork server and of what the kernel adds."""

_SOCKET_NAME = "/ddp_notebook-xxxxxxxx/beacon.sock"
"""The longest path of a socket that a session makes in the temporary folder."""

_CENTURY_S = 100 * 365.25 * 86400
"""A wall clock so far after the package was made is wrong."""


# --------------------------------------------------------------------------- memory


def check_memory(world_size: int, available_bytes: int, limit: Limit | None) -> Check:
    """Memory for the ranks: what the machine has free, or what the container leaves."""
    name = "memory"
    left, found = available_bytes, f"{format_bytes(available_bytes)} available"
    if limit is not None and limit.left < available_bytes:
        left = limit.left
        found = f"{format_bytes(left)} left of the container's {format_bytes(limit.allowed)}"
    wanted = f"{world_size} rank{'s' if world_size > 1 else ''} want about "
    wanted += format_bytes(world_size * RANK_BYTES)
    fits = max(1, left // RANK_BYTES)
    remedy = "End what is not needed (%ddp_shutdown in other notebooks, idle kernels)"
    remedy += f", or take fewer ranks: -n {fits}" if fits < world_size else ", or add memory."
    if left < world_size * _BARE_RANK_BYTES:
        return Check.failure(name, f"{found}; {wanted}, without any model", remedy)
    if left < world_size * RANK_BYTES:
        return Check.warning(name, f"{found}; {wanted}, without a model of any size", remedy)
    return Check.ok(name, found)


def check_address_space(soft_bytes: int | None) -> Check:
    """RLIMIT_AS (None: no limit), which counts what is reserved and not what is used."""
    name = "address space"
    if soft_bytes is None:
        return Check.ok(name, "no limit")
    found = f"limited to {format_bytes(soft_bytes)} a process (ulimit -v)"
    remedy = "In the shell that starts Jupyter: ulimit -v unlimited"
    if soft_bytes < _RANK_ADDRESSES:
        return Check.failure(name, f"{found}: too little for torch and its threads", remedy)
    if soft_bytes < _EASY_ADDRESSES:
        return Check.warning(name, f"{found}; threads and CUDA reserve much more", remedy)
    return Check.ok(name, found)


def check_shared_memory(size: tuple[int, int] | None, nccl_wanted: bool) -> Check:
    """The shared memory of Linux, as (total, free) bytes, None where it is missing.

    The workers of a DataLoader and NCCL pass data through it; gloo does not.
    """
    name = SHARED_MEMORY
    more = "In Docker: docker run --shm-size=2g, or --ipc=host. Else: sudo mount -o remount,size=2g"
    more += " /dev/shm"
    if size is None:
        return Check.warning(
            name,
            "missing: workers of a DataLoader cannot start",
            "sudo mount -t tmpfs tmpfs /dev/shm",
        )
    total, free = size
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < 32 * _MIB and nccl_wanted:
        return Check.failure(
            name, f"{found}: NCCL needs more", f"{more}. What fills it: ls /dev/shm"
        )
    if free < 32 * _MIB <= total:
        return Check.warning(
            name,
            f"{found}: workers of a DataLoader will die of it",
            "See what fills it: ls /dev/shm",
        )
    if total < 256 * _MIB:
        return Check.warning(name, f"{found}: too little for workers of a DataLoader", more)
    return Check.ok(name, found)


# --------------------------------------------------------------------------- files, processes


def files_needed(world_size: int) -> int:
    """Open files of the process that has most, the controller: measured, and some more."""
    return 64 + 6 * world_size


def check_open_files(soft: int | None, hard: int | None, world_size: int) -> Check:
    """RLIMIT_NOFILE against the number of ranks; None means no limit."""
    name = "open files"
    if soft is None:
        return Check.ok(name, "no limit")
    found, needed = f"{soft:,} a process (ulimit -n)", files_needed(world_size)
    more = 65536 if hard is None else min(hard, 65536)
    remedy = f"In the shell that starts Jupyter: ulimit -n {more}"
    if more <= soft:
        remedy = "Ask the administrator to raise the hard limit (nofile in limits.conf)."
    if soft < needed:
        return Check.failure(name, f"{found}; {world_size} ranks take up to {needed:,}", remedy)
    if soft < 128 + 2 * needed:
        return Check.warning(
            name, f"{found}; ranks take up to {needed:,}, and data loading takes more", remedy
        )
    return Check.ok(name, found)


def check_processes(
    world_size: int, threads: int, soft: int | None, used: int, limit: Limit | None
) -> Check:
    """Room for the processes and threads of the ranks, each with `threads` that compute.

    `soft` is RLIMIT_NPROC (None: no limit, or it does not bind this user), of which the
    user's processes have `used` threads; `limit` is the container's.
    """
    name = "processes"
    needed = _SESSION_THREADS + world_size * (_RANK_THREADS + threads)
    rooms = []
    if soft is not None:
        remedy = "In the shell that starts Jupyter: ulimit -u unlimited"
        rooms.append((max(0, soft - used), f"{soft:,} (ulimit -u)", remedy))
    if limit is not None:
        remedy = "In Docker: docker run --pids-limit=-1; else raise pids.max of the cgroup."
        rooms.append((limit.left, f"the container's {limit.allowed:,}", remedy))
    if not rooms:
        return Check.ok(name, "no limit")
    left, allowed, remedy = min(rooms)
    found = f"room for {left:,} threads of {allowed}"
    if left < needed:
        return Check.failure(name, f"{found}; {world_size} ranks take about {needed:,}", remedy)
    if left < 2 * needed:
        return Check.warning(name, f"{found}; {world_size} ranks take about {needed:,}", remedy)
    return Check.ok(name, found)


def threads_of(text: str | None) -> int:
    """OMP_NUM_THREADS as a number; 0 when it is not set or is none. A list's first counts."""
    first = (text or "").split(",")[0].strip()
    return int(first) if re.fullmatch(r"\d{1,6}", first) else 0


def check_cores(cores: int, world_size: int, asked: int, omp_num_threads: str | None) -> Check:
    """Cores for the threads of all ranks. `asked` is --threads-per-rank, 0 for the default.

    OMP_NUM_THREADS counts for what is started without %ddp_init, which sets it itself.
    """
    name = "cores"
    if omp_num_threads and not threads_of(omp_num_threads):
        return Check.warning(
            name,
            f"OMP_NUM_THREADS={omp_num_threads} is not a number of threads; libraries ignore it",
            f"Unset it, or set it to cores / ranks: OMP_NUM_THREADS={max(1, cores // world_size)}",
        )
    if world_size > cores:
        return Check.warning(
            name,
            f"{world_size} ranks share {cores}: fine for learning, but timings say little",
            f"For timings: -n {cores}",
        )
    threads = asked or threads_of(omp_num_threads) or cores // world_size
    if world_size * threads > cores:
        whose = "--threads-per-rank" if asked else "OMP_NUM_THREADS"
        found = f"{world_size} ranks × {threads} threads ({whose}) on {cores}: they get in each "
        found += "other's way"
        return Check.warning(
            name, found, f"{cores // world_size} threads a rank; %ddp_init's default"
        )
    return Check.ok(name, f"{cores} for {world_size} rank{'s' if world_size > 1 else ''}")


# --------------------------------------------------------------------------- clock, folders


def check_clock(now_s: float, made_s: float, readings: Sequence[float]) -> Check:
    """The wall clock is past the time the package's files were made, the other never goes back.

    `now_s` and `made_s` are seconds since 1970; `readings` are of the monotonic clock.
    """
    name = "clock"
    shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now_s)) + " UTC"
    if any(later < earlier for earlier, later in pairwise(readings)):
        return Check.failure(
            name,
            "the monotonic clock goes back, so no time-out can be trusted",
            "Restart the machine; in a virtual machine, change its clock source.",
        )
    if now_s < made_s - 86400 or now_s > made_s + _CENTURY_S:
        made = time.strftime("%Y-%m-%d", time.gmtime(made_s))
        return Check.warning(
            name,
            f"it says {shown}, but the package's files were made on {made}",
            "Set it: sudo timedatectl set-ntp true",
        )
    return Check.ok(name, shown)


@dataclass(frozen=True, slots=True)
class Folder:
    """The temporary folder. `trouble` is why nothing can be written there, empty if it can.

    `free_files` is how many files more it can hold, None where that is not counted.
    """

    path: str
    trouble: str
    free_bytes: int
    free_files: int | None


def check_temporary_folder(folder: Folder, longest_socket: int) -> Check:
    """The session's folder can be made there. `longest_socket` is the system's limit, in bytes."""
    name = "temporary folder"
    other = "Before Jupyter starts: export TMPDIR=/tmp (or another folder)"
    if folder.trouble:
        return Check.failure(name, f"{folder.path}: {folder.trouble}", other)
    length = len(os.fsencode(folder.path + _SOCKET_NAME))
    if length > longest_socket:
        return Check.failure(
            name,
            f"{folder.path} is too long for a socket in it: {length} of {longest_socket} bytes",
            other,
        )
    found = f"{folder.path}, {format_bytes(folder.free_bytes)} free"
    clean = f"See what fills it: du -sh {shlex.quote(folder.path)}/*. {other}"
    if folder.free_files is not None and folder.free_files < 100:
        return Check.failure(name, f"{found}, but no more than {folder.free_files} files", clean)
    if folder.free_bytes < 16 * _MIB:
        return Check.failure(name, found, clean)
    if folder.free_bytes < 512 * _MIB:
        return Check.warning(name, f"{found}: little for logs and long output", clean)
    return Check.ok(name, found)


# --------------------------------------------------------------------------- processes


def check_fork(forks: bool, platform: str) -> Check:
    """Ranks can be forked, which takes milliseconds; elsewhere they start as processes."""
    name = "starting ranks"
    if forks:
        return Check.ok(name, "they are forked")
    system = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    return Check.ok(
        name, f"as ordinary processes: {system} forbids forking. It takes seconds and more memory"
    )


@dataclass(frozen=True, slots=True)
class EarlierRank:
    """A process with RANK in its environment whose parent is gone."""

    pid: int
    rank: str
    command: str


def check_earlier_ranks(found: Sequence[EarlierRank]) -> Check:
    """No rank of an earlier job goes on without the one that started it."""
    name = "earlier ranks"
    if not found:
        return Check.ok(name, "none is left over")
    ranks = [int(each.rank) for each in found if each.rank.isdecimal()]
    first = found[0]
    return Check.warning(
        name,
        f"{name_ranks(ranks) if ranks else 'ranks'} of a job whose launcher is gone still "
        f"{'runs' if len(found) == 1 else 'run'}, such as pid {first.pid} ({first.command[:80]})",
        f"If that job should be over: kill {' '.join(str(each.pid) for each in found)}",
    )
