"""What was found wrong in the last run or set-up, until the next one begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ddp_notebook.model import Diagnosis, JudgedRun

SET_UP = "set-up"
"""The title of what is no cell and no script."""


class Found:
    """What was found wrong in one run or set-up; nothing as long as it goes well.

    Any thread may ask. `is_over` is true once no rank is in it.
    """

    def __init__(
        self, title: str, number: int = 0, is_over: Callable[[], bool] = lambda: True
    ) -> None:
        self.title = title
        self.number = number
        self._is_over = is_over
        self._diagnosis: Diagnosis | None = None
        self._at_s = time.monotonic()

    def take(self, diagnosis: Diagnosis) -> None:
        """This is what is wrong with it."""
        self._diagnosis, self._at_s = diagnosis, time.monotonic()

    def nothing(self) -> None:
        """It went well after all."""
        self._diagnosis = None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What was found, and of which run that is; None for nothing."""
        found = self._diagnosis
        return replace(found, run=self.run) if found is not None else None

    @property
    def run(self) -> JudgedRun:
        """Which run it is; once it is over, how long ago it was judged."""
        if not self._is_over():
            return JudgedRun(self.title, self.number)
        age_s = time.monotonic() - self._at_s
        found_at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - age_s))
        return JudgedRun(self.title, self.number, True, found_at, round(age_s, 1))


class LastFindings:
    """What was found in the last run or set-up; of runs that went on beside each other, in all."""

    def __init__(self) -> None:
        self.begun = 0
        """How many runs and set-ups have begun."""
        self._kept: list[Found] = []
        self._lock = threading.Lock()

    def begin(self, found: Found) -> None:
        """A run or a set-up begins: what was found in those that are over is of the past."""
        with self._lock:
            self.begun += 1
            self._kept = [other for other in self._kept if not other.run.over]
            self._kept.append(found)

    @property
    def last(self) -> Found | None:
        """The newest in which something was found, else the newest; None for none."""
        with self._lock:
            kept = list(reversed(self._kept))
        return next((found for found in kept if found.diagnosis), kept[0] if kept else None)
