"""The ranks as engines of one ipyparallel cluster: its controller, its client, an engine a rank.

ipyparallel's connection is the first of three channels to a rank. It carries what may wait for the
main thread, and whose values only pickle can write: calls, and variables that are pushed. The other
two are the control socket (`questions.py`) and the events (`channels.py`); their heads say why.
Controller and engines are children of the fork server, which has torch loaded, so they are started
here and not by ipyparallel's launchers, which would each start a new Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel as ipp
from ipyparallel.serialize import can, uncan

from ddp_notebook import files
from ddp_notebook.cluster import questions
from ddp_notebook.cluster.ipyparallel_private import (
    caught_up,
    check_private_api,
    engine_name,
    magics_where_they_load,
    unregister,
)
from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.launch import child
from ddp_notebook.launch.addresses import own_loopback
from ddp_notebook.launch.environment import child_environment
from ddp_notebook.launch.host_facts import ProcessState
from ddp_notebook.launch.hosts_client import ProcessStarter
from ddp_notebook.launch.process_ids import host_of, pid_of, process_id
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Ranks, exit_text
from ddp_notebook.rank.calls import Answer, Call, CannotAnswer, Order, Question, Request
from ddp_notebook.rank.rank_process import questions_of

ExitCallback = Callable[[int, int, int], None]
"""Called with rank (CONTROLLER for the controller), pid and exit code."""
CONTROLLER = -1
_loading = threading.Lock()

_CONTROLLER_ARGS = [
    "--log-level=ERROR",
    # One process instead of eight: no load-balanced tasks, no broadcast tree, no database.
    "--IPController.use_threads=True",
    "--TaskScheduler.scheme_name=none",
    "--IPController.broadcast_scheduler_depth=0",
    "--IPController.db_class=NoDB",
    # An engine is registered on a heartbeat, so the heartbeat's period decides how fast a start is.
    # Heartbeats may be missed for ten minutes: a laptop sleeps, and exits are detected otherwise.
    # They come each second when no engine is about to be registered.
    "--HeartMonitor.period=50",
    "--HeartMonitor.max_heartmonitor_misses=600",
]
_ENGINE_ARGS = [
    "--log-level=ERROR",
    # A nanny would be one more process for each engine, to see its end: the fork server does. And
    # an engine that hears no heartbeats, as with a blocked main thread, must not end itself for
    # that: 0 is no check.
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.timeout=600",
    "--HistoryManager.enabled=False",  # no database: a thread, and a file that ranks would share
    "--IPEngine.out_stream_factory=ddp_notebook.cluster.engine.EngineStream",
]
_CLUSTER = "ddp"
"""ipyparallel's name for it, in the names of its files."""
_ENGINE = "ddp_notebook.cluster.engine:engine"
_CONNECTED_S = 60.0
_POLL_S = 0.002
_ENDS_WITHIN_S = 10.0
_FORGOTTEN_WITHIN_S = 2.0
_ASK_AGAIN_S = 10.0

_CALL, _WAKE = "ddp_notebook.rank.runtime:call", "ddp_notebook.rank.runtime:wake"
"""The function that `child.call` calls on a rank."""


class _NoAnswer(Future[Any]):
    """The answer of a rank whose process had ended before it could be called."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.set_exception(ipp.EngineError(f"the process of rank {rank} has ended"))

    def get(self, timeout_s: float | None = None) -> Any:
        """As in ipyparallel's answers."""
        return self.result(timeout_s)

    def wait(self, _timeout_s: float) -> None:
        """The answer is available."""


