"""The machine's resources: free memory, and CPU time of this process and its host."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import psutil
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
        return cls(time.monotonic(), time.process_time(), busy_s())

    def until(self, end: Meter) -> dict[str, Any]:
        """Return the times from this moment to `end`: a JSON object, None for what is not known."""
        known = self.host_s is not None and end.host_s is not None
        return {
            "host": socket.gethostname(),
            "seconds": end.clock_s - self.clock_s,
            "cpu_s": end.own_s - self.own_s,
            "host_cpu_s": (end.host_s or 0) - (self.host_s or 0) if known else None,
        }


def busy_s() -> float | None:
    """CPU seconds that the cores this process may use were busy since the host was booted.

    None where the system does not tell which these are.
    """
    cores: list[int] = getattr(psutil.Process(), "cpu_affinity", list)()
    each = psutil.cpu_times(percpu=True)
    times = [each[core] for core in cores if core < len(each)]
    # Neither idle nor iowait: proc_stat(5).
    busy = (t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in times)
    return float(sum(busy)) if times else None
