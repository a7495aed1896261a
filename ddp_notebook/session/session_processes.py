"""Starts ranks until they accept calls, starts the stores, and ends both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.cluster.cluster import CONTROLLER, IPyParallelCluster
from ddp_notebook.cluster.rank_cluster import RankCluster
from ddp_notebook.errors import SessionLost, SetupFailed
from ddp_notebook.launch.addresses import why_no_loopback
from ddp_notebook.launch.called_process import CalledProcess
from ddp_notebook.launch.devices import DevicePlan
from ddp_notebook.launch.environment import rank_environment
from ddp_notebook.launch.hosts_client import HostsClient, ProcessStarter
from ddp_notebook.launch.lab_hosts import LabHosts, Placed
from ddp_notebook.launch.process_groups import end_sessions
from ddp_notebook.launch.process_ids import host_of, pid_of
from ddp_notebook.launch.session_folder import make_folder, remove_shared_memory
from ddp_notebook.model import (
    SESSION,
    Category,
    Diagnosis,
    Event,
    Finding,
    Loading,
    RankExited,
    Ranks,
    RankSpawned,
    Status,
    StoreFailed,
    StoreOpened,
    agree,
    exit_text,
    format_ranks,
    name_ranks,
)
from ddp_notebook.rank.rank_process import multiprocessing_folder, questions_of
from ddp_notebook.session.collective_logs import CollectiveLogs
from ddp_notebook.session.far_hosts import FarHosts, reach
from ddp_notebook.session.interrupts import deferred, noted
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.places import Places
from ddp_notebook.session.record import Record
from ddp_notebook.session.script_processes import ScriptProcesses
from ddp_notebook.session.unresponsive import MemoryKills, StoppedRanks, deaths, keep_awake


class StoreProcess(CalledProcess):
    """A process that hosts one TCPStore at `address` (port 0: the system chooses)."""

    def __init__(
        self,
        fork_server: ProcessStarter,
        receiver: EventReceiver,
        record: Record,
        folder: Path,
        address: tuple[str, int],
        on: int,
        current_folder: str,
    ) -> None:
        """Start it on the host numbered `on`. Raises as `ForkServerClient.spawn`."""
        self._record = record
        self._answers: list[StoreOpened | StoreFailed] = []
        # Before the process is started: it may answer before its pid is known here. So each store's
        # answer is kept, and `_own_answer` picks the one of this pid.
        self._unsubscribe = record.subscribe(self._watch)
        receiver.expect_from_start(SESSION)
        host, port = address
        arguments = {"url": receiver.url, "source": receiver.source, "host": host, "port": port}
        entry = "ddp_notebook.rank.setup.store_process:main"
        log = folder / "store.log"
        changed = partial(record.add, ())
        super().__init__(fork_server, entry, arguments, log, changed, on, current_folder)

    def address(self, timeout_s: float) -> tuple[str, int]:
        """Wait until it listens; its address. Raises SetupFailed."""
        self._record.wait_for(lambda: bool(self._own_answer()) or not self.alive, timeout_s)
        # A process that cannot listen reports why and exits; its report may arrive after its exit.
        self._record.wait_for(lambda: self._own_answer() is not None, 1.0)
        answer = self._own_answer()
        if answer is None:
            self._record.check_not_lost()
        else:
            self._unsubscribe()  # it says nothing more, and the session may end without closing it
        if isinstance(answer, StoreOpened):
            return answer.host, answer.port
        if answer is None:
            raise SetupFailed("The store did not open in time. Try again: %ddp_init")
        category = Category(answer.category or Category.ENV_INVALID)
        finding = Finding(category, (), answer.cause.rstrip("."), answer.remedy)
        raise SetupFailed(
            f"{answer.cause}\n  Fix: {answer.remedy}", diagnosis=Diagnosis((finding,))
        )

    def close(self) -> None:
        """End the process; returns when its port is free."""
        self._unsubscribe()
        self.kill()

    def _own_answer(self) -> StoreOpened | StoreFailed | None:
        return next((event for event in self._answers if event.pid == self.pid), None)

    def _watch(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, (StoreOpened, StoreFailed)):
                self._answers.append(event)


_EVENTS = "events.sock"
_CONNECTION = "security/ipcontroller-ddp-engine.json"
"""The controller writes it; an engine finds the controller by it."""


class Processes:
    """Everything that runs for one session, and its end.

    `on_lost(reason)` is called, from any thread, when the session cannot go on.
    """

    far: FarHosts | None = None
    """The hosts that ranks are on; None where that is this machine."""

    def __init__(
        self,
        options: InitOptions,
        devices: DevicePlan,
        fork_server: ProcessStarter,
        record: Record,
        on_lost: Callable[[str], None],
    ) -> None:
        self.options = options
        self.devices = devices
        self.record = record
        self._held = make_folder()
        self.folder = self._held.path
        self.fork_server = fork_server
        self._on_lost = on_lost
        self._started_s = time.time()
        self.script: ScriptProcesses | None = None
        """The processes of the last script, until something else runs."""
        self._stores: dict[str, StoreProcess] = {}
        """The last store of the session, and the last one of a script."""
        self._lab: LabHosts | None = None
        self._closing = False
        self._earlier_bytes: dict[int, int] = {}
        """Per rank, the part of its log that an earlier run or process wrote."""
        self._memory_kills = MemoryKills(fork_server)
        with contextlib.ExitStack() as undo:  # nothing is left where the rest cannot be made
            undo.callback(self._held.remove)
            fork_server.own(self.folder)
            self.output_folder.mkdir(mode=0o700)
            self.logs = CollectiveLogs(self.output_folder)
            """The collective logs of the ranks."""
            self.receiver = EventReceiver(self.folder, record.hear)
            undo.callback(self.receiver.close)
            self.cluster: RankCluster = IPyParallelCluster(fork_server, self.folder, self._exited)
            fork_server.on_lost(self._fork_server_lost)
            undo.pop_all()
        self._end_watch = keep_awake(self._serving, self._wake, self.cluster.stopped)

    @property
    def places(self) -> Places:
        """The properties of each rank's place."""
        return Places(self.options, self.devices, self.fork_server, self.far, self.folder)

    @property
    def output_folder(self) -> Path:
        """Where ranks put output that is too long to send."""
        return self.folder / "output"

    def log_file(self, rank: int) -> Path:
        """Return the file behind a rank's own stdout and stderr."""
        return self.folder / "log" / f"rank-{rank}.log"

    def output_file(self, rank: int, cell: int) -> Path:
        """Return where `rank` puts what it writes in `cell`, once that is too long to send."""
        return self.output_folder / f"rank-{rank}-cell-{cell}.txt"

    # -- bringing up -------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and return when the ranks accept calls. Raises SetupFailed, SessionLost.

        What needs no torch is started while the fork server still loads it.
        """
        _need_current_folder()
        if why := why_no_loopback():
            raise SetupFailed(why)
        # The controller needs no torch, and takes as long to start as torch takes to load: the fork
        # server forks it between two imports. All else is forked from the loaded server.
        if not self.fork_server.ready.done():
            self.record.note(loading=Loading(time.monotonic_ns()))
        self.fork_server.ready.add_done_callback(self._loaded)
        self.cluster.start()
        if isinstance(self.fork_server, HostsClient):
            self.far = reach(self.fork_server, self.options, self.folder, self.record)
            self.devices = self.far.devices
            self.logs.clock_offsets_ns = self.far.clock_offsets_ns
        try:
            self.fork_server.result_of(self.fork_server.ready, self.options.timeout_s)
        except TimeoutError:
            raise SetupFailed(
                "The process that loads torch (fork server) has done nothing for "
                f"{self.options.timeout_s:g} s: a disk or network drive may not answer."
            ) from None
        if self.options.init_method != "file":
            self.open_store()
        self.launch(tuple(range(self.options.world_size)))

    def _loaded(self, _ready: object) -> None:
        """Report that the fork server has loaded torch, or is gone (any thread)."""
        if self.record.snapshot.loading is not None:
            self.record.note(loading=None)

    def launch(self, ranks: Ranks) -> None:
        """Start the processes of `ranks` and wait until they accept calls.

        Raises SetupFailed, and KeyboardInterrupt, after which `ranks` have no process.
        """
        options, placement, places = self.options, self.options.placement, self.places
        stopped = StoppedRanks(lambda: self.record.snapshot.ranks, self.cluster.stopped)
        with noted() as interrupted:

            def hopeless() -> bool:
                dead = {*self.record.snapshot.with_status(Status.DEAD)}.intersection(ranks)
                return any([interrupted(), self._closing, dead, stopped.among(ranks)])

            for rank in ranks:
                extra = {**self.devices.environment[rank], **places.variables(rank)}
                environment = rank_environment(rank, placement, places.threads(rank), extra)
                light = {
                    "rank": rank,
                    "events": self.receiver.url,
                    "source": self.receiver.source,
                    "log": str(self.log_file(rank)),
                    "output_folder": str(self.output_folder),
                }
                # The log is the rank's and not the process's: what a process before wrote stays in
                # it for the user, and must not be told as the last words of this one.
                self.receiver.expect_from_start(rank)
                self.begin_last_words((rank,))
                boot = [["ddp_notebook.rank.boot:start", light]]
                begun, host = partial(self._begun, rank), placement.host(rank)
                folder = places.folder_on(host)
                self.cluster.launch(rank, environment, boot, begun, host, folder)
            missing = self.cluster.wait_for(ranks, options.timeout_s + 30.0, hopeless)
            if interrupted():
                # A process that nobody waits for could register as an engine at any time later,
                # and would be a rank that has no group. Ended, they are simply dead ranks, which
                # every verb knows how to treat.
                for rank in ranks:
                    self.cluster.stop(rank)
                raise KeyboardInterrupt
        if not missing:
            return
        self.record.check_not_lost()
        lines = deaths(self.record.snapshot)
        for rank, why in stopped.among(missing).items():
            lines.append(f"Rank {rank} did not start: {why}.")
        raise SetupFailed(
            "\n".join(lines or [f"{name_ranks(missing).capitalize()} did not start."])
        )

    def replace(self, ranks: Ranks) -> None:
        """End the processes of `ranks` and launch new ones. Raises SetupFailed."""
        if self.script is not None:
            self.script.kill(ranks)
        elif ranks:
            with self.record.restarting(ranks):
                self.stop(ranks)
                self.launch(ranks)

    def why_not_kept(self, options: InitOptions) -> str:
        """Return why no rank could have `options` in its process; empty when some can."""
        if other := options.other_kind(self.options):
            return f"{' and '.join(other)} changes what a process is"
        if options.hosts and options.world_size != self.options.world_size:
            return "another number of ranks has each on another host"
        if not self.fork_server.equals_a_new_one():
            return "packages, files, the environment or the module path have changed"
        if self.folder_gone or not self.output_folder.exists():
            return "the session's temporary folder, or files in it, were removed"
        return ""

    def adopt(self, options: InitOptions) -> None:
        """Continue with new options; the store moves if they name another address."""
        moved = not options.same_store(self.options)
        self.options = options
        if moved and options.init_method != "file":
            self.open_store()

    def resize(self, ranks: Ranks, devices: DevicePlan) -> None:
        """As many ranks as the options say: `ranks` stay, others are new. Raises SetupFailed."""
        self.devices = devices
        everyone = range(self.options.world_size)
        self.record.resize(self.options.world_size, backend=devices.backend)
        self.launch(tuple(rank for rank in everyone if rank not in ranks))

    def _begun(self, rank: int, pid: int) -> None:
        # Before its end can be told, which the record would take for that of an earlier process.
        label, now_ns = self.devices.labels[rank], time.monotonic_ns()
        self.record.hear((RankSpawned(rank=rank, pid=pid, device=label, heard_ns=now_ns),))

    # -- the store ---------------------------------------------------------------------

    def open_store(self, of: str = "session") -> None:
        """Have the store of the session or of a script listen; its earlier one is closed.

        The session's store listens where the options say, a script's at a free port.
        """
        if of in self._stores:
            self._stores[of].close()
        self._need_folder("No store can be opened.")
        address = self.places.master_addr, self.options.master_port if of == "session" else 0
        host = self.options.placement.hosts[0]
        opened = StoreProcess(
            self.fork_server,
            self.receiver,
            self.record,
            self.folder,
            address,
            host,
            self.places.folder_on(host),
        )
        self._stores = {**self._stores, of: opened}  # another thread may look at the one before

    def store_address(self) -> tuple[str, int]:
        """Where the store listens; opens it again when its process is gone. Raises SetupFailed."""
        if not self.store_alive:
            self.open_store()
        return self._stores["session"].address(self.options.timeout_s)

    def fresh_store(self) -> tuple[str, int]:
        """The address of an empty store for a script: its keys would clash with the last run's."""
        self.open_store("script")
        return self._stores["script"].address(self.options.timeout_s)

    def _living_stores(self) -> dict[str, int]:
        """Return the pid of each store process that runs, by whose store it is."""
        return {of: store.pid for of, store in self._stores.items() if store.alive}

    @property
    def store_pid(self) -> int:
        """The process that hosts the session's store; 0 if no process does."""
        return self._living_stores().get("session", 0)

    @property
    def store_alive(self) -> bool:
        """True while the session's store can be reached."""
        return "session" in self._living_stores()

    @property
    def script_store_alive(self) -> bool:
        """True while the last script's store can be reached."""
        return "script" in self._living_stores()

    # -- scripts -----------------------------------------------------------------------

    def open_script(self, cell: int, ranks: Ranks) -> ScriptProcesses:
        """Processes for a script in place of `ranks`; the last script's processes have ended."""
        self._need_folder("No script can be started.")
        self.script = ScriptProcesses(
            self.fork_server,
            self.options.placement,
            self.record,
            self.cluster,
            self.logs,
            self.receiver,
            self.folder / f"script-{cell}",
            self.output_folder,
            ranks,
        )
        return self.script

    def end_script(self) -> None:
        """End what is left of the last script, if there is anything, and the lab's hosts."""
        script, self.script = self.script, None
        if script is not None:
            script.end()
        self.close_lab()

    # -- the lab's hosts ---------------------------------------------------------------

    def open_lab(self, names: tuple[str, ...], drops: str, port: int) -> Placed:
        """Put the ranks of the next script on two hosts. Raises UsageMistake."""
        self.end_script()
        self._lab = LabHosts(self.fork_server, self.folder, names, drops, port)
        return self._lab.place(self.options.world_size)

    def close_lab(self) -> None:
        """Release the lab's hosts, if there are any."""
        lab, self._lab = self._lab, None
        if lab is not None:
            lab.close()

    # -- what serves the ranks ---------------------------------------------------------

    def _serving(self) -> dict[int, str]:
        return {
            self.fork_server.pid: "fork server",
            self.cluster.controller_pid: "ipyparallel controller",
            **dict.fromkeys(self._living_stores().values(), "store's process"),
        }

    def _wake(self, pid: int, name: str) -> None:
        if pid == self.fork_server.pid:
            self.fork_server.wake()
        else:
            self.fork_server.signal(pid, signal.SIGCONT)
        note = (
            f"The {name} (pid {pid_of(pid)}) was stopped, by kill -STOP or a debugger. It was sent "
            "SIGCONT: without it nothing answers."
        )
        if note not in (notes := self.record.snapshot.notes):
            self.record.note(notes=(*notes, note))

    # -- the end -----------------------------------------------------------------------

    def stop(self, ranks: Ranks) -> None:
        """End the processes of `ranks`, to be launched again.

        Raises SetupFailed if the session's folder was removed: new processes could not send events;
        or if a host is silent, which could start none.
        """
        self._need_folder("No rank was ended.")
        self.places.need_heard(ranks)
        self.end_script()
        with deferred():
            for rank in ranks:
                self.cluster.stop(rank)

    @property
    def folder_gone(self) -> str:
        """Says that the session's folder, or what ranks need there, was removed; empty if not so.

        Empty also once the session ends, which removes it.
        """
        if self._closing:
            return ""
        folder, cleaner = self.folder, "perhaps one that cleans temporary files."
        if not self._held.is_there:
            return (
                f"The session's temporary folder {folder} is gone: another program removed or "
                f"renamed it, {cleaner} Ranks cannot be asked any more."
            )
        if not os.access(folder, os.W_OK):
            return (
                f"The session's temporary folder {folder} cannot be written to any more, as on a "
                "file system that became read-only. No rank can be started there."
            )
        if not (folder / _EVENTS).exists():
            return (
                f"A file of the session is gone from {folder} ({_EVENTS}): another program "
                f"removed it, {cleaner} No rank can be started there any more."
            )
        started = any(state.stage is not None for state in self.record.snapshot.ranks)
        if started and not (folder / _CONNECTION).exists():
            return (
                "The file by which ranks find the ipyparallel controller is gone "
                f"({_CONNECTION} in {folder}). The controller removes it when it is told to end, "
                f"as by SIGTERM; or something else did, {cleaner} No rank can be started there any "
                "more."
            )
        return ""

    @property
    def unasked(self) -> str:
        """Says which ranks cannot be asked, as their sockets were removed; empty if not so."""
        if self._closing or self.script is not None:
            return ""
        # Past setup ranks answer questions.
        past = self.record.snapshot.with_status(Status.READY, Status.RUNNING)
        sockets = {rank: questions_of(self.folder, rank) for rank in past}
        ranks = tuple(rank for rank, socket in sockets.items() if not socket.exists())
        if not ranks:
            return ""
        return (
            f"{name_ranks(ranks).capitalize()} cannot be asked: another program removed "
            f"{', '.join(sockets[rank].name for rank in ranks)} from {self.folder}, perhaps one "
            f"that cleans temporary files. So what {agree(ranks, 'it does', 'they do')} is not "
            f"known. New processes can be asked: %ddp_restart --ranks {format_ranks(ranks)}"
        )

    def _need_folder(self, meanwhile: str) -> None:
        _need_current_folder(meanwhile)
        if self._closing:
            self.record.check_not_lost()
            raise SessionLost("The ranks were shut down. Start again: %ddp_init")
        if gone := self.folder_gone:
            raise SetupFailed(f"{gone} {meanwhile} Start again: %ddp_init --replace")

    def close(self, keep_warm: bool) -> bool:
        """End everything; returns when no process is left.

        With `keep_warm` the fork server stays for other ranks; returns True if it does.
        """
        if self._closing:
            return False
        self._closing = True
        # The client first, so that no thread waits for an answer of a process that is ended next.
        # Then the processes; and only when none is left, what they use: the socket of events, the
        # mapped logs, and the folder with all of it, of which a live process would make new files.
        self.cluster.close()
        stays = keep_warm and self.fork_server.reset()
        if not stays:
            self.fork_server.close()
        self._end_watch()
        self.receiver.close()
        self.logs.close()
        self._held.remove()
        return stays

    def _exited(self, rank: int, pid: int, code: int) -> None:
        """A process ended (on the fork server client's thread)."""
        if self._closing:
            return
        if rank == CONTROLLER:
            self._on_lost(f"The ipyparallel controller (pid {pid}) ended, {exit_text(code)}.")
            return
        # Only in the folder that this session has made: at its path may be another one by now.
        if self._held.is_there and not host_of(pid):  # on other hosts their agents do that
            # What the process made for itself alone: a new one makes its own.
            shutil.rmtree(multiprocessing_folder(self.folder, pid), ignore_errors=True)
            for path in self.output_folder.glob(f"*-{pid}-*"):
                path.unlink(missing_ok=True)
        earlier = self._earlier_bytes.get(rank, 0)
        exited = RankExited(
            rank=rank,
            pid=pid,
            exit_code=code,
            last_words=files.tail(self.log_file(rank), 4000, earlier),
            peak_bytes=self.fork_server.peak_bytes.get(pid, 0),
            oom_kills=self._memory_kills.since(host_of(pid)),
            heard_ns=time.monotonic_ns(),
        )
        self.record.hear((exited,))

    def begin_last_words(self, ranks: Ranks) -> None:
        """A new run begins on these ranks: what their logs hold so far is not its output.

        Processes that the kernel has killed so far do not count for it either.
        """
        self._memory_kills.begin(self.options.placement)
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._earlier_bytes[rank] = self.log_file(rank).stat().st_size

    def _fork_server_lost(self) -> None:
        # First of all: who waits for the end of one of its children would wait in vain.
        self.cluster.lost_fork_server()
        if self._closing:
            return
        # Nobody is left to tell which rank ended how, so the session as a whole is lost.
        # The kernel kills its children with it (PR_SET_PDEATHSIG), but not what they started.
        own = (s.pid for s in self.record.snapshot.ranks if s.pid and not host_of(s.pid))
        end_sessions(own)
        remove_shared_memory((str(self.folder),), self._started_s, wait_s=1.0)
        self._on_lost("The fork server that started the ranks ended.")


def _need_current_folder(meanwhile: str = "") -> None:
    """Raises SetupFailed where processes would have to start in a folder that is gone."""
    if files.current_folder_is_gone():
        gone = "The notebook's current folder was removed, so that no process can start in it."
        parts = (gone, meanwhile, "Go to another one: %cd ~")
        raise SetupFailed(" ".join(filter(None, parts)))
