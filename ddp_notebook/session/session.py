"""The session: one method per verb. Usable without a notebook."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.archive.save import check_target, saved_run, write
from ddp_notebook.errors import (
    DDPError,
    NoSession,
    SessionLost,
    SetupFailed,
    UsageMistake,
)
from ddp_notebook.launch.client import ForkServerClient, can_fork
from ddp_notebook.launch.devices import plan_devices, visible_gpus
from ddp_notebook.model import (
    Board,
    Diagnosis,
    Event,
    RankExited,
    Ranks,
    name_ranks,
)
from ddp_notebook.session.guards import check_name, check_ranks
from ddp_notebook.session.options import InitOptions
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.cells import CellVerbs
from ddp_notebook.session.runs.registry import Detached
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.session.runs.scripts import ScriptVerbs
from ddp_notebook.session.runs.wait import stop_started
from ddp_notebook.session.setup.set_up import SetupVerbs
from ddp_notebook.session.tools.bench import BenchVerbs
from ddp_notebook.session.tools.bench_steps import StepBenchVerbs
from ddp_notebook.session.tools.measuring import Measuring
from ddp_notebook.session.tools.where import Looking
from ddp_notebook.state.board_rows import board

if TYPE_CHECKING:
    from ddp_notebook.archive.replay import Replay
    from ddp_notebook.faults import Fault
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.runs.script import ScriptRun
    from ddp_notebook.session.setup.bring_up import BringUp
    from ddp_notebook.session.tools.ddp_construction import Wrap

_VALUE_TIMEOUT_S = 60.0
_WARM_AFTER_S = 0.1


class Session(Looking, SetupVerbs, CellVerbs, ScriptVerbs, BenchVerbs, StepBenchVerbs):
    """Ranks, and what can be done with them.

    `on_change` callbacks are called, from any thread, whenever something new is known;
    they must be quick.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.runs: list[CellRun] = []
        self.detached: Detached | None = None
        self._processes: Processes | None = None
        self._bringup: BringUp | None = None
        self._script: ScriptRun | None = None
        self.wrapping: Wrap | None = None
        """The last model that was taken through DDP's construction."""
        self.seen_late: Diagnosis | None = None
        self.measuring: Measuring | None = None
        self._last_fault: Fault | None = None
        self._fork_server: ForkServerClient | None = None
        self._gpus: tuple[str, ...] | None = None
        self._cells = itertools.count(1)
        self._lock = threading.RLock()
        self._freeing = threading.RLock()
        self._lost_reason = ""
        self._owner_pid = os.getpid()
        self.record.subscribe(self._watch)

    # -- starting ----------------------------------------------------------------------

    def warm(self) -> None:
        """Start the fork server in the background, so that `init` finds torch loaded."""

        def work() -> None:
            # Imported here and not above: ipyparallel takes longer than %load_ext may.
            try:
                from ddp_notebook.session.processes.processes import sweep_stale_folders
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise
                return  # Python ends already: nothing can be imported any more, nor is needed
            sweep_stale_folders()
            self._gpus = visible_gpus()

        if can_fork():
            self._warm_fork_server("fork")
        # Not before %load_ext has returned: the two would take turns.
        warming = threading.Timer(_WARM_AFTER_S, work)
        warming.name, warming.daemon = "ddp-warm", True
        warming.start()

    def init(self, options: InitOptions) -> Board:
        """Start the ranks and bring torch.distributed up; returns when it is verified.

        With `options.step` it returns before the first stage. Ranks whose set-up failed before
        are set up again in place. Raises UsageMistake when it cannot work as asked, SetupFailed
        when set-up cannot come to its end; ranks that were started stay as they are.
        """
        if self._processes is not None and not self._lost_reason:
            if not self._half_way:
                raise UsageMistake(
                    f"{self.record.snapshot.world_size} ranks are running already. Fresh ranks: "
                    "%ddp_restart. Another number of ranks: %ddp_shutdown, then %ddp_init."
                )
            if options.same_processes(self._processes.options):
                return self._set_up_again(options)
        self._close_processes("New ranks were started.")
        self._start(options)
        return self._set_up(options)

    def _start(self, options: InitOptions) -> None:
        """Start the processes. When that fails nothing is left of them."""
        available = self._gpus if self._gpus is not None else visible_gpus()
        devices = plan_devices(
            options.world_size, options.device, options.backend, options.gpus, available
        )
        self._lost_reason = ""
        self.runs, self.detached = [], None
        self.record.begin(
            options.world_size, backend=devices.backend, notes=(*devices.notes, *options.notes())
        )
        mode = _launch_mode(options.launcher)
        from ddp_notebook.session.processes.processes import Processes
        from ddp_notebook.session.setup.bring_up import BringUp

        try:
            fork_server = self._warm_fork_server(mode)
            self._fork_server = None  # from now on it is this session's, and ends with it
            self._processes = Processes(options, devices, fork_server, self.record, self._lose)
            self._bringup = BringUp(self._processes, self.record)
            self._processes.start()
        except (DDPError, OSError, KeyboardInterrupt) as error:
            failed = self.status()
            self._close_processes("The ranks could not be started.")
            self.record.note(ended="set-up did not finish.")
            if mode == "fork":
                self._warm_fork_server(mode)  # for the next try
            raise SetupFailed(_why(error), failed) from None

    def _warm_fork_server(self, mode: str) -> ForkServerClient:
        with self._lock:
            warm = self._fork_server
            if warm is not None and (not warm.alive or warm.mode != mode):
                warm.close()
                warm = None
            if warm is None:
                warm = self._fork_server = ForkServerClient(mode)
            return warm

    # -- looking -----------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while there are ranks."""
        return self._processes is not None

    @property
    def ready(self) -> bool:
        """True while there are ranks whose set-up is complete."""
        return self.running and not self._half_way

    def status(self) -> Board:
        """The board now."""
        return board(self.record.snapshot)

    def output(self, rank: int, log: bool = False) -> str:
        """What `rank` wrote in its last cell, which may still run; all of it when that was too
        long to show.

        With `log`, what the rank's process wrote beside Python: messages of C code.
        """
        processes = self._need("%ddp_output")
        check_ranks((rank,), self.record.snapshot)
        run = next((each for each in reversed(self.runs) if rank in each.ranks), None)
        cell = run.cell if run is not None else 0
        path = processes.log_file(rank) if log else processes.spooled(rank, cell)
        if path.exists():
            return path.read_text("utf-8", "replace")
        return run.written(rank) if run is not None and not log else ""

    # -- values ------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ranks: Ranks | None = None) -> Ranks:
        """Set variables on ranks; the ranks. Raises UsageMistake for what cannot be sent."""
        processes = self._need("%ddp_push")
        members = self._idle(ranks, "%ddp_push")
        for name, value in values.items():
            check_name(name)
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
                raise UsageMistake(
                    f"{name} is a {type(value).__name__}, which cannot be sent to the ranks: "
                    f"{error}. Make it there instead: %%ddp, then {name} = ..."
                ) from None
        processes.cluster.push(members, values, _VALUE_TIMEOUT_S)
        return members

    def pull(self, name: str, ranks: Ranks | None = None, *, keep_tensors: bool = False) -> Any:
        """The value of a variable: rank to value; tensors as NumPy unless `keep_tensors`.

        Raises UsageMistake when a rank has no such variable or it cannot be sent.
        """
        processes = self._need("%ddp_pull")
        members = self._idle(ranks, "%ddp_pull")
        check_name(name)
        answers = processes.cluster.call(
            members,
            "ddp_notebook.rank.values:get",
            lambda _: {"name": name, "keep_tensors": keep_tensors},
        )
        values: dict[int, Any] = {}
        problems: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            reply = processes.cluster.value_of(answer, _VALUE_TIMEOUT_S)
            if "error" in reply:
                problems.setdefault(reply["error"], []).append(rank)
            else:
                values[rank] = reply["value"]
        if problems:
            why = "; ".join(f"{name_ranks(r)}: {text}" for text, r in problems.items())
            raise UsageMistake(f"{name} cannot be pulled ({why}).")
        return values

    # -- keeping ------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, output: bool = False, force: bool = False
    ) -> SavedRun:
        """Write the run to `path`, to be read with `Session.replay`; what was written.

        The file is readable by this user alone, and there as a whole or not at all. What the
        ranks wrote is in it only with `output`; an existing file is replaced only with `force`.
        Raises UsageMistake when it cannot be written there, NoSession when there is nothing.
        """
        target = check_target(path, force)
        if not self.record.snapshot.ranks:
            raise NoSession("%ddp_save")
        case = None
        # Of a session that was lost nobody is left to ask; what it was like is known still.
        # One that ends just now closes its connections under the question.
        with contextlib.suppress(NoSession, SessionLost, OSError):
            case = self._look("%ddp_save")
        current = self.current
        saved = saved_run(
            *self.record.kept(),
            case,
            script=current.script if current is not None else "",
            run=current.cell if current is not None else 0,
            output=output,
        )
        write(target, saved, force)
        return saved

    @staticmethod
    def replay(path: str | os.PathLike[str]) -> Replay:
        """The run in a file of `save`, without any rank. Raises UsageMistake."""
        from ddp_notebook.archive.replay import Replay

        return Replay.read(path)

    # -- ending -------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the ranks and everything started for them. Does nothing when there is nothing."""
        if os.getpid() != self._owner_pid:
            return  # a forked child of the notebook, on its way out
        self._close_processes("The ranks were shut down.")
        with self._lock:
            warm, self._fork_server = self._fork_server, None
        if warm is not None:
            warm.close()
        self.record.begin(0)

    # -- inside ------------------------------------------------------------------------

    def require(self, verb: str) -> None:
        """Raises NoSession or SessionLost when `verb` has no ranks to work on."""
        self._need(verb)

    def _need(self, verb: str) -> Processes:
        if self._lost_reason:
            raise SessionLost(f"{self._lost_reason} Start again: %ddp_init")
        if self._processes is None:
            raise NoSession(verb)
        return self._processes

    def _next_cell(self) -> int:
        return next(self._cells)

    def _watch(self, events: Sequence[Event]) -> None:
        processes = self._processes
        for run in tuple(self.runs) if events else ():
            run.take(
                [self._with_last_words(run, e) if isinstance(e, RankExited) else e for e in events]
            )
            if run.interrupted and processes is not None:
                stop_started(run, processes.cluster)

    def _with_last_words(self, run: CellRun, event: RankExited) -> RankExited:
        if event.last_words.strip():
            return event
        return replace(event, last_words=run.last_words(event.rank))

    def _lose(self, reason: str) -> None:
        """The session cannot go on (called from any thread)."""
        if self._lost_reason:
            return
        self._lost_reason = reason
        self.record.note(ended=reason)
        self.record.add(())
        close = partial(self._close_processes, reason)
        threading.Thread(target=close, name="ddp-close", daemon=True).start()

    def _close_processes(self, reason: str) -> None:
        """End everything; whoever waits for a run hears first that nothing will come of it."""
        with self._lock:
            processes, self._processes = self._processes, None
        if processes is not None:
            for run in self.runs:
                run.lose(reason)
            self._await_put_down()
            processes.close()


def _why(error: BaseException) -> str:
    """What went wrong in set-up, and that it can be tried again."""
    what = str(error)
    if isinstance(error, KeyboardInterrupt):
        what = "Set-up was interrupted."
    elif isinstance(error, OSError):
        what = f"The ranks could not be started: {error}."
    return f"{what}\nNothing is left running. Try again with %ddp_init."


def _launch_mode(launcher: str) -> str:
    if launcher == "fork" and not can_fork():
        raise UsageMistake(
            "Ranks cannot be forked here. Leave --launcher out: they start as processes."
        )
    return ("fork" if can_fork() else "process") if launcher == "auto" else launcher
