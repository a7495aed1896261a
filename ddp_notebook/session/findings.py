"""The problems found in the last run or setup, until the next one begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ddp_notebook.model import Diagnosis, JudgedRun

SET_UP = "setup"
"""The title of a run that is neither a cell nor a script."""


class Found:
    """The diagnosis of one run or setup; none while no problem is found.

    Thread-safe. `is_over` is true once no rank is in the run.
    """

    def __init__(
        self, title: str, number: int = 0, is_over: Callable[[], bool] = lambda: True
    ) -> None:
        self.title = title
        self.number = number
        self._is_over = is_over
        self._diagnosis: Diagnosis | None = None
        self._at_s = time.monotonic()
        self.judged = False
        """True once the run has ended and was examined; so it is with a detached one, too."""

    def take(self, diagnosis: Diagnosis) -> None:
        """Store the diagnosis."""
        self._diagnosis, self._at_s = diagnosis, time.monotonic()

    def nothing(self) -> None:
        """Clear the diagnosis: the problem resolved itself."""
        self._diagnosis = None

    @property
    def at_ns(self) -> int:
        """When the diagnosis was stored, by the session's monotonic clock."""
        return round(self._at_s * 1e9)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis with its run; None if no problem was found."""
        diagnosis = self._diagnosis
        return replace(diagnosis, run=self.run) if diagnosis is not None else None

    @property
    def run(self) -> JudgedRun:
        """The run; once it is over, also how long ago it was diagnosed."""
        if not self._is_over():
            return JudgedRun(self.title, self.number)
        age_s = time.monotonic() - self._at_s
        found_at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - age_s))
        return JudgedRun(self.title, self.number, True, found_at, round(age_s, 1))


class LastFindings:
    """The diagnoses of the last run or setup, and of all runs concurrent with it."""

    def __init__(self) -> None:
        self.begun = 0
        """How many runs and setups have begun."""
        self._kept: list[Found] = []
        self._lock = threading.Lock()

    def begin(self, found: Found) -> None:
        """Register a new run or setup, and drop the diagnoses of those that are over."""
        with self._lock:
            self.begun += 1
            self._kept = [other for other in self._kept if not other.run.over]
            self._kept.append(found)

    @property
    def last(self) -> Found | None:
        """The newest run with a diagnosis, else the newest run; None without a run."""
        with self._lock:
            kept = list(reversed(self._kept))
        return next((found for found in kept if found.diagnosis), kept[0] if kept else None)
