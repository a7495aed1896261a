"""How many ranks fit: memory, cores, GPUs, and this user's limits of processes and open files."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.session_folder import files_left, parents
from ddp_notebook.model import counted, format_bytes

if sys.platform != "win32":
    import resource

PROC = Path("/proc")
RANK_BYTES = 300 * 2**20
"""What a rank needs: Python, torch, an engine, and room for a small model."""
_LEAST_RANK_BYTES = 60 * 2**20
"""No rank was measured to take less, forked and without a model."""
RANKS_PER_CORE = 8
"""With more, a rank waits so long for its turn on a core that set-up itself is slow."""
_STOP = "If that is not what you want, interrupt the start (Ctrl-C; in a notebook I, I)."

_LEAST_ROOM_BYTES = 1 << 16
_LEAST_FILE_BYTES = 1 << 12
"""With files no larger than this, ranks started, and ran cells."""
LEAST_FILES = 100
"""Of a session: folders, logs, sockets and records; of many ranks it has more."""
_TASKS_OF_A_SESSION = 32
"""Threads and processes beside those of the ranks, about; with a board."""
_TASKS_OF_A_RANK = 16
_TASKS_OF_A_CHANGE = 8
"""That come and go while processes are started in a session that runs."""
_TASKS_OF_A_SCRIPTS_RANK = 8
_MAY_PASS_THE_LIMIT = 1 << 24 | 1 << 21
"""CAP_SYS_RESOURCE, CAP_SYS_ADMIN."""


def why_too_little_memory(world_size: int, left_bytes: int | None) -> str:
    """Why this many ranks cannot be started; empty if they can, or if it is unknown.

    What the system does at the limit is to kill processes: the notebook's, too.
    """
    if left_bytes is None or left_bytes >= world_size * _LEAST_RANK_BYTES:
        return ""
    fits = max(1, left_bytes // RANK_BYTES)
    return (
        f"{world_size} ranks do not fit into memory: {format_bytes(left_bytes)} are left, and each "
        f"takes {format_bytes(_LEAST_RANK_BYTES)} at least, without a model. Free memory "
        f"(%ddp_shutdown in other notebooks), or type: %ddp_init --world-size {fits}"
    )


def warning(world_size: int, cores: int, left_bytes: int | None, gpus: Collection[str] = ()) -> str:
    """What is to be said before this many ranks are started; empty for nothing.

    `gpus` are those that they are to use, if they are to use any.
    """
    why, fits = [], [world_size]
    if world_size > RANKS_PER_CORE * cores:
        fits.append(RANKS_PER_CORE * cores)
        why.append(
            f"{world_size} ranks take turns on {counted(cores, 'CPU core')}: starting them "
            "takes long, and so does each cell."
        )
    if left_bytes is not None and left_bytes < world_size * RANK_BYTES:
        fits.append(max(1, left_bytes // RANK_BYTES))
        why.append(
            f"{format_bytes(left_bytes)} of memory are left, and a rank with a small model takes "
            f"about {format_bytes(RANK_BYTES)}. Where memory runs out, the system kills ranks."
        )
    if gpus and world_size > len(gpus):
        fits.append(len(gpus))
        why.append(
            f"{world_size} ranks share {counted(len(gpus), 'GPU')} and the memory "
            "there, by gloo: NCCL needs one GPU per rank."
        )
    if not why:
        return ""
    on = " --device cuda" if gpus else ""
    return "\n".join([*why, _STOP, f"What fits: %ddp_init --world-size {min(fits)}{on}"])


def why_no_room() -> str:
    """Why nothing could be started; empty where there is room for a session's files.

    What cannot write them ends without a word.
    """
    folder = parents()[0]
    if why := _why_too_small_files():
        return why
    try:
        left_bytes, more_files = shutil.disk_usage(folder).free, files_left(folder)
    except OSError:  # it is gone, which the error itself says
        return ""
    left = format_bytes(left_bytes)
    if more_files is not None and more_files < LEAST_FILES:
        left = counted(more_files, "more file")
    elif left_bytes >= _LEAST_ROOM_BYTES:
        return ""
    return (
        f"No room is left in {folder} ({left}), and a session needs files "
        "there. Delete what is not needed, or restart the kernel with TMPDIR set to another folder."
    )


def _why_too_small_files() -> str:
    if sys.platform == "win32":
        return ""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY or most >= _LEAST_FILE_BYTES:
        return ""
    return (
        f"No file may grow beyond {format_bytes(most)} here (ulimit -f), and those of a session "
        "do. In the shell that starts Jupyter: ulimit -f unlimited"
    )


def why_too_few_processes(world_size: int, proc: Path = PROC) -> str:
    """Why a session of so many ranks cannot be started; empty if it can, or if it is unknown."""
    needed = _TASKS_OF_A_SESSION + world_size * _TASKS_OF_A_RANK
    who = "1 rank needs" if world_size == 1 else f"{world_size} ranks need"
    return _why_too_few(who, needed, proc)


def has_room_for_threads() -> bool:
    """Whether a live board may start its own: where it cannot, the notebook's process ends."""
    return not _why_too_few("", _TASKS_OF_A_CHANGE, PROC)


