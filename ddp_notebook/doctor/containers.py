"""Limits that a container, or any cgroup, sets: memory and number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_UNLIMITED = 2**60
"""Version 1 writes no limit as a number a little below 2**63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit and how much of it is used: bytes, or processes and threads."""

    allowed: int
    used: int

    @property
    def left(self) -> int:
        """How much is left, 0 when nothing is."""
        return max(0, self.allowed - self.used)


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Limit | None:
    """The tightest limit on this process's memory; None without one.

    Memory that only caches files counts as free: the kernel gives it back.
    """
    limits = []
    for folder in _folders(root, membership, "memory"):
        allowed = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if allowed is not None and used is not None and allowed < _UNLIMITED:
            limits.append(Limit(allowed, max(0, used - _cached(folder))))
    return min(limits, key=lambda limit: limit.left, default=None)


def process_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Limit | None:
    """The tightest limit on processes and threads together; None without one."""
    limits = []
    for folder in _folders(root, membership, "pids"):
        allowed, used = _number(folder, "pids.max"), _number(folder, "pids.current")
        if allowed is not None and used is not None:
            limits.append(Limit(allowed, used))
    return min(limits, key=lambda limit: limit.left, default=None)


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those around it, in versions 1 and 2.

    Inside a container the path may be that of the host and not exist here: the mount itself
    is then the container's.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _number(folder: Path, *names: str) -> int | None:
    """What the first of the files that exists holds; None for ``max`` or no file."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _cached(folder: Path) -> int:
    """Bytes of file cache that are not in use; version 1 counts subfolders as ``total_``."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))
