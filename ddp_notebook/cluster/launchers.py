"""ipyparallel launchers that start the controller and the engines through the fork server.

`Cluster` (ipyparallel's) makes launchers itself, from a class; the fork server they use and
what each child calls reach them as traits, set by `cluster/cluster.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ipyparallel.cluster import launcher as ipp
from traitlets import Any as AnyTrait
from traitlets import List as ListTrait

from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.environment import child_environment

_POLL_S = 0.005


class ForkServerMixin:
    """Start, wait for and signal one child of the fork server, as ipyparallel wants it."""

    entry = ""
    """The function the child calls with ipyparallel's arguments."""
    state: str
    first_calls: list[Any]
    fork_server: ForkServerClient
    exited: Callable[[int, int], None]

    def start(self) -> None:
        """Start the child. Raises SessionLost or OSError."""
        if self.state != "before":
            raise ipp.ProcessStateError(f"already started: {self.state}")
        cwd = str(Path(self.work_dir).resolve())  # type: ignore[attr-defined]
        argv = self.find_args()[3:]  # type: ignore[attr-defined]  # without `python -m module`
        argv.append(f"--work-dir={cwd}")  # by default where ipyparallel was imported
        self._ended = threading.Event()
        self._exit_code: int | None = None
        spec = {
            "calls": [*self.first_calls, [self.entry, {"argv": argv}]],
            "env": child_environment(self.get_env()),  # type: ignore[attr-defined]
            "cwd": cwd,
            "log": self.output_file,  # type: ignore[attr-defined]
        }
        self.pid = self.fork_server.spawn(spec, self._on_exit)
        self.notify_start(self.pid)  # type: ignore[attr-defined]
        if self._ended.is_set():
            self.state = "after"

    def _on_exit(self, code: int) -> None:
        self._exit_code = code
        self._ended.set()
        self.state = "after"
        if self.exited is not None:
            self.exited(self.pid, code)

    async def join(self, timeout: float | None = None) -> None:
        """Wait for the child to end. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
            await asyncio.sleep(_POLL_S)

    def poll(self) -> int | None:
        """Return the exit code, None while the child lives."""
        return self._exit_code

    def signal(self, sig: int) -> None:
        """Signal the child."""
        if not self._ended.is_set():
            self.fork_server.signal(self.pid, sig)

    def get_output(self, remove: bool = False) -> str:
        """Nothing: the session reads a rank's log itself, and keeps it until it ends."""
        return ""


class ForkServerEngineLauncher(ForkServerMixin, ipp.LocalEngineLauncher):  # type: ignore[misc]
    """One engine, which is one rank: an engine set of one, so that ids and environment survive."""

    entry = "ddp_notebook.cluster.engine:engine"
    fork_server = AnyTrait()
    first_calls = ListTrait()
    exited = AnyTrait()

    def start(self, n: int = 1) -> None:
        """Start the engine; `n` is always 1."""
        super().start()


class ForkServerControllerLauncher(ForkServerMixin, ipp.LocalControllerLauncher):  # type: ignore[misc]
    """The controller."""

    entry = "ddp_notebook.cluster.controller:controller"
    fork_server = AnyTrait()
    first_calls = ListTrait()
    exited = AnyTrait()

    async def get_connection_info(self, timeout: float | None = None) -> Mapping[str, Any]:
        """What clients and engines need to connect, as soon as it is written."""
        deadline = time.monotonic() + (self.connection_info_timeout if timeout is None else timeout)
        paths = [Path(path) for path in self.connection_files.values()]
        while not all(path.exists() and path.stat().st_size for path in paths):
            if self.poll() is not None:
                raise RuntimeError(f"the ipyparallel controller ended with {self.poll()}")
            if time.monotonic() > deadline:
                raise TimeoutError("the ipyparallel controller did not come up")
            await asyncio.sleep(_POLL_S)
        info: Mapping[str, Any] = await super().get_connection_info(timeout)
        return info
