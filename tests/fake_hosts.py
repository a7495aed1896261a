"""A client of hosts that are all this machine: each has a fork server here, and a number.

Processes of host 1 have numbers that are no pids, so what takes one for a pid fails.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import support

from ddp_notebook.launch import host_facts
from ddp_notebook.launch.client import ExitHandler, ForkServerClient
from ddp_notebook.launch.hosts_client import HostsClient
from ddp_notebook.launch.placement import Hello, HostSpec
from ddp_notebook.launch.process_ids import HOST_VARIABLE, host_of, pid_of, process_id


class FakeHosts(HostsClient):
    """Has the methods of `HostsClient`; its hosts share this machine's files, network and clock."""

    silent: dict[int, float]
    """How long the hosts that a test cuts off have not been heard."""
    hellos: Mapping[int, Mapping[str, Any]] = {}
    """What a test has hosts say of themselves."""

    def __init__(self, local: ForkServerClient, hosts: Sequence[HostSpec], **_: Any) -> None:
        self.local, self.hosts = local, tuple(hosts)
        self.ready: Future[Mapping[str, Any]] = Future()
        self.asked: list[tuple[int, str]] = []
        self.silent = {}
        self._servers: dict[int, ForkServerClient] = {0: local}
        self._spared = contextlib.ExitStack()

    def reach(self, folder: Path, seen: Callable[[int, str], None], timeout_s: float) -> None:
        self._folder = str(folder)
        for host in range(1, len(self.hosts) + 1):
            os.environ[HOST_VARIABLE] = str(host)
            try:
                server = self._servers[host] = ForkServerClient("fork")
            finally:
                del os.environ[HOST_VARIABLE]
            self._spared.enter_context(support.spared_processes([server.pid]))
            seen(host, "reached")
        far = list(self._servers.values())[1:]
        for server in far:
            server.ready.add_done_callback(lambda _: self._loaded(far))

    def _loaded(self, far: Sequence[ForkServerClient]) -> None:
        if all(server.ready.done() for server in far) and not self.ready.done():
            self.ready.set_result({})

    def hello(self, host: int) -> Hello:
        said = {**host_facts.machine(), **self.hellos.get(host, {})}
        said["gpus"] = tuple(said["gpus"])
        return Hello(
            **said,
            address="127.0.0.1",
            folder=self._folder,
            current_folder=str(Path.cwd()),
            shared_folder=True,
            clock_offset_ns=0,
            limits="",
        )

    def spawn(
        self,
        spec: Mapping[str, Any],
        on_exit: ExitHandler,
        begun: Callable[[int], None] = lambda pid: None,
    ) -> int:
        host = spec.get("host", 0)
        there = {**spec, "env": {**spec["env"], HOST_VARIABLE: str(host)}} if host else spec
        server = self._servers[host]
        pid = server.spawn(there, on_exit, lambda pid: begun(process_id(host, pid)))
        return process_id(host, pid)

    def signal(self, pid: int, number: int) -> None:
        self._servers[host_of(pid)].signal(pid_of(pid), number)

    def question(self, host: int, name: str, **arguments: Any) -> Any:
        self.asked.append((host, name))
        return None if self.silent.get(host) else host_facts.QUESTIONS[name](**arguments)

    def silent_s(self, host: int) -> float:
        return self.silent.get(host, 0.0)

    @property
    def alive(self) -> bool:
        return self.local.alive

    @property
    def peak_bytes(self) -> dict[int, int]:  # type: ignore[override]
        of = self._servers.items()
        return {process_id(host, pid): n for host, s in of for pid, n in s.peak_bytes.items()}

    def result_of(self, future: Future[Any], silent_s: float) -> Any:
        return future.result(60)

    def own(self, folder: Path) -> None:
        self.local.own(folder)

    def on_lost(self, handler: Callable[[], None]) -> None:
        self.local.on_lost(handler)

    def reset(self, timeout_s: float = 5) -> bool:
        self._close_far()
        return self.local.reset(timeout_s)

    def close(self, timeout_s: float = 5) -> None:
        self._close_far()
        self.local.close(timeout_s)

    def _close_far(self) -> None:
        while len(self._servers) > 1:
            self._servers.popitem()[1].close()
        self._spared.close()
