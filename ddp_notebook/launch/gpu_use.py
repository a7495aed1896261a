"""The processes that hold the memory of GPUs, by NVIDIA's driver (NVML), as in nvidia-smi."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.model import format_bytes

_ASK_EVERY_S = 2.0


class GpuUse:
    """Says of each GPU how much of its memory is used, and by which processes.

    A thread asks the driver, and what it last said is shown: to open the driver takes longer than
    a second where no process uses a GPU, and one that does not answer must not stop the board.
    """

    def __init__(self) -> None:
        self._nvml: Any = None  # open from the first question on
        self._next_s = 0.0
        self._lines: tuple[str, ...] = ()
        self.held: Mapping[int, int] = {}
        """The bytes that each rank holds, on all GPUs together, as last known."""
        self._asking: threading.Thread | None = None

    def lines(self, gpus: Sequence[str], ranks: Mapping[int, int]) -> tuple[str, ...]:
        """Return a line about each of `gpus`, indices or UUIDs, as last known; never waits.

        `ranks` maps pids to ranks. A GPU that the driver reports nothing of, such as a part of
        one, has no line.
        """
        now_s = time.monotonic()
        asks = self._asking is not None and self._asking.is_alive()
        if gpus and now_s >= self._next_s and not asks:
            self._next_s = now_s + _ASK_EVERY_S
            asking = threading.Thread(
                target=self._ask, args=(gpus, dict(ranks)), name="ddp-gpu-use", daemon=True
            )
            self._asking = asking
            asking.start()
        return self._lines if gpus else ()

    def _ask(self, gpus: Sequence[str], ranks: Mapping[int, int]) -> None:
        import pynvml  # takes 50 ms, and only a session on GPUs needs it

        lines, of_rank = [], Counter[int]()
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
            for user in users:
                of_rank[ranks.get(user.pid, -1)] += user.usedGpuMemory or 0
            held = [
                f"{process_name(user.pid, ranks)} {format_bytes(user.usedGpuMemory)}"
                if user.usedGpuMemory
                else process_name(user.pid, ranks)  # a container's driver may hide the numbers
                for user in users
            ]
            used, total = format_bytes(memory.used), format_bytes(memory.total)
            by = f": {', '.join(held)}" if held else ""
            lines.append(f"GPU {gpu}: {used} of {total} used{by}")
        self._lines, self.held = tuple(lines), of_rank


def process_name(pid: int, ranks: Mapping[int, int]) -> str:
    """Return a process that uses a GPU in words: ``rank 2``, ``python3 (pid 4711)``."""
    import psutil

    if pid in ranks:
        return f"rank {ranks[pid]}"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:  # of another container, or gone
        return f"pid {pid}"
