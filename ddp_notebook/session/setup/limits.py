"""How many ranks this user's limits of open files and processes allow."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

if sys.platform != "win32":
    import resource

_TASKS_OF_A_SESSION = 20
"""Threads and processes beside those of the ranks, at least."""
_TASKS_OF_A_RANK = 10
_MAY_PASS_THE_LIMIT = 1 << 24 | 1 << 21
"""CAP_SYS_RESOURCE, CAP_SYS_ADMIN."""


def why_too_few_processes(world_size: int, proc: Path = Path("/proc")) -> str:
    """Why this many ranks cannot be started; empty if they can, or if it is unknown.

    At the limit a thread that cannot be started ends its process: the notebook's, too.
    """
    if sys.platform != "linux":
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    status = _status(proc / "self")
    may_pass = int(status.get("CapEff", "0"), 16) & _MAY_PASS_THE_LIMIT
    user = status.get("Uid", "").split()[:1]
    if limit == resource.RLIM_INFINITY or limit > 1 << 14 or may_pass or user in ([], ["0"]):
        return ""
    every = (_status(path) for path in proc.glob("[0-9]*"))
    used = sum(int(s["Threads"]) for s in every if s.get("Uid", "").split()[:1] == user)
    needed = _TASKS_OF_A_SESSION + world_size * _TASKS_OF_A_RANK
    if limit - used >= needed:
        return ""
    return (
        f"This user may have {limit} processes and threads (ulimit -u), and has {used}: "
        f"{world_size} ranks need {needed} more at least. End others, or start Jupyter with a "
        "higher limit."
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
