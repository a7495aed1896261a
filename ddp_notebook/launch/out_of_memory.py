"""Memory: how much is left for this process, and how many were killed for lack of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_WHOLE_MACHINE = Path("/proc/vmstat")
_MEMORY = Path("/proc/meminfo")
_UNLIMITED = 2**60
"""Version 1 of control groups writes no limit as a number a little below 2**63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the container and how much of it is used: bytes, or processes and threads."""

    allowed: int
    used: int

    @property
    def left(self) -> int:
        """How much is left, 0 when nothing is."""
        return max(0, self.allowed - self.used)


def kills(
    root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP, machine: Path = _WHOLE_MACHINE
) -> int | None:
    """The kernel's counter; None if it cannot be read."""
    folders = list(control_groups("memory", root, membership))[:1]
    files = [
        folder / name for folder in folders for name in ("memory.events", "memory.oom_control")
    ]
    for file in (*files, machine):
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def kills_since(before: int | None) -> int:
    """The increase since `before`; -1 if the kernel does not report it."""
    now = kills()
    return now - before if now is not None and before is not None else -1


def control_groups(
    controller: str, root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP
) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, in versions 1 and 2.

    Inside a container the path may be the host's, which does not exist here; the mount itself
    is the container's folder then.
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


def container_memory(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> Limit | None:
    """The tightest limit that a container, or any control group, sets on memory; None without.

    Memory that only caches files counts as free: the kernel releases it when needed.
    """
    limits = []
    for folder in control_groups("memory", root, membership):
        allowed = read_number(folder, "memory.max", "memory.limit_in_bytes")
        used = read_number(folder, "memory.current", "memory.usage_in_bytes")
        if allowed is not None and used is not None and allowed < _UNLIMITED:
            limits.append(Limit(allowed, max(0, used - _cached(folder))))
    return min(limits, key=lambda limit: limit.left, default=None)


def bytes_left(
    root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP, machine: Path = _MEMORY
) -> int | None:
    """Memory that new processes may take, swap included; None if that is not known."""
    try:
        lines = machine.read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines)}
        left = 1024 * (sizes["MemAvailable"] + sizes.get("SwapFree", 0))
    except (OSError, ValueError, KeyError, IndexError):  # not Linux
        return None
    limit = container_memory(root, membership)
    return left if limit is None else min(left, limit.left)


def read_number(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that exists; None for ``max`` or no file."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _cached(folder: Path) -> int:
    """Bytes of file cache that can be released; version 1 counts subfolders as ``total_``."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))
