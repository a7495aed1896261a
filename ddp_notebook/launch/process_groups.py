"""Processes as the system shows them: whether they run, are stopped, or wait for the GIL.

And the end of what a dead one leaves running: those below it, and those of its session (setsid).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_S = 0.5
"""How long a process may take to end by itself before it is killed."""


def is_running(pid: int) -> bool:
    """True for a process that has not ended. A zombie, which only waits to be reaped, has."""
    return _stat_of(pid)[0] not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Return True for a process that waits for SIGCONT; Linux only."""
    return _stat_of(pid)[0] == "T"


def parent(pid: int) -> int:
    """Return the process that started `pid`, or has adopted it; 0 where it has ended."""
    return int(_stat_of(pid)[1])


def _stat_of(pid: int) -> list[str]:
    """Return a process's state, its parent and what else proc(5) has; no state if it has ended."""
    fields: list[str] = []
    with contextlib.suppress(OSError):
        fields = stat_fields(Path("/proc", str(pid), "stat"))
    return fields or ["", "0"]


def session_members(leader: int) -> list[int]:
    """Return the processes in the session (as in setsid) that `leader` leads or led; Linux only."""
    return [pid for pid, (_, session) in _running().items() if session == leader]


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`; Linux only."""
    return [pid for pid, (its_parent, _) in _running().items() if its_parent == parent]


def descendants(parent: int) -> list[int]:
    """Return the processes that `parent` has started, and those that these have; Linux only."""
    running, found = _running(), [parent]
    for one in found:
        found += [pid for pid, (its_parent, _) in running.items() if its_parent == one]
    return found[1:]


def _running() -> dict[int, tuple[int, int]]:
    """The parent and the session of each process that has not ended."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, its_parent, _, session, *_ = stat_fields(path)
            if state != "Z":
                processes[int(path.parent.name)] = int(its_parent), int(session)
    return processes


def adopt_orphans() -> None:
    """Become the parent of whatever a process below this one leaves; Linux only.

    Then nothing that a rank starts gets out of the tree below it, in whatever session it is; and
    no pid of a direct child is given to another process before it is waited for.
    """
    if sys.platform.startswith("linux"):
        # PR_SET_CHILD_SUBREAPER is 36. It is not inherited.
        ctypes.CDLL(None, use_errno=True).prctl(36, 1)


def stat_fields(path: Path) -> list[str]:
    """Return the fields of a `stat` file of proc(5), from the state on. Raises OSError.

    The command before it may hold any bytes.
    """
    return path.read_bytes().rpartition(b")")[2].decode().split()


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end_sessions(leaders: Iterable[int]) -> None:
    """End what the processes `leaders`, now dead, left running in their sessions.

    The resource trackers of multiprocessing remove shared memory and end by themselves once
    every process that shares it is gone, so they are killed only after `GRACE_S`.
    """
    # Twice: a member may start another process between the reading of /proc and its own end.
    remaining = list(leaders)
    for leader in remaining:
        kill_members(leader, spare_trackers=True)
    deadline = time.monotonic() + GRACE_S
    while any(session_members(leader) for leader in remaining) and time.monotonic() < deadline:
        time.sleep(0.02)
    for leader in remaining:
        kill_members(leader)


def kill_members(leader: int, *, spare_trackers: bool = False) -> None:
    """Kill what is left in the session of `leader`."""
    for member in session_members(leader):
        if not (spare_trackers and is_resource_tracker(member)):
            send_signal(member, signal.SIGKILL)


def is_resource_tracker(pid: int) -> bool:
    """Return True of a process that multiprocessing has started to remove what others share."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
