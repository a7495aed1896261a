"""How many processes the kernel has killed for lack of memory, in our control group or at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_WHOLE_MACHINE = Path("/proc/vmstat")


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
