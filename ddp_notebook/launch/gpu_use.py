"""The processes that hold the memory of GPUs, by NVIDIA's driver (NVML), as in nvidia-smi."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.model import format_bytes

_ASK_EVERY_S = 2.0


class GpuUse:
    """Says of each GPU how much of its memory is used, and by which processes."""

    def __init__(self) -> None:
        # Open from the first question on: where no process uses a GPU, to open the driver can take
        # longer than a second.
        self._nvml: Any = None
        self._next_s = 0.0
        self._lines: tuple[str, ...] = ()

    def lines(self, gpus: Sequence[str], ranks: Mapping[int, int]) -> tuple[str, ...]:
        """Return a line about each of `gpus`, indices or UUIDs; `ranks` maps pids to ranks.

        One that the driver reports nothing of, such as a part of a GPU, has no line.
        """
        if not gpus:
            return ()
        now_s = time.monotonic()
        import pynvml  # takes 50 ms, and only a session on GPUs needs it

        if now_s >= self._next_s:
            self._next_s = now_s + _ASK_EVERY_S
            lines = []
            for gpu in dict.fromkeys(gpus):
                try:
                    if self._nvml is None:
                        pynvml.nvmlInit()
                        self._nvml = pynvml
                    handle = (
                        pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
                        if gpu.isdecimal()
                        else pynvml.nvmlDeviceGetHandleByUUID(gpu)
                    )
                    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                    users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                except pynvml.NVMLError:
                    continue
                users.sort(key=lambda user: (ranks.get(user.pid, len(ranks)), user.pid))
                held = [
                    f"{_name(user.pid, ranks)} {format_bytes(user.usedGpuMemory)}"
                    if user.usedGpuMemory
                    else _name(user.pid, ranks)  # a container's driver may hide the numbers
                    for user in users
                ]
                used, total = format_bytes(memory.used), format_bytes(memory.total)
                by = f": {', '.join(held)}" if held else ""
                lines.append(f"GPU {gpu}: {used} of {total} used{by}")
            self._lines = tuple(lines)
        return self._lines


def _name(pid: int, ranks: Mapping[int, int]) -> str:
    import psutil

    if pid in ranks:
        return f"rank {ranks[pid]}"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:  # of another container, or gone
        return f"pid {pid}"
