"""Owns the session's processes: the warm fork server, the ranks, their shutdown."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.errors import NoSession, SessionLost, UsageMistake
from ddp_notebook.launch.client import ForkServerClient, can_fork
from ddp_notebook.launch.devices import (
    DevicePlan,
    Gpu,
    gpus,
    plan_devices,
    torch_is_for_gpus,
    visible_gpus,
)
from ddp_notebook.launch.hosts_client import HostsClient, ProcessStarter
from ddp_notebook.launch.session_folder import sweep_stale_folders
from ddp_notebook.session.interrupts import noted

if TYPE_CHECKING:
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.session_processes import Processes


class RankPool:
    """The processes of a session: none yet, running, or lost. Thread-safe."""

    def __init__(self, record: Record) -> None:
        self.processes: Processes | None = None
        """The session's processes; None while there are no ranks."""
        self.fork_server: ForkServerClient | None = None
        """The idle fork server for the next ranks; one that has ranks belongs to `processes`."""
        self.lost_reason = ""
        """Why the session was lost; empty if it was not."""
        self._record = record
        self.before_close: Callable[[str], None] = lambda reason: None
        """Called with the reason before processes end, so that waiters can return."""
        self._gpus: tuple[Gpu, ...] | None = None
        self._lock = threading.Lock()
        self._begun: object = None
        """Stands for the present processes: a loss of earlier ones, known late, is no one's."""
        self._owner_pid = os.getpid()

    def need(self, verb: str) -> Processes:
        """Return the processes, for `verb` to work on. Raises NoSession, SessionLost."""
        if self.lost_reason:
            raise SessionLost(f"{self.lost_reason} Start again: %ddp_init")
        if self.processes is None:
            raise NoSession(verb)
        return self.processes

    @property
    def logs(self) -> CollectiveLogs | None:
        """The ranks' collective logs; None while there are no ranks."""
        return self.processes.logs if self.processes is not None else None

    # -- starting ------------------------------------------------------------------------

    def warm(self) -> None:
        """Start the fork server in the background, so that torch is loaded when `init` runs."""

        def work() -> None:
            try:
                _processes_class()  # imported now, where nothing waits for it
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise
                return  # Python is ending: nothing can be imported any more, nor is it needed
            sweep_stale_folders()  # of sessions whose notebook and fork server were both killed
            self._gpus = gpus()

        if can_fork():
            self.warm_fork_server("fork")
        # Start after %load_ext has returned: the two threads would compete for the GIL.
        warming = threading.Timer(0.1, work)
        warming.name, warming.daemon = "ddp-warm", True
        warming.start()

    def warm_fork_server(self, mode: str) -> ForkServerClient:
        """Return a fork server that loads torch or has it loaded, for the next start."""
        with self._lock:
            warm = self.fork_server
            if warm is not None and not (
                warm.alive and warm.mode == mode and warm.equals_a_new_one()
            ):
                warm.close()
                warm = None
            if warm is None:
                warm = self.fork_server = ForkServerClient(mode)
            return warm

    def plan(self, options: InitOptions) -> DevicePlan:
        """Plan which rank gets which device. Raises UsageMistake when there are too few.

        On other hosts that is planned anew once they are there: see `far_hosts.py`.
        """
        if options.hosts:
            return plan_devices(options.world_size, "cpu", "gloo", (), ())
        return plan_devices(
            options.world_size,
            options.device,
            options.backend,
            options.gpus,
            visible_gpus(self._gpus),
            share_gpu=options.share_gpu,
            for_gpus=torch_is_for_gpus(),
        )

    def open(self, options: InitOptions, devices: DevicePlan, mode: str) -> Processes:
        """Make the processes for new ranks, yet to be started. Raises OSError, DDPError."""
        local = self.warm_fork_server(mode)
        self.fork_server = None  # now owned by `processes`
        fork_server: ProcessStarter = local
        if options.hosts:
            fork_server = HostsClient(
                local,
                options.hosts,
                python=options.python,
                folder=options.folder,
                give_up_after_s=options.give_up_after_s,
            )
        # Anew for each start. What notices a loss runs on threads of its own and may come late: by
        # then other processes may be there, which a reason of earlier ones must not end.
        self._begun = begun = object()
        lose = partial(self._lose, begun)
        loaded: Future[type[Processes]] = Future()

        # In a thread: an interrupted import can leave Python's module lock held.
        def load() -> None:
            try:
                loaded.set_result(_processes_class())
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                loaded.set_exception(error)

        try:
            threading.Thread(target=load, name="ddp-load", daemon=True).start()
            made = loaded.result()(options, devices, fork_server, self._record, lose)
        except BaseException:
            fork_server.close()
            raise
        self.processes = made
        return made

    # -- ending --------------------------------------------------------------------------

    def close(self, reason: str, *, keep_warm: bool = True, begun: object = None) -> None:
        """End all processes; `keep_warm` spares the fork server. Does nothing without processes.

        Nor where others than those that `begun` stands for, if it is given, are there now.
        """
        # Whoever takes the processes out of here closes them, once. Not under the lock: closing
        # waits for threads that may themselves report a loss, which needs it.
        with self._lock:
            if begun is not None and begun is not self._begun:
                return
            processes, self.processes, self._begun = self.processes, None, None
        if processes is None:
            return
        with noted():  # an interrupted shutdown would leave processes without an owner
            self.before_close(reason)
            if processes.close(keep_warm):
                stays = processes.fork_server
                stays = stays.local if isinstance(stays, HostsClient) else stays
                with self._lock:
                    spare, self.fork_server = self.fork_server, stays
                if spare is not None:
                    spare.close()

    def shut_down(self, *, keep_warm: bool = False) -> None:
        """End the ranks and everything started for them. Does nothing without ranks.

        With `keep_warm` the fork server stays, idle, with torch loaded: the next start is quick.
        """
        # This also runs at exit, and a fork inherits that: a child of the notebook, as of
        # multiprocessing, would end the ranks of its parent.
        if os.getpid() != self._owner_pid:
            return  # a forked child of the notebook, on its way out
        self.close("The ranks were shut down.", keep_warm=keep_warm)
        if not keep_warm:
            with self._lock:
                warm, self.fork_server = self.fork_server, None
            if warm is not None:
                warm.close()
        self._record.begin(0)

    def _lose(self, begun: object, reason: str) -> None:
        """Mark the session as lost, if its processes are still those (called from any thread)."""
        with self._lock:
            if self.lost_reason or begun is not self._begun:
                return
            self.lost_reason = reason
        self._record.note(ended=reason)
        self._record.add(())
        # On a thread of its own: this one may be the fork server client's, and `close` waits for
        # what that thread is told. And what broke may be the fork server, so it is not kept.
        close = partial(self.close, reason, keep_warm=False, begun=begun)
        threading.Thread(target=close, name="ddp-close", daemon=True).start()


def launch_mode(launcher: str) -> str:
    """Return how processes start, fork or process, for `--launcher`. Raises UsageMistake."""
    if launcher == "fork" and not can_fork():
        raise UsageMistake(
            "Ranks cannot be forked here. Leave --launcher out: they start as processes."
        )
    return ("fork" if can_fork() else "process") if launcher == "auto" else launcher


def _processes_class() -> type[Processes]:
    """Import late what loads ipyparallel, for which %load_ext cannot wait."""
    from ddp_notebook.session.session_processes import Processes

    return Processes
