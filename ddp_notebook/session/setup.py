"""From nothing to a verified process group: the processes, the store, the stages."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from ddp_notebook.analysis.board import exit_text
from ddp_notebook.cluster import (
    CONTROLLER,
    IPyParallelCluster,
    RankCluster,
    loopback_interface,
    rank_environment,
)
from ddp_notebook.errors import SessionLost, SetupFailed
from ddp_notebook.launch.client import ForkServerClient
from ddp_notebook.launch.devices import DevicePlan
from ddp_notebook.launch.forkserver import end_sessions
from ddp_notebook.launch.launchers import child_environment
from ddp_notebook.listener import Listener
from ddp_notebook.model import (
    SESSION,
    Event,
    RankExited,
    Ranks,
    RankSpawned,
    Stage,
    StageFailed,
    Status,
    StoreFailed,
    StoreOpened,
    name_ranks,
)
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.record import Record

FOLDER_PREFIX = "ddp_notebook-"
_LAST_WORDS_BYTES = 4000
_REGISTER_GRACE_S = 30.0


class Processes:
    """Everything that runs for one session, and the bring-up of its process group.

    `on_lost(reason)` is called, from any thread, when the session cannot go on.
    """

    def __init__(
        self,
        options: InitOptions,
        devices: DevicePlan,
        fork_server: ForkServerClient,
        record: Record,
        on_lost: Callable[[str], None],
    ) -> None:
        self.options = options
        self.devices = devices
        self.record = record
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.fork_server = fork_server
        self.generation = 0
        self._on_lost = on_lost
        self._store: StoreOpened | None = None
        self._store_failure: StoreFailed | None = None
        self._keeper_pid = 0
        self._closing = False
        fork_server.own(str(self.folder))
        (self.folder / "owner").write_text(_owner(fork_server.pid))
        self.spool.mkdir(mode=0o700)
        self.listener = Listener(self.folder, record.add)
        self._unsubscribe = record.subscribe(self._watch_store)
        self.cluster: RankCluster = IPyParallelCluster(
            fork_server, self.folder, self._exited, options.world_size
        )
        fork_server.on_lost(self._fork_server_lost)

    @property
    def spool(self) -> Path:
        """Where ranks put output that is too long to send."""
        return self.folder / "spool"

    def log_file(self, rank: int) -> Path:
        """The file behind a rank's own stdout and stderr."""
        return self.folder / "log" / f"rank-{rank}.log"

    # -- bringing up -------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and bring the process group up. Raises SetupFailed, SessionLost.

        What needs no torch is started while the fork server still loads it.
        """
        self.cluster.start()
        self._await_torch()
        self._open_store()
        everyone = tuple(range(self.options.world_size))
        self.launch(everyone)
        self.bring_up()

    def _await_torch(self) -> None:
        """Wait until the fork server has torch loaded, and say so on the board meanwhile."""
        notes = self.record.snapshot.notes
        if not self.fork_server.ready.done():
            self.record.note(notes=("Loading torch, once for all ranks: a few seconds.", *notes))
        try:
            self.fork_server.ready.result(self.options.timeout_s + 60)
        except TimeoutError:
            raise SetupFailed(
                "The fork server that starts ranks did not get ready: is the machine very busy?"
            ) from None
        self.record.note(notes=notes)

    def launch(self, ranks: Ranks) -> None:
        """Start the processes of `ranks` and wait until they take calls. Raises SetupFailed."""
        for rank in ranks:
            self._launch_one(rank)
        missing = self.cluster.wait_for(
            ranks, self.options.timeout_s + _REGISTER_GRACE_S, lambda: self._any_dead(ranks)
        )
        if missing:
            raise SetupFailed(self._why_not_up(missing, "did not start"))

    def _launch_one(self, rank: int) -> None:
        options = self.options
        extra = dict(self.devices.environment[rank])
        if options.master_addr in ("127.0.0.1", "localhost", "::1"):
            interface = loopback_interface()
            if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
                extra["GLOO_SOCKET_IFNAME"] = interface
        if options.init_method == "env" and self._store is not None:
            extra["MASTER_ADDR"] = self._store.host
            extra["MASTER_PORT"] = str(self._store.port)
        environment = rank_environment(rank, options.world_size, options.threads, extra)
        light = {
            "rank": rank,
            "url": self.listener.url,
            "key": self.listener.key,
            "log": str(self.log_file(rank)),
            "spool": str(self.spool),
        }
        self.listener.expect_from_start(rank)
        pid = self.cluster.launch(rank, environment, [["ddp_notebook.agent.boot:start", light]])
        label = self.devices.labels[rank]
        self._say(RankSpawned(rank=rank, pid=pid, device=label, heard_ns=time.monotonic_ns()))

    def bring_up(self) -> None:
        """Take all ranks through the stages, under a fresh prefix of the store.

        Returns when every rank has verified its all_reduce. Raises SetupFailed.
        """
        self.generation += 1
        host, port = self._store_address()
        self.record.note(
            generation=self.generation,
            backend=self.devices.backend,
            init_method=self._init_method_text(host, port),
        )
        everyone = tuple(range(self.options.world_size))
        plan = {
            "world_size": self.options.world_size,
            "backend": self.devices.backend,
            "device": self.devices.device,
            "init_method": self.options.init_method,
            "master_addr": host,
            "master_port": port,
            "store_path": str(self.folder / f"rendezvous-{self.generation}"),
            "generation": self.generation,
            "timeout_s": self.options.timeout_s,
            "threads": self.options.threads,
        }
        answers = self.cluster.call(
            everyone, "ddp_notebook.agent.stages:bring_up", lambda r: {"plan": {**plan, "rank": r}}
        )
        self._await_stages(everyone, answers)

    def _await_stages(self, everyone: Ranks, answers: dict[int, Future[Any]]) -> None:
        def decided() -> bool:
            statuses = {state.status for state in self.record.snapshot.ranks}
            return statuses == {Status.READY} or bool(statuses & {Status.FAILED, Status.DEAD})

        # The ranks keep the time of each stage; this is for a rank that cannot even do that.
        deadline = time.monotonic() + 2 * self.options.timeout_s + 5
        while not self.record.wait_for(decided, 0.25):
            self._report_crashed_calls(answers)
            if time.monotonic() > deadline:
                break
        snapshot = self.record.snapshot
        if snapshot.ready:
            return
        if snapshot.ended:
            raise SessionLost(f"{snapshot.ended} Start again: %ddp_init")
        raise SetupFailed(self._why_not_up(everyone, "did not finish set-up"))

    def _report_crashed_calls(self, answers: dict[int, Future[Any]]) -> None:
        """A bring-up that raised where no stage could catch it still names its rank."""
        states = self.record.snapshot.ranks
        for rank, answer in answers.items():
            if answer.done() and states[rank].status not in (Status.READY, Status.FAILED):
                error = getattr(answer, "exception", lambda: None)()
                if error is not None:
                    self._say(
                        StageFailed(
                            rank=rank,
                            stage=states[rank].entering or Stage.ENVIRONMENT,
                            cause=str(error)[:500],
                            remedy=f"The rank's log says more: %ddp_output --ranks {rank} --log",
                        )
                    )

    def _why_not_up(self, ranks: Ranks, what: str) -> str:
        """Which rank failed at which stage, why, and what to do; then who waits for it."""
        snapshot = self.record.snapshot
        lines, culprits = [], []
        for state in snapshot.ranks:
            if state.status is Status.DEAD:
                stage = state.entering or state.stage or Stage.LAUNCHED
                words = state.last_words.strip().splitlines()
                said = f" Last words: {words[-1].strip()}" if words else ""
                lines.append(
                    f"Rank {state.rank} died in stage {stage.value}, "
                    f"{exit_text(state.exit_code or 0)}.{said}"
                )
                culprits.append(state.rank)
            elif state.status is Status.FAILED and state.entering is not None:
                lines.append(
                    f"Rank {state.rank} failed in stage {state.entering.value}: {state.cause}\n"
                    f"  What to do: {state.remedy}"
                )
                culprits.append(state.rank)
        waiting = [
            r for r in ranks if r not in culprits and snapshot.ranks[r].status is not Status.READY
        ]
        if waiting:
            where = snapshot.ranks[waiting[0]]
            stage = where.entering or where.stage or Stage.LAUNCHED
            verb = "waited" if culprits else what
            lines.append(f"{name_ranks(waiting).capitalize()} {verb} in stage {stage.value}.")
        return "\n".join(lines)

    def _any_dead(self, ranks: Ranks) -> bool:
        states = self.record.snapshot.ranks
        return self._closing or any(states[rank].status is Status.DEAD for rank in ranks)

    # -- the store ---------------------------------------------------------------------

    def _open_store(self) -> None:
        if self.options.init_method == "file":
            return
        self._store = self._store_failure = None
        self.listener.expect_from_start(SESSION)
        arguments = {
            "url": self.listener.url,
            "key": self.listener.key,
            "host": self.options.master_addr,
            "port": self.options.master_port,
        }
        spec = {
            "calls": [["ddp_notebook.agent.keeper:main", arguments]],
            "env": child_environment({}),
            "cwd": str(Path.cwd()),
            "log": str(self.folder / "keeper.log"),
        }
        self._keeper_pid = self.fork_server.spawn(spec, self._keeper_exited)

    def _keeper_exited(self, code: int) -> None:
        self._keeper_pid = 0
        self.record.add(())

    def _watch_store(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StoreOpened):
                self._store = event
            elif isinstance(event, StoreFailed):
                self._store_failure = event

    def _store_address(self) -> tuple[str, int]:
        """Where the store listens; opens it again when its keeper is gone. Raises SetupFailed."""
        if self.options.init_method == "file":
            return "", 0
        if not self._keeper_pid and self._store is not None:
            self._open_store()
        self.record.wait_for(
            lambda: bool(self._store or self._store_failure or not self._keeper_pid),
            self.options.timeout_s,
        )
        if self._store is not None:
            return self._store.host, self._store.port
        # The keeper says why and ends; its words may come after the news of its end.
        self.record.wait_for(lambda: self._store_failure is not None, 1.0)
        failure = self._store_failure
        if failure is None:
            raise SetupFailed("The store did not open in time. Try again: %ddp_init")
        raise SetupFailed(f"{failure.cause}\n  What to do: {failure.remedy}")

    def _init_method_text(self, host: str, port: int) -> str:
        if self.options.init_method == "file":
            return f"file://{self.folder / f'rendezvous-{self.generation}'}"
        scheme = "tcp" if self.options.init_method == "tcp" else "env"
        return f"{scheme}://{host}:{port}"

    # -- the end -----------------------------------------------------------------------

    def stop(self, ranks: Ranks) -> None:
        """End the processes of `ranks`."""
        for rank in ranks:
            self.cluster.stop(rank)

    def close(self) -> None:
        """End everything; returns when nothing of it is left."""
        if self._closing:
            return
        self._closing = True
        self._unsubscribe()
        self.cluster.close()
        self.fork_server.close()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _say(self, event: Event) -> None:
        self.record.add((event,))

    def _exited(self, rank: int, pid: int, code: int) -> None:
        """A process ended (on the fork server client's thread)."""
        if self._closing:
            return
        if rank == CONTROLLER:
            self._on_lost(f"The ipyparallel controller (pid {pid}) ended, {exit_text(code)}.")
            return
        words = self._log_tail(rank)
        self._say(
            RankExited(
                rank=rank, pid=pid, exit_code=code, last_words=words, heard_ns=time.monotonic_ns()
            )
        )

    def _log_tail(self, rank: int) -> str:
        with contextlib.suppress(OSError), self.log_file(rank).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _LAST_WORDS_BYTES))
            return log.read().decode("utf-8", "replace")
        return ""

    def _fork_server_lost(self) -> None:
        if self._closing:
            return
        # Its children were told by the kernel to die with it; what they started was not.
        end_sessions(state.pid for state in self.record.snapshot.ranks if state.pid)
        self._on_lost("The fork server that held the ranks ended.")


def sweep_stale_folders() -> None:
    """Remove folders of sessions whose notebook and fork server were both killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder / "owner"
        with contextlib.suppress(OSError, ValueError):
            if not _alive(owner.read_text()):
                shutil.rmtree(folder, ignore_errors=True)


def _owner(pid: int) -> str:
    """A process, told apart from a later one with the same number."""
    return f"{pid} {psutil.Process(pid).create_time()}"


def _alive(owner: str) -> bool:
    pid = int(owner.split()[0])
    try:
        process = psutil.Process(pid)
        return _owner(pid) == owner and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