def check_processes(verb: str, *, ranks: int = 0, in_script: int = 0) -> None:
    """Raises UsageMistake where what `verb` starts would meet this user's limit of processes.

    `ranks` have no process now, nor have those of a script.
    """
    needed = ranks * _TASKS_OF_A_RANK + in_script * _TASKS_OF_A_SCRIPTS_RANK + _TASKS_OF_A_CHANGE
    if why := _why_too_few(f"{verb} needs", needed, PROC):
        raise UsageMistake(f"{why} Nothing was changed.")


def _why_too_few(what: str, needed: int, proc: Path) -> str:
    """At the limit a thread that cannot be started ends its process: the notebook's, too."""
    if sys.platform != "linux":
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or limit > 1 << 14:
        return ""
    status = _status(proc / "self")
    may_pass = int(status.get("CapEff", "0"), 16) & _MAY_PASS_THE_LIMIT
    user = status.get("Uid", "").split()[:1]
    if may_pass or user in ([], ["0"]):
        return ""
    every = (_status(path) for path in proc.glob("[0-9]*"))
    used = sum(int(s["Threads"]) for s in every if s.get("Uid", "").split()[:1] == user)
    if limit - used >= needed:
        return ""
    return (
        f"This user may have {limit} processes and threads (ulimit -u), and has {used}: "
        f"{what} about {needed} more. End others, or start Jupyter with a higher limit."
    )


def files_needed(world_size: int) -> int:
    """Open files of the process that has most, the controller: as measured, and some to spare."""
    return 80 + 7 * world_size


def why_too_low_for_files(world_size: int) -> str:
    """Why so many ranks cannot be started; empty where the limit of open files allows it.

    At the limit the controller is killed by an error in C code that says nothing.
    """
    if sys.platform == "win32":
        return ""
    (limit, most), needed = resource.getrlimit(resource.RLIMIT_NOFILE), files_needed(world_size)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    what = f"A process may have {limit} files and sockets open here (ulimit -n), and "
    what += f"{counted(world_size, 'rank')} need{'s' * (world_size == 1)} {needed}. "
    if most != resource.RLIM_INFINITY and most < needed:
        return f"{what}Ask the administrator to raise the hard limit (nofile in limits.conf)."
    return (
        f"{what}In the shell that starts Jupyter: ulimit -n {needed}. Or restart the kernel, and "
        "before %load_ext: import resource; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))"
    )


def why_too_few_files(error: BaseException) -> str:
    """A message if the error means the limit of open files; empty for another error."""
    if sys.platform == "win32" or getattr(error, "errno", None) != errno.EMFILE:
        return ""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"The notebook may have {limit} files and sockets open (ulimit -n), and ranks need more. "
        f"In a cell: import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))"
    )


def _status(process: Path) -> dict[str, str]:
    """Of proc(5)'s status, the fields by name; empty for a process that has ended."""
    try:
        text = (process / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: rest.strip() for name, _, rest in (s.partition(":") for s in text.splitlines())}
