"""CPU time of this process and its host, and a thread's time in the run queue."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_THREAD = Path("/proc/thread-self/schedstat")
"""A thread's ns on a core, ns in the run queue, number of runs. See Linux's sched-stats.rst."""
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq, steal. See proc_stat(5)."""


@dataclass(frozen=True, slots=True)
class Meter:
    """The clocks of this process and its host at one moment, in seconds."""

    clock_s: float
    own_s: float
    host_s: float | None
    """Busy time of all the cores this process may use; None if not known."""

    @classmethod
    def read(cls) -> Meter:
        """The present moment."""
        return cls(time.monotonic(), time.process_time(), busy_s(Path("/proc/stat")))

    def until(self, end: Meter) -> dict[str, Any]:
        """The times from this moment to `end`: a JSON object, None for what is not known."""
        known = self.host_s is not None and end.host_s is not None
        return {
            "seconds": end.clock_s - self.clock_s,
            "cpu_s": end.own_s - self.own_s,
            "host_cpu_s": (end.host_s or 0) - (self.host_s or 0) if known else None,
        }


class RunQueue:
    """How long the thread that creates it was runnable and had no core. Close it after use."""

    def __init__(self, path: Path = _THREAD) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:  # another system than Linux
            self._file = None

    def waited_ns(self) -> int:
        """Since the thread began, in ns; 0 if not known. Takes about a microsecond."""
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file is not None else 0

    def close(self) -> None:
        """Close the file. From now on the time is 0."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def busy_s(stat: Path, cores: frozenset[int] | None = None) -> float | None:
    """CPU seconds that `cores` (those this process may use) were busy since the host was booted.

    None if not known.
    """
    try:
        wanted = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        ticks, known = 0, False
        for line in stat.read_text().splitlines():
            name, *columns = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in wanted:
                ticks += sum(int(columns[c]) for c in _BUSY)
                known = True
        return ticks / os.sysconf("SC_CLK_TCK") if known else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None
