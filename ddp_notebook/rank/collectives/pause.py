"""Pauses this rank before each collective, until it is stepped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.main_thread import Aborted, MainThread


class PauseGate(Component):
    """The gate that collectives pass. Only `paused` is read before each one."""

    def __init__(self, main_thread: MainThread) -> None:
        self._main_thread = main_thread
        self.paused = False
        """True while collectives are paused."""
        self.at: int | None = None
        """The number of the collective before which the rank is paused; None when it is not."""
        self._steps = threading.Semaphore(0)
        self.on_leave: Callable[[], None] = lambda: None
        """Called in the paused thread when it continues."""

    def run_begins(self, run: Run) -> None:
        """Pause in this run, or do not; a late step for the last run does not count."""
        self.paused, self.at = run.paused, None
        self._forget_steps()

    def run_ends(self) -> None:
        """Collectives outside of a run are not paused."""
        self.run_begins(Run(0))

    @property
    def aborted(self) -> bool:
        """True while what runs is to end (%ddp_abort)."""
        return self._main_thread.abort.is_set()

    def pause(self) -> None:
        """Pause before each collective that is issued from now on. Any thread."""
        if not self.paused:
            self._forget_steps()
            self.paused = True

    def step(self) -> int | None:
        """Let the rank go on to its next collective; returns the one it was at. Any thread."""
        # None also of a rank that has seen `paused` and is not in `wait` yet. Nothing is released
        # then: a step that nobody waits for would let the next collective pass.
        at = self.at
        if at is not None:
            self._steps.release()
        return at

    def resume(self) -> int | None:
        """Stop pausing the rank; returns the collective it was paused before. Any thread."""
        self.paused = False
        return self.step()

    def wait(self, number: int) -> None:
        """Wait before collective `number`. Raises Aborted, KeyboardInterrupt."""
        self.at = number
        try:
            # A step, a resume and an abort end it, and Python can wait for only one of them: so it
            # polls.
            # How often a paused rank looks whether it was aborted.
            while not self._steps.acquire(timeout=0.05):
                if self._main_thread.abort.is_set():
                    raise Aborted("aborted (%ddp_abort)")
                if not self.paused:  # it was resumed just before it was paused here
                    break
        finally:
            self.at = None
        self.on_leave()

    def _forget_steps(self) -> None:
        """A new semaphore would not do: the user's code may have replaced what it is made of."""
        while self._steps.acquire(blocking=False):
            pass
