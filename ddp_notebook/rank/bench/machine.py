"""The machine's resources: free memory, and CPU time of this process and its host."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_notebook.launch.out_of_memory import bytes_left


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on `device`; on a CPU, what the host and a container leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return bytes_left()


@dataclass(frozen=True, slots=True)
class Meter:
    """The clocks of this process and its host at one moment, in seconds."""

    clock_s: float
    own_s: float
    host_s: float | None
    """Busy time of all the cores this process may use; None if not known."""

    @classmethod
    def read(cls) -> Meter:
        """Return the present moment."""
        return cls(time.monotonic(), time.process_time(), busy_s(Path("/proc/stat")))

    def until(self, end: Meter) -> dict[str, Any]:
        """Return the times from this moment to `end`: a JSON object, None for what is not known."""
        known = self.host_s is not None and end.host_s is not None
        return {
            "host": socket.gethostname(),
            "seconds": end.clock_s - self.clock_s,
            "cpu_s": end.own_s - self.own_s,
            "host_cpu_s": (end.host_s or 0) - (self.host_s or 0) if known else None,
        }


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
                # user, nice, system, irq, softirq, steal; neither idle nor iowait: proc_stat(5)
                ticks += sum(int(columns[c]) for c in (0, 1, 2, 5, 6, 7))
                known = True
        return ticks / os.sysconf("SC_CLK_TCK") if known else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None
