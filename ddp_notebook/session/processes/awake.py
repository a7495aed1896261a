"""Resumes (SIGCONT) the processes that serve the ranks when something stopped them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from ddp_notebook.launch.process_groups import is_stopped

_LOOK_EVERY_S = 0.5


class KeptAwake:
    """Watches, until it is closed, processes that have no reason to be stopped.

    While one is stopped (SIGSTOP), everything that needs it hangs silently. `pids` maps them to
    their names; `wake` is called, on a thread, with each one that two consecutive checks found
    stopped.
    """

    def __init__(
        self, pids: Callable[[], Mapping[int, str]], wake: Callable[[int, str], None]
    ) -> None:
        self._pids = pids
        self._wake = wake
        self._closed = threading.Event()
        self._found: set[int] = set()
        threading.Thread(target=self._watch, name="ddp-awake", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            # `pathlib.Path = None`, until it is set back
            with contextlib.suppress(AttributeError, OSError, TypeError):
                self._look()

    def _look(self) -> None:
        stopped = {pid: name for pid, name in self._pids().items() if is_stopped(pid)}
        for pid in self._found & stopped.keys():
            self._wake(pid, stopped[pid])
        self._found = set(stopped)
