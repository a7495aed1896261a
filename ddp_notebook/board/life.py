"""The resources of the ranks' processes, for the live board: sampled by the kernel, once a second.

From /proc, as psutil reads it: a rank does nothing for it, and a blocked one is sampled as well.
The value of a loss is not among it: to read one makes a rank wait for its GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp_notebook.board.timeline import Timeline
from ddp_notebook.model import format_bytes

if TYPE_CHECKING:
    import psutil

_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class _Process:
    """A rank's process, and what it used of late: percents of a core, steps in a second."""

    of: psutil.Process
    cpu: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    memory_bytes: int = 0
    gpu_bytes: int = 0

    def sample(self, steps: float, gpu_bytes: int) -> None:
        """Look at it again."""
        # Since it was last looked at; of the first time it is not known since when.
        self.cpu.append(self.of.cpu_percent())
        self.steps.append(steps)
        self.memory_bytes, self.gpu_bytes = self.of.memory_info().rss, gpu_bytes


class Life:
    """Samples processes while a page watches. For one thread at a time."""

    def __init__(self) -> None:
        self._taken_s = 0.0
        self._processes: dict[int, _Process] = {}
        self._sent_bytes = 0

    def sample(
        self, ranks: Mapping[int, int], timeline: Timeline, gpu_bytes: Mapping[int, int]
    ) -> dict[str, Any] | None:
        """Return what they use in words, of all and of each; None within a second of the last.

        `ranks` maps pids to ranks, `gpu_bytes` has the GPU memory that each rank holds.
        """
        now_s = time.monotonic()
        since_s = now_s - self._taken_s
        if since_s < 1.0 or not ranks:
            return None
        import psutil  # here for load time

        self._taken_s, known, self._processes = now_s, self._processes, {}
        for pid, rank in ranks.items():
            with contextlib.suppress(psutil.Error):  # it has ended
                process = known.get(pid) or _Process(psutil.Process(pid))
                rate = timeline.steps_a_second(rank, time.monotonic_ns())
                process.sample(rate, gpu_bytes.get(rank, 0))
                self._processes[pid] = process
        of = {ranks[pid]: each for pid, each in self._processes.items() if pid in known}
        # Linux counts what is sent by machine, not by process; what goes to itself is counted too.
        counted = psutil.net_io_counters()
        before, self._sent_bytes = self._sent_bytes, counted.bytes_sent if counted else 0
        sent = max(0, self._sent_bytes - before) / since_s
        if not of:
            return None
        rows = {rank: f"rank {rank}: {_words([of[rank]])}" for rank in sorted(of)[:64]}
        network = f" · machine sends {format_bytes(int(sent))}/s" if counted else ""
        return {"all": _words(list(of.values())) + network, "of": rows}


def _words(processes: Sequence[_Process]) -> str:
    """Return their use: the means of their steps and cores, the sums of their memory.

    One line under the rows has room for one row of bars; the words of a single row have more.
    """
    means = []
    for samples in ([p.steps for p in processes], [p.cpu for p in processes]):
        newest = min(map(len, samples))
        last = zip(*(list(each)[-newest:] for each in samples), strict=True)
        means.append([sum(each) / len(processes) for each in last])
    steps, cpu = means
    lately = f"{bars(cpu, 100)} " if len(processes) == 1 else ""
    gpu = sum(each.gpu_bytes for each in processes)
    parts = (
        f"{steps[-1]:.3g} steps/s {bars(steps)}" * any(steps),
        f"CPU {lately}{cpu[-1]:.0f} %",
        format_bytes(sum(each.memory_bytes for each in processes)),
        f"GPU {format_bytes(gpu)}" * bool(gpu),
    )
    return " · ".join(filter(None, parts))


def bars(values: Sequence[float], most: float = 0.0) -> str:
    """Return values as a line of bars; the highest stands for `most`, or for the largest."""
    most = max(most, *values) or 1.0
    return "".join(_BARS[int(7.99 * each / most)] for each in values)
