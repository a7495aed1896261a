"""For tests: a cluster without processes, and the way to what runs behind a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import host_facts
from ddp_notebook.launch.devices import plan_devices
from ddp_notebook.launch.host_facts import ProcessState
from ddp_notebook.model import Event, Ranks
from ddp_notebook.rank.calls import Answer, Call, CannotAnswer, Order, Question, Request
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.bring_up import BringUp
from ddp_notebook.session.collective_logs import CollectiveLogs
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.run import CellRun, RunOptions
from ddp_notebook.session.session_processes import Processes

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster


def processes_of(session: Session) -> Processes:
    """Return the processes of a session. Raises NoSession, SessionLost without any."""
    return session.pool.need("A test")


def cluster_of(session: Session) -> Any:
    """The cluster of a session, to be asked as the session does; also its private parts."""
    return processes_of(session).cluster


def bring_up_of(session: Session) -> BringUp:
    """The setup of the ranks of a session. Raises NoSession, SessionLost."""
    return session.setup.need("A test")


def pids_of(session: Session) -> dict[str, Any]:
    """The processes behind a session by what they are, and its folder; plain values."""
    processes = processes_of(session)
    return {
        "fork_server": processes.fork_server.pid,
        "controller": cluster_of(session).controller_pid,
        "store": processes.store_pid,
        "ranks": [state.pid for state in session.record.snapshot.ranks],
        "folder": str(processes.folder),
    }


Tell = Callable[[int, Any], Iterable[Event]]
"""Returns the events that a rank emits on a request (of `tell`), or a signal (its number)."""


@dataclass
class FakeCluster:
    """A `cluster.RankCluster` whose ranks answer from a script of values, or never.

    `answers` has for each call that is made, or question that is asked, the answer of each rank;
    one that is left out does not answer. An answer that is a UsageMistake is raised. What is done
    with the cluster is written down: `sent`, `called`, `signals`.
    """

    record: Record
    answers: dict[str, Mapping[int, Any]] = field(default_factory=dict)
    """By the name of a call or a question: rank to answer."""
    tells: Tell = lambda rank, request: ()
    """The ranks' reaction to an order to run something."""
    unreachable: Ranks = ()
    """Ranks that nothing can be sent to."""
    signalled: Tell = lambda rank, number: ()
    """The ranks' reaction to a signal, by its number."""
    meanwhile: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By the name of a call: called once it was made."""
    calls: dict[str, Tell] = field(default_factory=dict)
    """The ranks' reaction to calls, by the name of the call."""
    sent: list[tuple[Ranks, str]] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    signals: list[tuple[int, int]] = field(default_factory=list)

    def start(self) -> None:
        """Nothing has to be started."""

    def launch(
        self,
        rank: int,
        environment: Mapping[str, str],
        first_calls: Sequence[Any],
        begun: Callable[[int], None],
        host: int = 0,
        folder: str = "",
    ) -> None:
        """A process number, of no process."""
        begun(100_000 + rank)

    def wait_for(self, ranks: Ranks, timeout_s: float, give_up: Callable[[], bool]) -> Ranks:
        """All ranks take calls at once."""
        return ()

    def call(
        self, ranks: Ranks, call: Call[Request, Answer], request: Callable[[int], Request]
    ) -> dict[int, Future[Answer]]:
        """The answers of `answers`, at once."""
        self.called.append(call.name)
        sent: dict[int, Future[Answer]] = {rank: Future() for rank in ranks}
        for rank, value in self.answers.get(call.name, {}).items():
            if rank in sent:
                sent[rank].set_result(value)
        self.meanwhile.get(call.name, lambda: None)()
        for rank in ranks if call.name in self.calls else ():
            self.record.add(tuple(self.calls[call.name](rank, request(rank))))
        return sent

    def tell(self, ranks: Ranks, order: Order[Request], request: Request) -> Ranks:
        """Every rank that can be reached does what `tells` says."""
        self.sent.append((ranks, order.name))
        for rank in ranks:
            if rank not in self.unreachable:
                self.record.add(tuple(self.tells(rank, request)))
        return tuple(rank for rank in ranks if rank in self.unreachable)

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """The answers of `answers`."""
        known = self.answers.get(question.name, {})
        return {rank: known[rank] for rank in ranks if rank in known}

    def can_ask(self, rank: int) -> bool:
        """False of those that a test names."""
        return rank not in self.unreachable

    def value_of(self, answer: Future[Answer], timeout_s: float) -> Answer:
        """Return the result of a call."""
        value = answer.result(timeout_s)
        if isinstance(value, UsageMistake):
            raise value
        return value

    def push(self, ranks: Ranks, values: Mapping[str, Any], timeout_s: float) -> None:
        """Nothing keeps the values."""

    def signal(self, rank: int, number: int) -> None:
        """The rank does what `signalled` says."""
        self.signals.append((rank, number))
        self.record.add(tuple(self.signalled(rank, number)))

    def stopped(self, pids: Sequence[int]) -> list[int]:
        """Return those on this machine."""
        return host_facts.stopped(pids)

    def process(self, pid: int) -> ProcessState:
        """Return what this machine knows of it."""
        return host_facts.process(pid)

    def lend(self, rank: int, pid: int, questions: Path) -> None:
        """No script has processes."""

    def take_back(self) -> None:
        """No script has processes."""

    def stop(self, rank: int) -> None:
        """Nothing has to be ended."""

    def lost_fork_server(self) -> None:
        """Do nothing: no process waits for it."""

    @property
    def controller_pid(self) -> int:
        """Return 0: nothing runs."""
        return 0

    def close(self) -> None:
        """Nothing has to be ended."""


