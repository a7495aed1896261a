"""The fault lab's hosts: held by a process of the session's, and which rank is on which."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import network_namespaces
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.environment import child_environment

_OPEN_WITHIN_S = 10.0
_CLOSE_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.005
SECOND = 1
"""The rank on the second host; all others are on the first."""


@dataclass(frozen=True)
class Placed:
    """Where the ranks of a script are: the store's address, and the host of each rank as the
    paths of its namespaces."""

    address: tuple[str, int]
    hosts: Mapping[int, Mapping[str, str]]


class LabHosts:
    """Two hosts on one link, for as long as the process that holds them.

    `port` is the store's. Every port of a new host is free, and yet it must be another one each
    time: torch keeps the stores of a process by their port, also one on a host that is gone.
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
        self._said = folder / f"lab-{time.monotonic_ns()}.json"
        told = {"said": str(self._said), "names": names, "drops": drops, "port": self.port}
        spec = {
            "calls": [["ddp_notebook.launch.network_namespaces:hold", told]],
            "env": child_environment({}),
            "cwd": os.getcwd(),  # noqa: PTH109
            "log": str(folder / "lab.log"),
        }
        self.pid = fork_server.spawn(spec, self._exited)

    def place(self, world_size: int) -> Placed:
        """The ranks on the hosts, when these are there. Raises UsageMistake."""
        deadline = time.monotonic() + _OPEN_WITHIN_S
        while not self._said.exists() and not self._ended and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        said: dict[str, Any] = {"error": "the process that holds them did not say why"}
        if self._said.exists():
            said = json.loads(self._said.read_text())
        if "error" in said:
            raise UsageMistake(f"The lab's hosts could not be made: {said['error']}")
        first, second = said["hosts"]
        hosts = {rank: second if rank == SECOND else first for rank in range(world_size)}
        return Placed((network_namespaces.address(0), self.port), hosts)

    def close(self) -> None:
        """Let go of them; they are gone when no rank is there any more."""
        self._said.unlink(missing_ok=True)
        if not self._ended:
            self._fork_server.signal(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        while not self._ended and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def _exited(self, _: int) -> None:
        self._ended = True
