"""The fault lab's hosts: the process that holds them open, and each rank's host."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import network_namespaces
from ddp_notebook.launch.client import ForkServerClient

_OPEN_WITHIN_S = 10.0
_CLOSE_WITHIN_S = 2.0
_POLL_S = 0.005
_ON_SECOND_HOST = 1
"""The rank that is alone on the second host."""


@dataclass(frozen=True)
class Placed:
    """Where the ranks of a script run."""

    address: tuple[str, int]
    """The store's."""
    hosts: Mapping[int, Mapping[str, str]]
    """Per rank the paths of its host's namespaces ``net`` and ``uts``."""


class LabHosts:
    """Two linked hosts, which exist as long as the process that holds them open.

    `port` is the store's. All ports of a new host are free, but each use needs a different one:
    torch caches a process's stores by port, even after the host is gone.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        folder: Path,
        names: tuple[str, ...],
        drops: str,
        port: int,
    ) -> None:
        self._fork_server = fork_server
        self._ended = False
        self.port = port
        self._report = folder / f"lab-{time.monotonic_ns()}.json"
        arguments = {"report": str(self._report), "names": names, "drops": drops, "port": port}
        self.pid = fork_server.spawn_call(
            "ddp_notebook.launch.network_namespaces:hold",
            arguments,
            folder / "lab.log",
            self._exited,
        )

    def place(self, world_size: int) -> Placed:
        """Wait until the hosts exist and place the ranks on them. Raises UsageMistake."""
        deadline = time.monotonic() + _OPEN_WITHIN_S
        while not self._report.exists() and not self._ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        report: dict[str, Any] = {"error": "the process that makes them ended, or took too long"}
        if self._report.exists():
            report = json.loads(self._report.read_text())
        if "error" in report:
            raise UsageMistake(f"The second host could not be made: {report['error']}")
        first, second = report["hosts"]
        hosts = {rank: second if rank == _ON_SECOND_HOST else first for rank in range(world_size)}
        return Placed((network_namespaces.address(0), self.port), hosts)

    def close(self) -> None:
        """End the process; the hosts are gone as soon as no rank is on them any more."""
        self._report.unlink(missing_ok=True)
        if not self._ended:
            self._fork_server.signal(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        while not self._ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _exited(self, _: int) -> None:
        self._ended = True