class IPyParallelCluster:
    """One ipyparallel cluster: engine id == rank, also after a rank was restarted."""

    def __init__(
        self,
        fork_server: ProcessStarter,
        folder: Path,
        on_exit: ExitCallback,
    ) -> None:
        self._fork_server = fork_server
        self._folder = folder
        self._orders = questions.OrderSender()
        self._on_exit = on_exit
        self._closing = False
        self._ended: Future[str] = Future()
        """Why no call is answered any more: the controller has ended, or the session closes."""
        self._logs = folder / "log"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._pids: dict[int, int] = {}
        self._lent: dict[int, tuple[int, Path]] = {}
        """A script's processes that replace ranks, and the socket of each for questions."""
        self._awake: set[int] = set()
        """The pids of the engines that have been called: each of these reads orders."""
        self._last_reply: dict[int, Any] = {}
        self._stopped: dict[int, str | None] = {}
        """By rank, ipyparallel's name for the last engine that was stopped."""
        self._forgotten: set[int] = set()
        """The pids of the engines that the hub was asked to unregister."""
        self._forgetting = threading.Lock()
        self._views: dict[int, Any] = {}
        self._ends: dict[int, threading.Event] = {}
        """By rank, set when its newest process has ended."""
        self.controller_pid = 0
        """The controller's process, 0 before it is started."""
        self._client: Any = None

    def start(self) -> None:
        """Start the controller and connect to it."""
        with _loading:
            # ipyparallel fills a table on the first message, which is not thread-safe: sessions of
            # one process that start at once would break each other.
            uncan(can(None))
        argv = [f"--ip={own_loopback()}", *_CONTROLLER_ARGS]
        entry = "ddp_notebook.cluster.controller:controller"
        self.controller_pid = self._spawn(CONTROLLER, entry, argv, {}, [], lambda pid: None)
        # Before any engine is started: the hub publishes registrations once.
        self._client = self._connected()
        check_private_api(self._client)

    def _spawn(
        self,
        rank: int,
        entry: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        first_calls: Sequence[Any],
        begun: Callable[[int], None],
        host: int = 0,
        folder: str = "",
    ) -> int:
        """Start a child that calls `entry` with ipyparallel's arguments; return its pid.

        Raises SessionLost or OSError.
        """
        # By these variables ipyparallel finds its files, whichever part of it a child becomes.
        found_by = {"IPP_CLUSTER_ID": _CLUSTER, "IPP_PROFILE_DIR": str(self._folder)}
        try:
            own = Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser()
            there = own if own.exists() else own.parent
            writable = there.is_dir() and os.access(there, os.W_OK)
        except RuntimeError:  # no home
            writable = False
        if not writable:  # else each process would make a folder for IPython, and leave it
            found_by["IPYTHONDIR"] = str(self._folder / "ipython")
        argv = [*argv, "--work-dir=."]  # by default where ipyparallel was imported
        spec = {
            "calls": [*first_calls, [entry, {"argv": argv}]],
            "env": child_environment({**found_by, **environment}),
            "cwd": folder or str(Path.cwd()),
            "log": str(self.log_file(rank)),
            "host": host,
            "asked_at": "" if rank == CONTROLLER else str(questions_of(self._folder, rank)),
        }
        ended = self._ends[rank] = threading.Event()
        process = 0

        def begin(pid: int) -> None:
            nonlocal process
            process = pid
            begun(pid)

        # `stop` must not return before everybody knows of the end: a board that is drawn then
        # would call the rank ready. Hence first the word of it, then `ended`.
        def exited(code: int) -> None:
            try:
                if self._closing:
                    return
                if rank == CONTROLLER:
                    written = files.tail(self.log_file(CONTROLLER), 4000).strip()
                    last = f" Its last words: {written.splitlines()[-1][:200]}" if written else ""
                    self._end(f"The ipyparallel controller ended, {exit_text(code)}.{last}")
                self._on_exit(rank, process, code)
                if rank != CONTROLLER:
                    self._forget(rank, process)
            finally:
                ended.set()

        return self._fork_server.spawn(spec, exited, begin)

    def _connected(self) -> Any:
        """Return a client that is connected to the controller. Raises SessionLost."""
        client: Future[Any] = Future()

        def connect() -> None:
            try:
                security, info = self._folder / "security", None
                while info is None:
                    if self._ended.done():
                        raise self._lost()
                    time.sleep(_POLL_S)
                    # An engine's, too: there may be none before the controller has written both.
                    with contextlib.suppress(OSError, ValueError):  # not yet, or not all of it
                        json.loads((security / f"ipcontroller-{_CLUSTER}-engine.json").read_text())
                        client_file = security / f"ipcontroller-{_CLUSTER}-client.json"
                        info = json.loads(client_file.read_text())
                with magics_where_they_load():
                    timeout_s = scaled_for_load(_CONNECTED_S)
                    folders = dict.fromkeys(("profile_dir", "ipython_dir"), str(self._folder))
                    client.set_result(ipp.Client(info, timeout=timeout_s, **folders))
            except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
                client.set_exception(error)

        # On a thread of its own: it cannot be ended, and the controller may end meanwhile.
        threading.Thread(target=connect, name="ddp-connecting", daemon=True).start()
        began_s = time.monotonic()
        while not wait([client, self._ended], 1.0, FIRST_COMPLETED).done:
            waited_s = time.monotonic() - began_s
            if waited_s > scaled_for_load(_CONNECTED_S):
                raise SessionLost(
                    f"The ipyparallel controller did not answer within {waited_s:.0f} s. "
                    "Start again: %ddp_init"
                )
        if client.done() and not self._ended.done():
            try:
                return client.result()
            except (OSError, RuntimeError):
                # ipyparallel can notice the controller's exit before we do.
                if not wait([self._ended], 2.0).done:
                    raise
        raise self._lost()

    def launch(
        self,
        rank: int,
        environment: Mapping[str, str],
        first_calls: Sequence[Any],
        begun: Callable[[int], None],
        host: int = 0,
        folder: str = "",
    ) -> None:
        """Start the engine of `rank`; `begun` gets its pid, before its end is reported."""

        def begin(pid: int) -> None:
            self._pids[rank] = pid
            self._forgotten.discard(pid)  # the system reuses pids
            self._awake.discard(pid)
            begun(pid)

        self.log_file(rank).touch(mode=0o600)
        argv = [*_ENGINE_ARGS, f"--IPEngine.id={rank}"]
        self._spawn(rank, _ENGINE, argv, environment, first_calls, begin, host, folder)

    def log_file(self, rank: int) -> Path:
        """Return where a process writes what Python does not catch."""
        return self._logs / ("controller.log" if rank == CONTROLLER else f"rank-{rank}.log")

    def wait_for(self, ranks: Ranks, timeout_s: float, give_up: Callable[[], bool]) -> Ranks:
        """Wait until `ranks` are registered; returns those that are not in time."""
        began_s = time.monotonic()
        ask_again_s = time.monotonic() + _ASK_AGAIN_S
        while True:
            missing = tuple(
                rank
                for rank in sorted(ranks)
                if rank not in self._client.ids
                # Or it is still the engine that was stopped.
                or (
                    (stopped := self._stopped.get(rank)) is not None
                    and engine_name(self._client, rank) in (None, stopped)
                )
            )
            if not missing:
                return ()
            if time.monotonic() - began_s > scaled_for_load(timeout_s) or give_up():
                return missing
            if time.monotonic() > ask_again_s:
                # The hub announces an engine only once, which can be missed on a busy machine; a
                # client that connects is told of all of them.
                before, self._client = self._client, self._connected()
                # They belong to the client that made them.
                self._views.clear()
                before.close(linger=0)  # nothing is called before all ranks are there
                ask_again_s = time.monotonic() + _ASK_AGAIN_S
            time.sleep(_POLL_S)

    def call(
        self, ranks: Ranks, call: Call[Request, Answer], request: Callable[[int], Request]
    ) -> dict[int, Future[Answer]]:
        """Call ranks, each with a request of its own."""
        answers: dict[int, Future[Answer]] = {
            rank: self._apply(rank, _CALL, {"name": call.name, "request": request(rank)})
            for rank in ranks
        }
        for rank, answer in answers.items():
            to = self._pids[rank], questions_of(self._folder, rank)
            # Once it has answered, the rank has a runtime, and a socket that listens. The
            # connection is made now because a cell may remove the socket's file, and orders must
            # arrive all the same.
            answer.add_done_callback(partial(self._connect_orders, *to))
        self._last_reply.update(answers)
        self._awake.update(self._pids[rank] for rank in ranks)
        return answers

    def _connect_orders(self, pid: int, path: Path, _: object) -> None:
        self._orders.connect(pid, path)

    def tell(self, ranks: Ranks, order: Order[Request], request: Request) -> Ranks:
        """Send ranks one order, bypassing ipyparallel, whose latency exceeds a short cell's."""
        for rank in ranks:
            if self._pids[rank] not in self._awake:  # its first call makes it read orders, too
                self._awake.add(self._pids[rank])
                self._last_reply[rank] = self._apply(rank, _WAKE, {})
        to = {rank: (self._pids[rank], questions_of(self._folder, rank)) for rank in ranks}
        return self._orders.send(to, order, request)

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask ranks at their own sockets, which works even if their main threads are blocked."""
        sockets = {rank: self._socket(rank) for rank in ranks}
        return questions.ask(sockets, question, request, timeout_s)

    def can_ask(self, rank: int) -> bool:
        """True while the socket at which `rank` is asked is there."""
        return self._socket(rank).exists()

    def _socket(self, rank: int) -> Path:
        lent = self._lent.get(rank)
        return lent[1] if lent is not None else questions_of(self._folder, rank)

    def value_of(self, answer: Any, timeout_s: float) -> Any:
        """Return the result of a call. Raises UsageMistake when the rank raised, or was late."""
        try:
            return answer.get(timeout_s)
        except TimeoutError:
            raise UsageMistake(f"The rank did not answer within {timeout_s:g} s.") from None
        except (ipp.RemoteError, ipp.EngineError, ipp.TaskAborted) as error:
            raise UsageMistake(f"The rank could not answer: {error}") from None

    def push(self, ranks: Ranks, values: Mapping[str, Any], timeout_s: float) -> None:
        """Set variables on ranks. Raises UsageMistake when a rank cannot take them."""
        try:
            with self._unless_closed():
                answer = self._client[list(ranks)].push(dict(values), block=False)
            answer.get(timeout_s)
        except TimeoutError:
            raise UsageMistake(
                f"The ranks did not answer within {timeout_s:g} s, and may still take "
                f"{', '.join(values)} later. Check: %ddp_vars"
            ) from None
        except (ipp.RemoteError, ipp.EngineError, ipp.TaskAborted) as error:
            why = str(error)
            if isinstance(error, ipp.CompositeError):  # of several ranks
                why = ": ".join(error.elist[0][:2])
            elif isinstance(error, ipp.RemoteError):
                why = f"{error.ename}: {error.evalue}"
            raise UsageMistake(f"A rank cannot take {', '.join(values)}: {why}.") from None

    def _apply(self, rank: int, name: str, arguments: Mapping[str, Any]) -> Any:
        """Have `child.call` called on a rank. Raises SessionLost when the client is closed."""
        try:
            with self._unless_closed():
                if rank not in self._views:  # making one takes a while, and it stays valid
                    self._views[rank] = self._client[rank]
                return self._views[rank].apply_async(child.call, name, arguments)
        except IndexError:  # ipyparallel noticed its exit before we did
            return _NoAnswer(rank)

    @contextlib.contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """Within, an error of a closed client is SessionLost, with why it was closed."""
        try:
            yield
        except (OSError, RuntimeError):  # ipyparallel raises either
            if not self._ended.done():
                raise
            raise self._lost() from None

    def _lost(self) -> SessionLost:
        return SessionLost(f"{self._ended.result()} Start again: %ddp_init")

    def signal(self, rank: int, number: int) -> None:
        """Signal the process of `rank`, if it lives."""
        lent = self._lent.get(rank)
        if lent is not None and number == signal.SIGINT:
            # As with Ctrl-C in a terminal, a script's child processes get the signal, too.
            self._question(lent[0], "signal_group", number=number)
            return
        with contextlib.suppress(SessionLost):
            self._fork_server.signal(lent[0] if lent is not None else self._pids[rank], number)

    def stopped(self, pids: Sequence[int]) -> list[int]:
        """Return those processes that wait for SIGCONT, also on other hosts."""
        on: dict[int, list[int]] = {}
        for pid in pids:
            on.setdefault(host_of(pid), []).append(pid_of(pid))
        ask = self._fork_server.question
        answers = {host: ask(host, "stopped", pids=asked) for host, asked in on.items()}
        return [process_id(host, pid) for host, found in answers.items() for pid in found or ()]

    def process(self, pid: int) -> ProcessState:
        """Return what the system knows of a process, also on another host."""
        return ProcessState(*(self._question(pid, "process") or ()))

    def _question(self, pid: int, name: str, **arguments: Any) -> Any:
        """Ask the host of a process about it; None where the host does not answer."""
        return self._fork_server.question(host_of(pid), name, pid=pid_of(pid), **arguments)

    def lend(self, rank: int, pid: int, questions: Path) -> None:
        """Ask and signal a script's process in place of `rank`'s own."""
        self._lent = {**self._lent, rank: (pid, questions)}

    def take_back(self) -> None:
        """Ask and signal the engines again."""
        self._lent = {}

    def stop(self, rank: int) -> None:
        """Kill the process of `rank` and wait until it is gone and forgotten."""
        if rank in self._last_reply:
            # A rank reports the end of its cell before it replies; ipyparallel would print a
            # warning about a reply from an engine that was unregistered.
            self._last_reply.pop(rank).wait(0.2)
        ended = self._ends.get(rank)
        if ended is not None and not ended.is_set():
            self._fork_server.signal(self._pids[rank], signal.SIGKILL)
            # After the machine slept, the time is up before the notice of its exit is read.
            if not ended.wait(_ENDS_WITHIN_S) and not ended.wait(_ENDS_WITHIN_S):
                raise TimeoutError(f"process {self._pids[rank]} did not end")
        self._stopped[rank] = engine_name(self._client, rank)
        if rank in self._pids:
            self._forget(rank, self._pids[rank])
        self._await_forgotten(rank)

    def lost_fork_server(self) -> None:
        """Release whoever waits for the end of a process: all end with the server, unreported."""
        for ended in tuple(self._ends.values()):
            ended.set()

    def close(self) -> None:
        """Close the client; the processes end with the fork server."""
        self._closing = True
        self._end("The ranks were shut down meanwhile.")
        if self._client is not None:
            self._client.close(linger=0)
        self._orders.close()

    def _end(self, reason: str) -> None:
        """Wake all that wait for the controller."""
        with contextlib.suppress(InvalidStateError):  # another reason was set first
            self._ended.set_result(reason)

    def _forget(self, rank: int, pid: int) -> None:
        """Tell the hub to unregister an engine that is gone, so that its id is free at once.

        Once per process: the exit of a stopped engine is reported twice, and a late second request
        would unregister the engine that replaced it.
        """
        with self._forgetting:
            if pid not in self._forgotten:
                self._forgotten.add(pid)
                with contextlib.suppress(OSError, RuntimeError):  # closed: there is no hub
                    unregister(self._client, rank)

    def _await_forgotten(self, rank: int) -> None:
        """Wait until the hub confirms that the engine is gone: until then its id stays taken.

        Another thread sends the request, and a new engine can be faster than it.
        """
        deadline = time.monotonic() + scaled_for_load(_FORGOTTEN_WITHIN_S)
        if engine_name(self._client, rank) is None:
            # It may have died half registered: the hub does not report that, and its id is taken.
            with self._unless_closed():
                unregister(self._client, rank)
                answer = caught_up(self._client)
            wait([answer, self._ended], _FORGOTTEN_WITHIN_S, FIRST_COMPLETED)
        while engine_name(self._client, rank) is not None and time.monotonic() < deadline:
            if self._ended.done():
                raise self._lost()
            time.sleep(_POLL_S)
