"""The session's stores: each runs in its own process, as with torchrun's agent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.errors import SetupFailed
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.model import (
    SESSION,
    Category,
    Diagnosis,
    Event,
    Finding,
    StoreFailed,
    StoreOpened,
)
from ddp_notebook.session.record import Record


class StoreProcess:
    """A process that hosts one TCPStore at `host`:`port` (0: the system chooses)."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        receiver: EventReceiver,
        record: Record,
        folder: Path,
        host: str,
        port: int,
    ) -> None:
        self._fork_server = fork_server
        self._record = record
        self._answers: list[StoreOpened | StoreFailed] = []
        self._ended = False
        self._unsubscribe = record.subscribe(self._watch)
        receiver.expect_from_start(SESSION)
        arguments = {"url": receiver.url, "source": receiver.source, "host": host, "port": port}
        self.pid = fork_server.spawn_call(
            "ddp_notebook.rank.setup.store_process:main",
            arguments,
            folder / "store.log",
            self._exited,
        )

    @property
    def alive(self) -> bool:
        """True while its process runs."""
        return not self._ended

    def address(self, timeout_s: float) -> tuple[str, int]:
        """Wait until it listens; its address. Raises SetupFailed."""
        self._record.wait_for(lambda: self._own_answer() is not None or self._ended, timeout_s)
        # A process that cannot listen reports why and exits; its report may arrive after its exit.
        self._record.wait_for(lambda: self._own_answer() is not None, 1.0)
        answer = self._own_answer()
        if answer is not None:
            self._unsubscribe()  # it says nothing more, and the session may end without closing it
        if isinstance(answer, StoreOpened):
            return answer.host, answer.port
        if answer is None:
            raise SetupFailed("The store did not open in time. Try again: %ddp_init")
        category = Category(answer.category or Category.ENV_INVALID)
        finding = Finding(category, (), answer.cause.rstrip("."), answer.remedy)
        raise SetupFailed(
            f"{answer.cause}\n  What to do: {answer.remedy}", diagnosis=Diagnosis((finding,))
        )

    def close(self) -> None:
        """End the process; returns when its port is free."""
        self._unsubscribe()
        if not self._ended:
            self._fork_server.signal(self.pid, signal.SIGKILL)
            self._record.wait_for(lambda: self._ended, 2.0)

    def _own_answer(self) -> StoreOpened | StoreFailed | None:
        return next((event for event in self._answers if event.pid == self.pid), None)

    def _watch(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, (StoreOpened, StoreFailed)):
                self._answers.append(event)

    def _exited(self, code: int) -> None:
        self._ended = True
        self._record.add(())
