"""The progress of a benchmark: what it measures, how far it is, and how it is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record


class Measuring:
    """A benchmark that goes on. For any thread."""

    def __init__(self, what: str) -> None:
        self.what = what
        """What is measured, for a person to read."""
        self.done = 0.0
        """The share of it that is done, 0 to 1."""
        self.over = threading.Event()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End it as an interrupt of its cell does: what is measured by then is kept."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Whether it is to end."""
        return self._cancelled.is_set()


class Benchmarks:
    """Which benchmark of a session goes on."""

    def __init__(self, record: Record) -> None:
        self.current: Measuring | None = None
        """The benchmark that goes on; None when none does."""
        self._record = record

    @contextmanager
    def measuring(self, what: str) -> Iterator[Measuring]:
        """Within, it is known that a benchmark of `what` goes on."""
        progress = self.current = Measuring(what)
        self._record.add(())
        try:
            yield progress
        finally:
            if self.current is progress:
                self.current = None
            progress.over.set()
            self._record.add(())
