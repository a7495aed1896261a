"""Agents on two far hosts, reached without a session on top of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from far_hosts import FarHosts, need_far_hosts
from support import spared_processes

from ddp_notebook.cluster.cluster import IPyParallelCluster
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.environment import child_environment
from ddp_notebook.launch.hosts_client import HostsClient
from ddp_notebook.launch.placement import HostSpec
from ddp_notebook.launch.session_folder import make_folder
from ddp_notebook.launch.ssh_hosts import SSH_VARIABLE

NAMES = ("far-a", "far-b")


@contextmanager
def two_hosts(folder: Path) -> Iterator[FarHosts]:
    """Two far hosts that ssh reaches as the user has set it; they may outlive a test."""
    need_far_hosts()
    made = FarHosts(folder, NAMES)
    try:
        with spared_processes(made.holders), pytest.MonkeyPatch.context() as patch:
            patch.setenv(SSH_VARIABLE, made.ssh)
            yield made
    finally:
        made.close()


class Reached:
    """A client with its agents, and what a session would have beside it."""

    def __init__(self, hosts: FarHosts, names: tuple[str, ...] = NAMES, **options: Any) -> None:
        self.hosts = hosts
        self.held = make_folder()
        self.folder = self.held.path
        self.seen: list[tuple[int, str]] = []
        self.local = ForkServerClient("fork")
        options = {"python": sys.executable, **options}
        self.client = HostsClient(self.local, [HostSpec(name) for name in names], **options)
        self.client.own(self.folder)
        (self.folder / "output").mkdir()
        self.cluster = IPyParallelCluster(self.client, self.folder, lambda *_: None)  # type: ignore[arg-type]
        self.cluster.start()

    def reach(self) -> None:
        self.client.reach(self.folder, lambda host, at: self.seen.append((host, at)), 30.0)

    def close(self) -> None:
        self.cluster.close()
        self.client.close()
        self.held.remove()

    def start(self, source: str, *words: str, host: int = 1, **env: str) -> tuple[int, Future[int]]:
        """A process there that runs `source`."""
        name = NAMES[host - 1]
        path = f"/tmp/program-{time.monotonic_ns()}.py"
        (self.hosts.tmp(name) / Path(path).name).write_text(source)
        code = f"import sys, runpy; sys.argv[1:] = {list(words)!r}; runpy.run_path({path!r})"
        spec = {
            "calls": [["timeit:timeit", {"stmt": code, "number": 1}]],
            "env": child_environment({"FOLDER": str(self.folder), **env}),
            "cwd": "/",
            "log": str(self.folder / "log" / f"rank-{host}.log"),
            "host": host,
            "asked_at": str(self.folder / "ask-0") if "ask-0" in source else "",
        }
        ended: Future[int] = Future()
        begun: list[int] = []
        number = self.client.spawn(spec, ended.set_result, begun.append)
        assert begun == [number]
        return number, ended

    def log(self, host: int = 1) -> str:
        """What its processes have written there, as it is here."""
        log = self.folder / "log" / f"rank-{host}.log"
        return log.read_text() if log.exists() else ""

    def pid_here(self, host: int, word: str) -> int:
        """A process of a host by a word of its command, as this machine knows it."""
        found = self.hosts.processes(NAMES[host - 1])
        return next(pid for pid, command in found.items() if word in command)


@contextmanager
def reached(hosts: FarHosts, **options: Any) -> Iterator[Reached]:
    made = Reached(hosts, **options)
    try:
        made.reach()
        yield made
    finally:
        made.close()
