"""The benchmark that goes on: what it measures, how far it is, and how it is cancelled."""

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


class Measures:
    """Mixed into `Session`."""

    record: Record
    measuring: Measuring | None
    """The benchmark that goes on, if one does."""

    @contextmanager
    def _measuring(self, what: str) -> Iterator[Measuring]:
        """Within, it is known that a benchmark goes on."""
        mine = self.measuring = Measuring(what)
        self.record.add(())
        try:
            yield mine
        finally:
            if self.measuring is mine:
                self.measuring = None
            mine.over.set()
            self.record.add(())
