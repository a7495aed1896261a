"""The interface of a session to the processes of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from ddp_notebook.launch.host_facts import ProcessState
from ddp_notebook.model import Ranks
from ddp_notebook.rank.calls import Answer, Call, CannotAnswer, Order, Question, Request


class RankCluster(Protocol):
    """Calls, asks, signals and ends ranks. For tests there is `testing.FakeCluster`."""

    def start(self) -> None:
        """Start what the ranks connect to."""

    def launch(
        self,
        rank: int,
        environment: Mapping[str, str],
        first_calls: Sequence[Any],
        begun: Callable[[int], None],
        host: int = 0,
        folder: str = "",
    ) -> None:
        """Start the process of `rank` on a host; `first_calls` as in `launch.child`.

        Without a `folder` it starts in this process's. `begun` gets its pid, as in
        `launch.process_ids`, before its end is reported.
        """

    def wait_for(self, ranks: Ranks, timeout_s: float, give_up: Callable[[], bool]) -> Ranks:
        """Wait until `ranks` accept calls; returns those that do not in time."""

    def call(
        self, ranks: Ranks, call: Call[Request, Answer], request: Callable[[int], Request]
    ) -> dict[int, Future[Answer]]:
        """Call ranks, each with a request of its own."""

    def tell(self, ranks: Ranks, order: Order[Request], request: Request) -> Ranks:
        """Send ranks one order; returns the unreachable ones. Events report its outcome."""

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask ranks a question that they answer even while their main thread is blocked.

        A rank that does not answer within `timeout_s` is left out.
        """

    def can_ask(self, rank: int) -> bool:
        """True while the socket at which `rank` is asked is there."""

    def value_of(self, answer: Future[Answer], timeout_s: float) -> Answer:
        """Return the result of a call. Raises UsageMistake when the rank raised, or was late."""

    def push(self, ranks: Ranks, values: Mapping[str, Any], timeout_s: float) -> None:
        """Set variables on ranks."""

    def signal(self, rank: int, number: int) -> None:
        """Signal the process of `rank`."""

    def stopped(self, pids: Sequence[int]) -> list[int]:
        """Return those processes that wait for SIGCONT, also on other hosts."""

    def process(self, pid: int) -> ProcessState:
        """Return what the system knows of a process, also on another host."""

    def lend(self, rank: int, pid: int, questions: Path) -> None:
        """Ask and signal a script's process in place of `rank`'s own."""

    def take_back(self) -> None:
        """Ask and signal the ranks' own processes again."""

    def stop(self, rank: int) -> None:
        """End the process of `rank`, and unregister it."""

    @property
    def controller_pid(self) -> int:
        """The process that ranks and session connect to, 0 before it runs."""

    def lost_fork_server(self) -> None:
        """Release whoever waits for the end of a process: no server is left to report it."""

    def close(self) -> None:
        """End everything."""
