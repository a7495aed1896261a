"""A process that makes one call: the store, and whatever else a session has run for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.launch.environment import child_environment
from ddp_notebook.launch.hosts_client import ProcessStarter


class CalledProcess:
    """A child that makes one call and ends with it, in this process's environment."""

    def __init__(
        self,
        fork_server: ProcessStarter,
        entry: str,
        arguments: Mapping[str, Any],
        log: Path,
        on_exit: Callable[[], None] = lambda: None,
        host: int = 0,
        folder: str = "",
    ) -> None:
        """Start it: `entry` is ``module:function``, `log` gets its output. Raises as `spawn`.

        On a host; without a `folder` it starts in this process's.
        """
        self._fork_server = fork_server
        self._ended = threading.Event()
        spec = {
            "calls": [[entry, arguments]],
            "env": child_environment({}),
            "cwd": folder or os.getcwd(),  # noqa: PTH109
            "log": str(log),
            "host": host,
        }

        def exited(_code: int) -> None:
            self._ended.set()
            on_exit()

        self.pid = fork_server.spawn(spec, exited)

    @property
    def alive(self) -> bool:
        """True while it runs; it ends with the fork server, unreported."""
        return not self._ended.is_set() and self._fork_server.alive

    def kill(self) -> None:
        """End it; return when it is gone."""
        if self.alive:
            self._fork_server.signal(self.pid, signal.SIGKILL)
            self._ended.wait(2.0)
