"""What else a rank's host is doing while something is measured. Standard library only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq, steal. See proc_stat(5)."""


@dataclass(frozen=True, slots=True)
class Meter:
    """What the clocks of this process and its host say at one moment, in seconds."""

    clock_s: float
    own_s: float
    host_s: float | None
    """Busy time of all the cores this process may use; None where that cannot be told."""

    @classmethod
    def read(cls) -> Meter:
        """The moment now."""
        return cls(time.monotonic(), time.process_time(), busy_s(Path("/proc/stat")))

    def until(self, end: Meter) -> dict[str, Any]:
        """What was spent from this moment to `end`: a JSON object, None for what is not known."""
        known = self.host_s is not None and end.host_s is not None
        return {
            "seconds": end.clock_s - self.clock_s,
            "cpu_s": end.own_s - self.own_s,
            "host_cpu_s": (end.host_s or 0) - (self.host_s or 0) if known else None,
        }


def busy_s(stat: Path, cores: frozenset[int] | None = None) -> float | None:
    """CPU seconds that `cores` (those this process may use) were busy since the host began.

    None where that cannot be told.
    """
    try:
        wanted = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        ticks, found = 0, False
        for line in stat.read_text().splitlines():
            name, *columns = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in wanted:
                ticks += sum(int(columns[c]) for c in _BUSY)
                found = True
        return ticks / os.sysconf("SC_CLK_TCK") if found else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None
