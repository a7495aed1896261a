"""Checks of the machine: memory, open files, processes, cores, folders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_notebook.launch.out_of_memory import Limit
from ddp_notebook.model import agree, format_bytes, name_ranks
from ddp_notebook.model.doctor import Check
from ddp_notebook.session.setup.preflight import LEAST_FILES, RANK_BYTES, files_needed

_MIB = 2**20
_GIB = 2**30

_BARE_RANK_BYTES = 100 * _MIB
"""What a forked rank takes without a model: 60 to 95 MiB were measured."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # looked at, not written to

_RANK_ADDRESSES = 5 * _GIB // 4
"""Address space a rank on CPUs needs for torch and its threads: 1.1 GiB was too little."""
_AMPLE_ADDRESSES = 64 * _GIB
"""CUDA reserves many times the memory it uses; threads reserve their stacks."""

_RANK_THREADS = 16
"""Threads of a rank besides those that compute: 13 were measured."""
_SESSION_THREADS = 40
"""Threads of the controller, the store process, the fork server, and more in the kernel."""


# --------------------------------------------------------------------------- memory


def check_memory(world_size: int, available_bytes: int, limit: Limit | None) -> Check:
    """Memory for the ranks: what is available, or what the container's limit leaves."""
    name = "memory"
    left_bytes, found = available_bytes, f"{format_bytes(available_bytes)} available"
    if limit is not None and limit.left < available_bytes:
        left_bytes = limit.left
        found = f"{format_bytes(left_bytes)} left of the container's {format_bytes(limit.allowed)}"
    needed = "1 rank needs about " if world_size == 1 else f"{world_size} ranks need about "
    needed += format_bytes(world_size * RANK_BYTES)
    fits = max(1, left_bytes // RANK_BYTES)
    remedy = "Free memory (%ddp_shutdown in other notebooks, idle kernels)"
    remedy += f", or start fewer ranks: -n {fits}" if fits < world_size else ", or add memory."
    if left_bytes < world_size * _BARE_RANK_BYTES:
        return Check.failure(name, f"{found}; {needed}, even without a model", remedy)
    if left_bytes < world_size * RANK_BYTES:
        return Check.warning(name, f"{found}; {needed}, with a small model", remedy)
    return Check.ok(name, found)


def check_address_space(soft_bytes: int | None) -> Check:
    """RLIMIT_AS (None: no limit). It counts memory that is reserved, used or not."""
    name = "address space"
    if soft_bytes is None:
        return Check.ok(name, "no limit")
    found = f"limited to {format_bytes(soft_bytes)} a process (ulimit -v)"
    remedy = "In the shell that starts Jupyter: ulimit -v unlimited"
    if soft_bytes < _RANK_ADDRESSES:
        return Check.failure(name, f"{found}: too little for torch and its threads", remedy)
    if soft_bytes < _AMPLE_ADDRESSES:
        return Check.warning(name, f"{found}; threads and CUDA reserve much more", remedy)
    return Check.ok(name, found)


def check_shared_memory(size: tuple[int, int] | None, nccl_wanted: bool) -> Check:
    """The shared memory of Linux, as (total, free) bytes; None where it is missing.

    DataLoader workers and NCCL pass data through it; gloo does not.
    """
    name = SHARED_MEMORY
    more = "In Docker: docker run --shm-size=2g, or --ipc=host. Otherwise: sudo mount -o "
    more += "remount,size=2g /dev/shm"
    if size is None:
        return Check.warning(
            name,
            "missing: DataLoader workers cannot start",
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
            f"{found}: DataLoader workers will crash",
            "See what fills it: ls /dev/shm",
        )
    if total < 256 * _MIB:
        return Check.warning(name, f"{found}: too little for DataLoader workers", more)
    return Check.ok(name, found)


# --------------------------------------------------------------------------- files, processes


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

    `soft` is RLIMIT_NPROC (None: no limit for this user), `used` how many threads the user has
    already; `limit` is the container's.
    """
    name = "processes"
    needed = _SESSION_THREADS + world_size * (_RANK_THREADS + threads)
    limits = []
    if soft is not None:
        remedy = "In the shell that starts Jupyter: ulimit -u unlimited"
        limits.append((max(0, soft - used), f"{soft:,} (ulimit -u)", remedy))
    if limit is not None:
        remedy = "In Docker: docker run --pids-limit=-1; else raise pids.max of the control group."
        limits.append((limit.left, f"the container's {limit.allowed:,}", remedy))
    if not limits:
        return Check.ok(name, "no limit")
    left, allowed, remedy = min(limits)
    found = f"room for {left:,} threads of {allowed}"
    if left < needed:
        return Check.failure(name, f"{found}; {world_size} ranks take about {needed:,}", remedy)
    if left < 2 * needed:
        return Check.warning(name, f"{found}; {world_size} ranks take about {needed:,}", remedy)
    return Check.ok(name, found)


def threads_of(text: str | None) -> int:
    """OMP_NUM_THREADS as a number, of a list the first; 0 when it is not set or no number."""
    first = (text or "").split(",")[0].strip()
    return int(first) if re.fullmatch(r"\d{1,6}", first) else 0


def check_cores(cores: int, world_size: int, asked: int, omp_num_threads: str | None) -> Check:
    """Cores for the threads of all ranks. `asked` is --threads-per-rank, 0 for the default.

    OMP_NUM_THREADS matters for scripts that are started here; %ddp_init sets it for its ranks.
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
        found = f"{world_size} ranks × {threads} threads ({whose}) on {cores}: they slow each "
        found += "other down"
        return Check.warning(
            name, found, f"Use {cores // world_size} threads a rank, as %ddp_init does by default."
        )
    return Check.ok(name, f"{cores} for {world_size} rank{'s' if world_size > 1 else ''}")


# --------------------------------------------------------------------------- folders


@dataclass(frozen=True, slots=True)
class Folder:
    """The temporary folder. `trouble` is why it cannot be written to, else empty.

    `free_files` is how many more files it can hold, None where the file system has no limit.
    """

    path: str
    trouble: str
    free_bytes: int
    free_files: int | None


def check_temporary_folder(folder: Folder) -> Check:
    """The session's folder can be made there, and has room."""
    name = "temporary folder"
    other = "Before Jupyter starts: export TMPDIR=/tmp (or another folder)"
    if folder.trouble:
        return Check.failure(name, f"{folder.path}: {folder.trouble}", other)
    found = f"{folder.path}, {format_bytes(folder.free_bytes)} free"
    clean = f"See what fills it: du -sh {shlex.quote(folder.path)}/*. {other}"
    if folder.free_files is not None and folder.free_files < LEAST_FILES:
        return Check.failure(name, f"{found}, but only {folder.free_files} more files", clean)
    if folder.free_bytes < 16 * _MIB:
        return Check.failure(name, found, clean)
    if folder.free_bytes < 512 * _MIB:
        return Check.warning(name, f"{found}: little for logs and output", clean)
    return Check.ok(name, found)


# --------------------------------------------------------------------------- processes


def check_fork(forks: bool, platform: str) -> Check:
    """How ranks start: forked, in milliseconds, or as new processes where forking is not safe."""
    name = "starting ranks"
    if forks:
        return Check.ok(name, "they are forked")
    system = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
    return Check.ok(
        name, f"as new processes: forking is not safe on {system}. It takes seconds and more memory"
    )


@dataclass(frozen=True, slots=True)
class EarlierRank:
    """A process with RANK in its environment whose parent has ended."""

    pid: int
    rank: str
    command: str


def check_earlier_ranks(processes: Sequence[EarlierRank]) -> Check:
    """No rank of an earlier job still runs although its launcher has ended."""
    name = "earlier ranks"
    if not processes:
        return Check.ok(name, "none is left over")
    numbers = [int(process.rank) for process in processes if process.rank.isdecimal()]
    ranks = name_ranks(numbers) if numbers else "ranks"
    first, pids = processes[0], " ".join(str(process.pid) for process in processes)
    return Check.warning(
        name,
        f"{ranks} of a job whose launcher has ended still "
        f"{agree(processes, 'runs', 'run')}, pid {first.pid} ({first.command[:80]})",
        f"If that job should be over: kill {pids}",
    )
