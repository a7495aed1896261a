"""The session: one method per verb, each handed to the part that does it. Needs no notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_notebook.archive.replay import Replay
from ddp_notebook.rank.calls import How
from ddp_notebook.session.findings import LastFindings
from ddp_notebook.session.pool import RankPool
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.cells import Cells
from ddp_notebook.session.runs.registry import RunRegistry
from ddp_notebook.session.runs.run import RunOptions
from ddp_notebook.session.runs.scripts import Scripts
from ddp_notebook.session.runs.steps import Step
from ddp_notebook.session.setup.set_up import SetUp
from ddp_notebook.session.setup.stepping import Stepping
from ddp_notebook.session.tools.bench import Benchmarks
from ddp_notebook.session.tools.ddp_construction import DdpConstruction
from ddp_notebook.session.tools.debugger.breakpoints import Breakpoints
from ddp_notebook.session.tools.debugger.editors import Editors
from ddp_notebook.session.tools.debugger.evaluating import evaluate
from ddp_notebook.session.tools.debugger.looking import Looking
from ddp_notebook.session.tools.debugger.own_ranks import OwnRanks
from ddp_notebook.session.tools.fault_lab import FaultLab
from ddp_notebook.session.tools.save import Save
from ddp_notebook.session.tools.values import Values
from ddp_notebook.session.tools.where import Where
from ddp_notebook.session.tools.why import Why

if TYPE_CHECKING:
    from ddp_notebook.archive.format import SavedRun
    from ddp_notebook.bench.plan import Plan
    from ddp_notebook.bench.result import BenchRun
    from ddp_notebook.bench.steps import StepBenchResult, StepPlan
    from ddp_notebook.diagnosis.parallel.meshes import Mesh
    from ddp_notebook.launch.lab_hosts import Placed
    from ddp_notebook.model import Board, Diagnosis, Ranks, StackTree, StepTable, VariableTable
    from ddp_notebook.model.parallel.layout import MeshLayout
    from ddp_notebook.rank.calls import Completions, Inspection, NameToInspect
    from ddp_notebook.session.options import InitOptions, Settings
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.controller import RunController
    from ddp_notebook.session.runs.detached import Detached
    from ddp_notebook.session.runs.past import PastRun
    from ddp_notebook.session.runs.run import CellResult, CellRun
    from ddp_notebook.session.tools.bench import BenchOptions, Measuring, Watch
    from ddp_notebook.session.tools.bench_result import BenchResult
    from ddp_notebook.session.tools.ddp_construction import Wrap, WrapOptions
    from ddp_notebook.session.tools.fault_lab import FaultResult


class Session:
    """Ranks, and what can be done with them.

    A facade: it passes each part the other parts that it needs; no part knows the session.
    `record.subscribe` reports every change, on any thread.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.pool = RankPool(self.record)
        self._findings = LastFindings()
        self._runs = RunRegistry(self.record, self.pool, self._findings)
        self._set_up = SetUp(self.record, self.pool, self._runs, self._findings)
        self._cells = Cells(self.pool, self._runs)
        self._scripts = Scripts(self.pool, self._runs)
        self._construction = DdpConstruction(self.record, self.pool, self._runs, self._findings)
        self._stepping = Stepping(self.record, self._runs, self._set_up, self._construction)
        own = OwnRanks(self.record, self.pool, self._runs)
        self.breakpoints = Breakpoints(own)
        self._runs.before_run = self.breakpoints.run_begins
        self._runs.breakpoints_of = self.breakpoints.of_rank
        self.looking = Looking(own)
        self._evaluate = partial(evaluate, own, self.looking)
        self.editors = Editors(self.record, self.pool)
        self._values = Values(self.record, self.pool, self._runs)
        self._where = Where(self.record, self.pool)
        self._why = Why(self._runs, self._set_up, self._findings, self.record)
        self._save = Save(self.record, self._runs, self._why)
        self._benchmarks = Benchmarks(self.record, self.pool, self._runs, self._set_up)
        self._lab = FaultLab(
            self.record,
            self.pool,
            self._set_up,
            self._cells,
            self._scripts,
            self._construction,
        )

    # -- starting ------------------------------------------------------------------------

    def warm(self) -> None:
        """Start the fork server in the background, so that torch is loaded when `init` runs."""
        self.pool.warm()

    def init(self, options: InitOptions, *, replace: bool = False) -> Board:
        """Start the ranks and bring torch.distributed up; returns when it is verified.

        With `options.step` it returns before the first stage. Ranks whose set-up failed before
        are set up again in place. `replace` ends existing ranks first. Raises UsageMistake for
        options that cannot work, SetupFailed when set-up cannot succeed; started ranks are kept.
        """
        return self._set_up.init(options, replace=replace)

    def set_up(self, options: InitOptions) -> Board:
        """Set up the existing ranks again. Raises SetupFailed."""
        return self._set_up.set_up(options)

    def make_ready(self) -> None:
        """Unblock every rank and replace dead ones, so that all accept calls."""
        self._set_up.make_ready()

    def restart(self, ranks: Ranks | None = None) -> Board:
        """Give `ranks` (all, by default) new processes and rebuild the group.

        The other ranks keep their processes and variables. Raises SetupFailed, and
        UsageMistake when another rank is dead, or in a cell that a thread waits for.
        """
        return self._set_up.restart(ranks)

    def abort(self, ranks: Ranks | None = None) -> Board:
        """Unblock ranks that hang in set-up, a cell or a script; returns the board afterwards.

        Ranks that cannot be unblocked get new processes, as do dead ones; the board's notes say
        which, and why. If every rank had a process group, it is rebuilt.
        """
        return self._set_up.abort(ranks)

    def shutdown(self, *, keep_warm: bool = False) -> None:
        """End the ranks and everything started for them. Does nothing without ranks.

        With `keep_warm` the fork server stays, idle, with torch loaded: the next start is quick.
        """
        self.pool.shut_down(keep_warm=keep_warm)

    # -- what is known without asking the ranks ------------------------------------------

    @property
    def running(self) -> bool:
        """True while there are ranks."""
        return self.pool.processes is not None

    @property
    def ready(self) -> bool:
        """True while there are ranks whose set-up is complete."""
        return self.running and not self._set_up.half_way

    @property
    def options(self) -> InitOptions:
        """The options with which the ranks were set up. Raises NoSession, SessionLost."""
        return self.pool.need("%ddp_fault").options

    @property
    def runs(self) -> Sequence[RunController]:
        """The last run of every rank, and those that ranks are still in; the newest last."""
        return tuple(self._runs.controllers)

    @property
    def current(self) -> CellRun | None:
        """The run that ranks are in, else the last one; the newest when there are several."""
        current = self._runs.current
        return current.run if current is not None else None

    @property
    def past(self) -> Sequence[PastRun]:
        """The last runs of the session, each with its outcome and finding; the newest last."""
        return self._runs.past.runs

    @property
    def begun(self) -> int:
        """How many runs and set-ups have begun; a diagnosis of an earlier one may be outdated."""
        return self._findings.begun

    @property
    def detached(self) -> Detached | None:
        """The last detached run."""
        return self._runs.detached

    @property
    def wrapping(self) -> Wrap | None:
        """The last model that was taken through DDP's construction."""
        return self._construction.latest

    @property
    def seen_late(self) -> Diagnosis | None:
        """What the last script's ranks waited for when one was only late; None if none was."""
        return self._scripts.seen_late

    @property
    def measuring(self) -> Measuring | None:
        """The running benchmark, if any."""
        return self._benchmarks.current

    @property
    def logs(self) -> CollectiveLogs | None:
        """The ranks' collective logs; None while there are no ranks."""
        return self.pool.processes.logs if self.pool.processes is not None else None

    @property
    def store(self) -> str:
        """Who hosts the store of the group: session or rank0."""
        return self._set_up.bring_up.store if self._set_up.bring_up is not None else "session"

    @property
    def bench_device(self) -> str:
        """Where the tensors of a benchmark live: cpu, or cuda:0."""
        return self._benchmarks.device

    def require(self, verb: str) -> None:
        """Raises NoSession or SessionLost when `verb` has no ranks to work on."""
        self.pool.need(verb)

    def status(self) -> Board:
        """The board now; while ranks run that a script has started itself, theirs."""
        return self._where.board(self._runs, self.store)

    def step_table(self) -> StepTable:
        """Where the ranks stand in set-up."""
        return self._stepping.table()

    def paused_table(self, run: CellRun) -> StepTable:
        """Before which collectives the ranks of `run` are paused."""
        return self._runs.paused_table(run)

    def output(self, rank: int, log: bool = False) -> str:
        """The full output of `rank` in its last cell, which may still run, however long it is.

        With `log`, what the rank's process wrote outside of Python: messages of C code.
        """
        return self._values.output(rank, log)

    # -- running code --------------------------------------------------------------------

    def run_cell(
        self,
        source: str,
        ranks: Ranks | None = None,
        *,
        number: int | None = None,
        magic_line: str = "%%ddp",
        wait: str = "progress",
        hold: bool = False,
        detach: bool = False,
        transform: Callable[[str], str] | None = None,
        started: Callable[[CellRun], None] | None = None,
        colors: str = "",
    ) -> CellResult:
        """Run a cell on ranks until each has finished it or died, or none can make progress.

        Then the result's `error` is `Stuck`, with the diagnosis, and the ranks stay in it until
        they are freed (`abort`). With `wait` "forever" it keeps waiting instead. With `hold` every
        rank pauses before each collective until it is stepped (`step`), and the result's `steps`
        says where they stand. With `detach` it returns at once, with `pending` ranks: `wait` waits
        for the end. `number` is the notebook's prompt number and `magic_line` the cell's first
        line, for tracebacks. `transform` turns IPython's syntax into Python's for the check that
        comes first (default: magics and shell escapes). `colors` is IPython's setting, for
        tracebacks. Raises CellSyntaxError and UsageMistake before any rank runs; what goes wrong on
        ranks, or an interrupt, is the result's `error`.
        """
        options = RunOptions(number or 0, wait, hold, detach, started)
        return self._cells.run(
            source, ranks, options, magic_line=magic_line, transform=transform, colors=colors
        )

    def run_script(
        self,
        path: str,
        arguments: Sequence[str] = (),
        ranks: Ranks | None = None,
        *,
        store: str = "session",
        settings: Settings | None = None,
        wait: str = "progress",
        hold: bool = False,
        detach: bool = False,
        number: int = 0,
        started: Callable[[CellRun], None] | None = None,
        placed: Placed | None = None,
        as_module: bool = False,
        as_python: bool = False,
    ) -> CellResult:
        """Run a torchrun-style script, unchanged, and wait until it is over.

        Each of its ranks is a new process that replaces the session's rank until something else
        runs there: `pull`, `where` and `abort` act on these processes. The wait also ends when no
        rank can make progress: then the result's `error` is `Stuck`, with the diagnosis, and the
        processes stay where they are. With `wait` "forever" it continues instead, and a rank that
        needs a finished one loses its connection, as under torchrun; otherwise it blocks, and the
        hang is diagnosed. `hold` and `detach` are as in `run_cell`. Raises UsageMistake when there
        is no such script, or a rank is not free. `placed` puts its ranks on hosts of the fault lab.
        With `as_module`, `path` is the name of a module, as in `python -m`. With `as_python` it is
        one process without torchrun's variables; the ranks that it starts itself, as by
        `mp.spawn`, are then those that are diagnosed.
        """
        return self._scripts.run(
            path,
            arguments,
            ranks,
            RunOptions(number, wait, hold, detach, started),
            store=store,
            settings=settings,
            placed=placed,
            as_module=as_module,
            as_python=as_python,
        )

    def wait(
        self, timeout_s: float | None = None, started: Callable[[CellRun], None] | None = None
    ) -> CellResult:
        """Wait for the detached run, or the one that ranks are still in; its result.

        As with a cell, an interrupt stops the ranks. After `timeout_s` seconds it returns the
        current state: `pending` are the ranks still in the run, `outputs` is the output since the
        last call. The same holds for a run whose ranks are paused; `steps` says where. If the last
        run was detached and is over, its result once more. Raises UsageMistake when there is
        nothing to wait for.
        """
        return self._runs.wait(timeout_s, started)

    def step(
        self, ranks: Ranks | None = None, to: str | None = None, how: How = How.NEXT
    ) -> StepTable:
        """Move paused ranks one stage, one line or one collective on; or through all up to `to`.

        `how`: from a line, to the next one, into a call, or out of the function.
        Returns when each has arrived, or can only wait for others. Raises UsageMistake.
        """
        self.breakpoints.ranks_move()
        return self.looking.with_watched(self._stepping.step(Step(ranks, to, how)), self.evaluate)

    # -- asking --------------------------------------------------------------------------

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The Python stacks of `ranks` (all by default) as one tree. From any thread, any time.

        With `locals`, short texts of the variables in the user's frames. For ranks that are dead or
        do not answer within two seconds the tree shows what is known. Raises UsageMistake for a
        rank that does not exist, NoSession, SessionLost.
        """
        return self._where.where(ranks, locals)

    def variables(self, names: Sequence[str] = (), ranks: Ranks | None = None) -> VariableTable:
        """The variables of `ranks` (all by default) as one table; with `names`, those alone.

        From any thread, any time: variables of the function that a rank is in, and globals. Runs
        none of the user's code. Raises UsageMistake for a rank or name that does not exist,
        NoSession, SessionLost.
        """
        return self._values.variables(names, ranks)

    def evaluate(
        self,
        source: str,
        ranks: Ranks | None = None,
        up: int | None = None,
        *,
        assign: bool = False,
        own_text: bool = False,
    ) -> VariableTable:
        """The value of an expression on `ranks` (all by default), equal ones as one.

        Evaluated where each rank is: at a line, in a collective, where it raised, or idle; `up`
        user frames above that (default: the selected frame). With `assign` it is an assignment,
        with `own_text` shown by its own `repr`; `unread` says why not. Raises UsageMistake.
        """
        return self._evaluate(source, ranks, up, assign=assign, own_text=own_text)

    def why(self) -> Diagnosis:
        """The current diagnosis of the ranks. From any thread, any time.

        Once a run or a set-up is over, it is the diagnosis of that one until the next begins: its
        `run` says which one, and how long ago.
        """
        return self._why.diagnose()

    def why_now(self) -> Diagnosis:
        """The diagnosis of the ranks' current state alone, without earlier findings."""
        return self._why.diagnose_now()

    def mesh(self) -> Mesh | None:
        """The mesh that the ranks have made; None for none. Raises NoSession, SessionLost."""
        return self._why.mesh() or self._where.mesh_of_models()

    def layout(self, ranks: Ranks | None = None) -> MeshLayout:
        """The mesh, and what `ranks` (all by default) hold of each parameter. Any time.

        Raises UsageMistake where there is neither, NoSession, SessionLost.
        """
        self.require("%ddp_mesh")
        return self._where.layout(self._why.mesh(), ranks)

    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """Versions and environment of each rank that answers, for `%ddp_doctor`."""
        return self._where.rank_facts()

    def push(self, values: Mapping[str, Any], ranks: Ranks | None = None) -> Ranks:
        """Set variables on ranks; the ranks. Raises UsageMistake for what cannot be sent."""
        return self._values.push(values, ranks)

    def pull(self, name: str, ranks: Ranks | None = None, *, keep_tensors: bool = False) -> Any:
        """The value of a variable: rank to value; tensors as NumPy unless `keep_tensors`.

        Raises UsageMistake when a rank has no such variable or it cannot be sent.
        """
        return self._values.pull(name, ranks, keep_tensors=keep_tensors)

    def complete(self, code: str, at: int, ranks: Ranks | None = None) -> Completions | None:
        """Completions of `code` at the cursor, from the first idle rank of `ranks`.

        None if no rank is idle, or it takes too long; the same holds for `describe`.
        """
        return self._values.complete(code, at, ranks)

    def describe(self, named: NameToInspect, ranks: Ranks | None = None) -> Inspection | None:
        """Signature, docstring and more of an object, from the first idle rank of `ranks`."""
        return self._values.describe(named, ranks)

    # -- tools ---------------------------------------------------------------------------

    def wrap(self, name: str, options: WrapOptions) -> Wrap:
        """Take a model through DDP's construction on the ranks; if wrapped, show its buckets.

        Raises UsageMistake before anything is done, CellInterrupted.
        """
        return self._construction.wrap(name, options)

    def bench(
        self,
        plan: Plan,
        options: BenchOptions | None = None,
        watch: Watch[BenchRun] | None = None,
    ) -> BenchResult:
        """Measure collectives against tensor size, on all ranks or those of `options`.

        The method: ranks are aligned by a barrier before each batch of iterations, every rank
        stamps every iteration, and an iteration took as long as on its slowest rank. Sizes are
        visited in at least three rounds, each in another order, until the 95 % interval of the
        median is within `plan.precision` or `plan.budget_s` ends. Results are compared exactly.
        Bandwidths are nccl-tests', GB = 1e9 bytes. `ddp_notebook.rank.bench.collectives` names
        the sources.

        `watch` is called with the progress, from another thread. After an interrupt, when
        `measuring` is cancelled, or when a rank dies, the partial result is returned and `ended`
        says why. Raises UsageMistake when it cannot begin, DDPError when it ends before anything
        was measured.
        """
        return self._benchmarks.collectives(plan, options, watch)

    def bench_steps(
        self, plan: StepPlan, *, watch: Watch[StepBenchResult] | None = None
    ) -> StepBenchResult:
        """Measure the steps of a model on all ranks; `watch` is called as it goes, by any thread.

        The measurements are kept when a rank fails or dies, the user interrupts, or `measuring` is
        cancelled: then the result's `problem` says so. Raises UsageMistake before anything is
        measured when the model, its loss or data cannot be used, differ between ranks or do not
        fit into memory; CellInterrupted and DDPError when nothing was measured.
        """
        return self._benchmarks.training_steps(plan, watch)

    def open_lab(self, names: tuple[str, ...], drops: str, port: int) -> Placed:
        """Put the ranks of the next script on two hosts. Raises UsageMistake."""
        return self.pool.need("%ddp_fault").open_lab(names, drops, port)

    def fault(self, name: str, started: Callable[[CellRun], None] | None = None) -> FaultResult:
        """Inject a fault of the lab into a set-up. Raises UsageMistake."""
        return self._lab.fault(name, started)

    def repair(self, started: Callable[[CellRun], None] | None = None) -> FaultResult:
        """Apply the remedy of the last fault: set-up succeeds. Raises UsageMistake."""
        return self._lab.repair(started)

    def save(
        self, path: str | os.PathLike[str], *, output: bool = False, force: bool = False
    ) -> SavedRun:
        """Write the run to `path`, to be read with `Session.replay`; what was written.

        The file is readable by this user alone and written atomically. It contains the ranks'
        output only with `output`; an existing file is replaced only with `force`. Raises
        UsageMistake when it cannot be written there, NoSession when there is nothing.
        """
        return self._save.save(path, output=output, force=force)

    @staticmethod
    def replay(path: str | os.PathLike[str]) -> Replay:
        """The run in a file of `save`, without any rank. Raises UsageMistake."""
        return Replay.read(path)
