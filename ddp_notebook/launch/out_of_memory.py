"""Memory: how much is left for this process, and how many were killed for lack of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def kills(
    root: Path = CONTROL_GROUPS,
    membership: Path = MEMBERSHIP,
    machine: Path = Path("/proc/vmstat"),
) -> int | None:
    """Return how many processes the kernel has killed; None if it does not say.

    In this process's control group, or else on the whole machine: a count that has not risen is
    proof that no process was killed; one that has risen does not say which.
    """
    folders = list(_control_groups(root, membership))[:1]
    names = ("memory.events", "memory.oom_control")
    for file in (*(folder / name for folder in folders for name in names), machine):
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def bytes_left(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the memory that new processes may take, swap included.

    As much as the machine has, and no more than the tightest limit of a container leaves. Memory
    that only caches files counts as free: the kernel releases it when needed.
    """
    left: list[int] = [psutil.virtual_memory().available + psutil.swap_memory().free]
    for folder in _control_groups(root, membership):
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            # Version 1 of control groups, where a number near 2**63 means that there is no limit.
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # Without such a file, with "max" in it, or on another system than Linux: no limit.
            with contextlib.suppress(OSError, ValueError):
                allowed = int((folder / most).read_text())
                taken = int((folder / used).read_text())
                stat = (folder / "memory.stat").read_text().split()
                cache = stat[stat.index(cached) + 1] if cached in stat else 0
                left.append(allowed - taken + int(cache))
    return max(0, min(left))


def _control_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it, the own one first.

    Inside a container the path may be the host's, which does not exist here; the mount itself is
    the container's folder then.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])
