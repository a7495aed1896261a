"""The session's client of several hosts: a fork server on each, as one.

It has the methods of `client.ForkServerClient`. Host 0 is the notebook's own machine, whose fork
server starts the controller; ranks and stores go to the host that their `spec` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ddp_notebook.launch.client import ExitHandler, ForkServerClient
from ddp_notebook.launch.placement import Hello, HostSpec

T = TypeVar("T")


class HostsClient:
    """The hosts of one session; `local` is the notebook's own fork server. Thread-safe."""

    def __init__(
        self,
        local: ForkServerClient,
        hosts: Sequence[HostSpec],
        *,
        ssh: str = "ssh",
        python: str = "",
        folder: str = "",
        give_up_after_s: float = 120.0,
    ) -> None:
        self.local = local
        self.hosts = tuple(hosts)
        """Hosts 1, 2, ... of the session."""
        self.ready: Future[Mapping[str, Any]] = Future()
        """Done when every host has torch loaded."""
        self.peak_bytes: dict[int, int] = {}
        """The peak memory of processes that ended, on every host, by their numbers."""
        raise NotImplementedError

    # -- as ForkServerClient -------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The notebook's own fork server."""
        return self.local.pid

    @property
    def alive(self) -> bool:
        """False once the notebook's own fork server is gone, or every host is."""
        raise NotImplementedError

    def equals_a_new_one(self) -> bool:
        """As ForkServerClient's, for this machine."""
        return self.local.equals_a_new_one()

    def spawn(
        self,
        spec: Mapping[str, Any],
        on_exit: ExitHandler,
        begun: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Start a child on host ``spec["host"]`` (0 or absent: here); return its number.

        `begun` and `on_exit` as in ForkServerClient.spawn, with `process_ids.process_id`. Raises
        SessionLost and OSError, with the host's name.
        """
        raise NotImplementedError

    def signal(self, pid: int, number: int) -> None:
        """Signal a child, on the host that its number names."""
        raise NotImplementedError

    def result_of(self, future: Future[T], silent_s: float) -> T:
        """Wait for what a host answers. Raises TimeoutError, but not while it makes progress."""
        raise NotImplementedError

    def own(self, folder: Path) -> None:
        """Have this folder removed here when this process is gone; its twins are made from it."""
        raise NotImplementedError

    def on_loading(self, handler: Callable[[float], None]) -> None:
        """Call `handler` with the share of torch that the slowest host has loaded."""
        raise NotImplementedError

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the notebook's own fork server is gone."""
        raise NotImplementedError

    def reset(self, timeout_s: float = 5) -> bool:
        """End all children and all agents; `local` stays. False when it does not answer."""
        raise NotImplementedError

    def wake(self) -> None:
        """Resume the notebook's own fork server if something stopped it."""
        self.local.wake()

    def close(self, timeout_s: float = 5) -> None:
        """End everything on every host; return when it is gone."""
        raise NotImplementedError

    def question(self, host: int, name: str, **arguments: Any) -> Any:
        """Ask a host one of `host_facts.QUESTIONS`; None where it does not answer in 2 s."""
        raise NotImplementedError

    # -- hosts -----------------------------------------------------------------------------

    def reach(self, folder: Path, seen: Callable[[int, str], None], timeout_s: float) -> None:
        """Start every host's agent and wait until all have said hello.

        `folder` is the session's; its controller runs and has written its files. `seen` gets a host
        and what it is at (``reached``, ``agent``, ``torch 40 %``), from any thread, also after the
        return. Raises SetupFailed with the host, the cause and the remedy; then nothing is left.
        """
        raise NotImplementedError

    def hello(self, host: int) -> Hello:
        """Return what a host has said of itself. After `reach` only."""
        raise NotImplementedError

    def silent_s(self, host: int) -> float:
        """Return for how long nothing has been heard of a host; 0 for the notebook's own."""
        raise NotImplementedError


ProcessStarter = ForkServerClient | HostsClient
"""What starts the processes of a session."""
