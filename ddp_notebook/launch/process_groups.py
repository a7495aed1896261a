"""Processes as the system shows them: whether they run, are stopped, or wait for the GIL.

And the end of what a dead one leaves running: the processes of its session (setsid).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

GRACE_S = 0.5
"""How long a process may take to end by itself before it is killed."""


def is_running(pid: int) -> bool:
    """True for a process that has not ended. A zombie, which only waits to be reaped, has."""
    try:
        return stat_fields(Path("/proc", str(pid), "stat"))[0] != "Z"
    except (OSError, IndexError):
        return False


def is_stopped(pid: int) -> bool:
    """Return True for a process that waits for SIGCONT; Linux only."""
    try:
        return stat_fields(Path("/proc", str(pid), "stat"))[0] == "T"
    except (OSError, IndexError):
        return False


_GIL_WINDOW_S, _FEWEST_WAKES = 0.2, 10
_LONGEST_WAKE_NS = 250_000
"""Who asks for the GIL goes back to sleep at once; who gets it runs for a switch interval."""


def waits_for_gil(pid: int) -> bool:
    """True if threads of a Python process wait for the GIL, and no thread runs; Linux only.

    Who waits for the GIL wakes up every few milliseconds, or as `sys.setswitchinterval` says. Who
    holds it and runs uses CPU time, or would: then it is runnable.
    """
    before = _threads(pid)
    time.sleep(_GIL_WINDOW_S)
    after = _threads(pid)
    if not before or before.keys() != after.keys():
        return False
    pairs = [(before[tid], after[tid]) for tid in after]
    asleep = [then == now and now.state == "S" for then, now in pairs]
    asking = [then.asks_until(now) for then, now in pairs]
    most = max(now.sleeps - then.sleeps for then, now in pairs)
    return any(asleep) and all(map(max, asleep, asking)) and most >= _FEWEST_WAKES


class _Thread(NamedTuple):
    state: str
    sleeps: int
    """How often it went to sleep by itself."""
    ran_ns: int

    def asks_until(self, now: _Thread) -> bool:
        """True if it woke up meanwhile, and never for long."""
        wakes = now.sleeps - self.sleeps
        return 0 <= now.ran_ns - self.ran_ns < _LONGEST_WAKE_NS * wakes


def _threads(pid: int) -> dict[int, _Thread]:
    """The threads of a process, by number; empty where it is gone or cannot be read."""
    found = {}
    try:
        for path in Path("/proc", str(pid), "task").iterdir():
            lines = (path / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            ran_ns = int((path / "schedstat").read_text().split()[0])
            sleeps = int(fields["voluntary_ctxt_switches"])
            found[int(path.name)] = _Thread(fields["State"][:1], sleeps, ran_ns)
    except (OSError, KeyError, ValueError, IndexError):
        return {}
    return found


def parent(pid: int) -> int:
    """Return the process that started `pid`, or has adopted it; 0 where it has ended."""
    try:
        return int(stat_fields(Path("/proc", str(pid), "stat"))[1])
    except (OSError, IndexError):
        return 0


def session_members(leader: int) -> list[int]:
    """Return the processes in the session (as in setsid) that `leader` leads or led; Linux only."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat_fields(path)
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == leader and fields[0] != "Z":
            members.append(int(path.parent.name))
    return members


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