class FakeProcesses(Processes):
    """The processes of a session with a `FakeCluster`: none. Its ranks take calls at once."""

    def __init__(self, cluster: FakeCluster, options: InitOptions, folder: Path) -> None:
        ranks = range(options.world_size)
        self.options = options
        self.devices = plan_devices(options.world_size, "cpu", "gloo", (), ())
        self.record = cluster.record
        self.folder, self._closing = folder, False
        self.fork_server = cast(Any, None)
        self.script = None
        self.cluster = cluster
        self.logs = CollectiveLogs(folder)
        self.launched: list[Ranks] = []
        """The ranks that got processes, in turn."""
        self.record.begin(options.world_size, backend="gloo")
        self.launch(tuple(ranks))

    def launch(self, ranks: Ranks) -> None:
        """The ranks have processes at once, none of which exists."""
        self.launched.append(ranks)
        for rank in ranks:
            self.cluster.launch(rank, {}, (), partial(self._begun, rank))

    def store_address(self) -> tuple[str, int]:
        """An address where nothing listens."""
        return ("127.0.0.1", 29500)

    @property
    def store_alive(self) -> bool:
        """Always true."""
        return True

    @property
    def unasked(self) -> str:
        """All ranks can be asked."""
        return ""

    @property
    def folder_gone(self) -> str:
        """Nothing is: no rank needs it."""
        return ""

    def begin_last_words(self, ranks: Ranks) -> None:
        """There are no logs."""

    def close_lab(self) -> None:
        """There are no hosts."""

    def close(self, keep_warm: bool) -> bool:
        """There is nothing to end, nor a fork server that could stay."""
        return False


def fake_run(
    cell: int, ranks: Ranks, script: str = "", number: int = 0, cluster: Any = None
) -> CellRun:
    """Return a run that is not sent to ranks: a test gives it their events."""
    there: Any = SimpleNamespace(cluster=cluster, logs=None, record=Record())
    return CellRun(cell, ranks, there, RunOptions(number), script)


def fake_session(folder: Path, world_size: int = 2) -> tuple[Session, FakeCluster, FakeProcesses]:
    """A session whose ranks do what the cluster says; they are launched, and not set up yet."""
    session = Session()
    cluster = FakeCluster(session.record)
    processes = FakeProcesses(cluster, InitOptions(world_size=world_size, device="cpu"), folder)
    session.pool.processes = processes
    session.setup.bring_up = BringUp(processes, session.record)
    return session, cluster, processes


if TYPE_CHECKING:
    _fits: Callable[[Record], RankCluster] = FakeCluster
    """So that mypy compares it with the protocol."""
