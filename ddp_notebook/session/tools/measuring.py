"""A running benchmark: what it measures, its progress, and how to cancel it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.rank.bench.host_load import busy_s

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record


class Measuring:
    """A running benchmark. Thread-safe."""

    def __init__(self, what: str) -> None:
        self.what = what
        """A title of what is measured."""
        self.done = 0.0
        """The share that is done, 0 to 1."""
        self.over = threading.Event()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End it as an interrupt of its cell does: the partial result is kept."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Whether it is to end."""
        return self._cancelled.is_set()


class Benchmarks:
    """Which benchmark of a session is running."""

    def __init__(self, record: Record) -> None:
        self.current: Measuring | None = None
        """The running benchmark; None without one."""
        self._record = record

    @contextmanager
    def measuring(self, what: str) -> Iterator[Measuring]:
        """A context in which a benchmark of `what` is registered as running."""
        progress = self.current = Measuring(what)
        self._record.add(())
        try:
            yield progress
        finally:
            if self.current is progress:
                self.current = None
            progress.over.set()
            self._record.add(())


class HostLoad:
    """Measures the CPU time that other processes (not the ranks, not this one) use from now on."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        """Their process numbers."""
        self._began_s = time.monotonic()
        self._before = self._look()

    def others(self) -> float | None:
        """How many cores they kept busy since; None if unknown."""
        (ours, host), (ours_now, host_now) = self._before, self._look()
        elapsed_s = time.monotonic() - self._began_s
        if host is None or host_now is None or elapsed_s <= 0:
            return None
        return max(0.0, (host_now - host) - (ours_now - ours)) / elapsed_s

    def _look(self) -> tuple[float, float | None]:
        """The CPU seconds of the ranks and this process so far, and of the host."""
        import psutil  # late: only benchmarks need it, and it takes time to load

        ours = time.process_time()
        for pid in self._ranks:
            with contextlib.suppress(psutil.Error):
                spent = psutil.Process(pid).cpu_times()
                ours += spent.user + spent.system
        return ours, busy_s(Path("/proc/stat"))
