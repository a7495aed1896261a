"""The runs of a session: which run has which ranks, running cells and scripts, waiting for them."""

from __future__ import annotations

import ast
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, TypeVar

from ddp_notebook import files
from ddp_notebook.errors import CellSyntaxError, UsageMistake
from ddp_notebook.model import Diagnosis, Event, LineStopped, Ranks, name_ranks
from ddp_notebook.rank import calls
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.preflight import check_processes
from ddp_notebook.session.runs.endings import CellResult, exits
from ddp_notebook.session.runs.run import CellRun, RunOptions, RunState, paused_ranks
from ddp_notebook.session.runs.scripts import (
    Script,
    ScriptRun,
    find_module,
    find_script,
    place_of_python,
)

if TYPE_CHECKING:
    from ddp_notebook.launch.lab_hosts import Placed
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.options import Settings
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.run import CellRun

_RELEASED_WITHIN_S = 10.0
"""How long the thread that waits for a run has to notice its end and clean up."""
_MOST_TEXTS = 1000
"""Sources of earlier cells, to show the lines of their functions."""

Run = TypeVar("Run", bound=CellRun)


class RunRegistry:
    """Which run has which ranks. Thread-safe; of two concurrent claims of a rank one succeeds."""

    def __init__(self, record: Record, pool: RankPool, findings: LastFindings) -> None:
        self.all: list[CellRun] = []
        """The last run of every rank, and those that ranks are still in; the newest last."""
        self.detached: CellRun | None = None
        """The last run that was detached, or that a thread of its own waits for."""
        self.past = PastRuns()
        self.before_run: Callable[[CellRun], None] = lambda run: None
        """Called before ranks are sent something to run."""
        self.breakpoints_of: Callable[[int], calls.Breakpoints] = lambda _: calls.Breakpoints(())
        """The breakpoints of a rank, for a process that is about to replace it."""
        self._record = record
        self._findings = findings
        self._pool = pool
        self._texts: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        pool.before_close = self.lose_all
        record.subscribe(self._take)

    def _take(self, events: Sequence[Event]) -> None:
        # Runs that nobody waits for hear of events as well: ranks that were left in one end it at
        # some later time, and what they write and raise until then is still of that run.
        for run in tuple(self.all) if events else ():
            run.take(events)

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
        cpu: bool = False,
        ledger: int = 0,
    ) -> CellResult:
        """Run a cell on ranks until each has finished it or died, or none can make progress.

        Then the result's `error` is `Stuck`, with the diagnosis, and the ranks stay in it until
        they are freed (`abort`). With `wait` "forever" it keeps waiting instead. With `hold` every
        rank pauses before each collective until it is stepped (`step`), and the result's `steps`
        says where they stand. With `detach` it returns at once, with `pending` ranks: `wait` waits
        for the end. `number` is the notebook's prompt number and `magic_line` the cell's first
        line, for tracebacks. `transform` turns IPython's syntax into Python's for the check that
        comes first (default: magics and shell escapes). `colors` is IPython's setting, for
        tracebacks. With `cpu` what asks for CUDA gets the CPU. `ledger` is the training step of
        which the result has a ledger: `LAST_STEP`, or its number. Raises CellSyntaxError and
        UsageMistake before any rank runs; what goes wrong on ranks, or an interrupt, is the
        result's `error`.
        """
        processes = self._pool.need("%%ddp")
        if cpu and "nccl" in processes.devices.backend:
            raise UsageMistake(
                "These ranks are on GPUs. For ranks on CPUs: %ddp_shutdown, then %ddp_init "
                "--device cpu. Or run a script: %ddp_run --cpu train.py"
            )
        is_async = check_cell(source, transform or ipython_syntax)
        options = RunOptions(number or 0, wait, hold, detach, started, ledger)
        made = partial(CellRun, processes=processes, options=options)
        with noted() as interrupted, self.claim(ranks, "%%ddp", options, made) as run:
            # The magic's line is kept, so that the lines of the text have the cell's own numbers.
            run.sources = {run.title: f"{magic_line}\n{source}"}
            self._texts.update(run.sources)
            for old in list(self._texts)[:-_MOST_TEXTS]:
                del self._texts[old]
            run.earlier = self._texts
            processes.begin_last_words(run.ranks)
            order = calls.START_CELL if is_async else calls.RUN_CELL
            request = calls.Cell(
                run.cell,
                run.number,
                magic_line,
                source,
                run.pausing,
                colors,
                len(run.ranks) if cpu else 0,
                ledger,
            )
            run.order = order, request
            return self._carry_out(run, interrupted, options)

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
        cpu: bool = False,
        ledger: int = 0,
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
        `mp.spawn`, are then those that are diagnosed. `cpu` and `ledger` are as in `run_cell`.
        """
        processes = self._pool.need("%ddp_run")
        options = RunOptions(number, wait, hold, detach, started, ledger)
        ranks = place_of_python(ranks, options) if as_python else ranks
        file, package = find_module(path) if as_module else (find_script(path), None)
        called = str(file) if as_module else str(Path(path).expanduser())
        script = Script(
            file,
            called,
            package,
            tuple(arguments),
            store=store,
            settings=settings or {},
            as_python=as_python,
            as_gpus=processes.options.world_size if cpu else 0,
            placed=placed,
        )
        count = len(ranks) if ranks is not None else processes.options.world_size
        # The processes of the last script make room for these.
        left = len(processes.script.ranks) if processes.script is not None else 0
        check_processes("%ddp_run", in_script=max(0, count - left))
        made = partial(ScriptRun, processes=processes, options=options, what=script)
        with noted() as interrupted, self.claim(ranks, "%ddp_run", options, made) as run:
            run.sources = files.sources(file)
            run.breakpoints_of = self.breakpoints_of
            processes.begin_last_words(run.ranks)
            run.prepare()
            return self._carry_out(run, interrupted, options)

    def _carry_out(
        self, run: CellRun, interrupted: Callable[[], bool], options: RunOptions
    ) -> CellResult:
        """Run it; return the result, or how a run that is detached or pauses stands."""
        self.before_run(run)
        self._findings.begin(run.found)
        self.past.begin(run)
        if options.started is not None:
            options.started(run)
        if not options.detach and not run.pausing:
            run.watch()
            result = run.see_through(interrupted, until_paused=True)
            if result.steps is not None:  # from now on a thread waits for the outcome of its steps
                self._detach(run)
            return result
        self._detach(run, by_user=options.detach)
        if not options.detach:
            return run.follow(None, interrupted)
        if interrupted():
            run.stop()
        # Without what the ranks wrote in these first moments: the caller asks for that by `wait`.
        return CellResult((), (), {}, None, pending=run.pending)

    def _detach(self, run: CellRun, *, by_user: bool = False) -> None:
        run.detach(by_user=by_user)
        self.detached = run

    def wait(
        self, timeout_s: float | None = None, started: Callable[[CellRun], None] | None = None
    ) -> CellResult:
        """Wait for the detached run, or the one that ranks are still in; return its result.

        As with a cell, an interrupt stops the ranks. After `timeout_s` seconds it returns the
        current state: `pending` are the ranks still in the run, `outputs` is the output since the
        last call. The same holds for a run whose ranks are paused; `steps` says where. If the last
        run was detached and is over, its result again. Raises UsageMistake when there is
        nothing to wait for.
        """
        with noted() as interrupted:
            run = self._to_wait_for()
            if started is not None:
                started(run)
            return run.follow(timeout_s, interrupted)

    def _to_wait_for(self) -> CellRun:
        """Find the run to wait for; a thread of its own waits for its end from now on."""
        detached = self.detached if self.detached and not self.detached.reported else None
        if detached is not None and not detached.left_with_ranks:
            return detached
        self._pool.need("%ddp_wait")
        for run in reversed(self.all):
            # Also one that was stuck: its ranks may have been unblocked since, without a waiter.
            left = run.state in (RunState.STUCK, RunState.INTERRUPTED)
            unseen = run is detached and run.state is RunState.STUCK
            if unseen or (left and run.events.started & set(run.pending)):
                self._detach(run)
                return run
        if detached is not None:
            return detached
        if any(run.state.claimed for run in self.all):
            raise UsageMistake(
                "Another thread is already waiting for this run. Show stacks: %ddp_where"
            )
        if self.detached is not None and self.all[-1:] == [self.detached]:
            return self.detached  # the last run: its result again
        raise UsageMistake(
            "There is nothing to wait for: no cell or script is running. To run one in the "
            "background: %%ddp --detach, or %ddp_run --detach train.py"
        )

    # -- which there are -----------------------------------------------------------------

    @property
    def current(self) -> CellRun | None:
        """The run that ranks are in, else the last one; the newest when there are several."""
        busy = (run for run in reversed(self.all) if not run.done)
        return next(busy, self.all[-1] if self.all else None)

    @property
    def script(self) -> CellRun | None:
        """The script whose processes have the ranks' places, also when it is over."""
        processes = self._pool.processes
        if processes is None or processes.script is None:
            return None
        return next((run for run in reversed(self.all) if run.script), None)

    @property
    def in_script(self) -> bool:
        """True while ranks are in a script."""
        return any(run.script and not run.done for run in self.all)

    @property
    def script_left(self) -> bool:
        """True of a script that no thread waits for: it is over, or stuck."""
        return not any(run.script and run.state.claimed for run in self.all)

    @property
    def seen_late(self) -> Diagnosis | None:
        """The finding about the last script's ranks when one was only late; None if none was."""
        return next((run.seen_late for run in reversed(self.all) if run.script), None)

    def to_step(self, ranks: Ranks | None) -> CellRun | None:
        """Return the run that a step of `ranks` is of: where they pause, else the current."""
        for run in reversed(self.all):
            if run.stops and (ranks is None or any(rank in run.stops for rank in ranks)):
                return run
        return self.current

    @property
    def stops(self) -> dict[int, LineStopped]:
        """The ranks that are paused at lines, and where."""
        return {rank: at for run in self.all for rank, at in dict(run.stops).items()}

    def paused(self) -> Mapping[int, str]:
        """Return the ranks that are paused in the current run, and before what."""
        current = self.current
        if current is None or not current.paused:
            return {}
        stops = current.stops
        ranks = paused_ranks(current)
        return {rank: "a line" if rank in stops else "a collective" for rank in ranks}

    # -- claims --------------------------------------------------------------------------

    def idle(self, ranks: Ranks | None, verb: str) -> Ranks:
        """Return the ranks a verb acts on, all by default. Raises UsageMistake when one is busy.

        A script that no thread waits for is ended: something else needs its ranks.
        """
        processes = self._pool.processes
        if processes is not None and processes.script is not None and self.script_left:
            processes.end_script()
        claimed = {rank: run.title for run in self.all if run.state.claimed for rank in run.pending}
        return idle_ranks(ranks, verb, self._record.snapshot, claimed, self.paused)

    @contextmanager
    def claim(
        self,
        ranks: Ranks | None,
        verb: str,
        options: RunOptions,
        make: Callable[[int, Ranks], Run],
    ) -> Iterator[Run]:
        """Claim ranks inside the context, for a run made with its number. Raises UsageMistake.

        If nothing was sent when it ends, the claim is released.
        """
        # One lock from the look at the ranks to the entry in `all`: of two threads that want a
        # rank one sees the other's claim. It is not held while the run goes on. `all` is replaced
        # and never changed, so who reads it without the lock (every event does) sees one state.
        with self._lock:
            run = make(next(self._numbers), self.idle(ranks, verb))
            for other in self.all:
                if other.state.claimed:
                    self._check_beside(run, other, detach=options.detach or options.hold)
            known: list[CellRun] = [*self.all, run]
            last = {rank: each for each in known for rank in each.ranks}.values()
            self.all = [each for each in known if not each.done or each in last]
        try:
            yield run
        finally:
            if not run.watched:
                self.all = [other for other in self.all if other is not run]
                run.release()

    def _check_beside(self, run: CellRun, other: CellRun, *, detach: bool) -> None:
        """Raise UsageMistake when `run` cannot be while `other` is, on other ranks.

        A script's processes replace the ranks, so nothing may run on the other ranks meanwhile.
        """
        heading, on = other.heading, name_ranks(other.ranks)
        if run.script or other.script:
            raise UsageMistake(
                f"{heading} is still running on {on}, and {run.script or other.script} needs every "
                "rank. Wait: %ddp_wait. Or abort it: %ddp_abort"
            )
        if detach and other is self.detached:
            raise UsageMistake(
                f"{heading} is already detached, on {on}, and only one run can be. Wait for it: "
                "%ddp_wait. Or leave --detach out."
            )

    def restarts(self, ranks: Ranks) -> None:
        """Note that the user has processes of `ranks` ended: no run is to say that they died."""
        for run in self.all:
            if not run.done:
                run.events.restarted = tuple(rank for rank in ranks if rank in run.pending)

    def await_released(self) -> None:
        """Wait until the threads of runs that are over or aborted have cleaned up."""

        def released() -> bool:
            ending = (RunState.INTERRUPTING, RunState.LOST)
            return not any(
                run.state.claimed and (run.done or run.state in ending) for run in self.all
            )

        # A run that is only stuck, or waits for ranks that nobody has freed, is not waited for.
        self._record.wait_for(released, _RELEASED_WITHIN_S)

    def lose_all(self, reason: str) -> None:
        """Wake all threads that wait for a run, before the processes of the session end."""
        # They are waited for, with a limit, before anything is closed: a thread in `see_through`
        # may be asking ranks or reading their logs, and would find both gone in the middle.
        for run in self.all:
            run.lose(reason)
        self.await_released()

    def reset(self) -> None:
        """Forget all runs: the ranks were replaced."""
        self.all, self.detached = [], None
        self.past.clear()


MOST_RUNS = 100


@dataclass(frozen=True, slots=True)
class PastRun:
    """A summary of a run. `exits` says how ranks left it; `pending` are still in it.

    `began` is in seconds since the epoch. `headline` and `category` are those of the finding, empty
    without one.
    """

    title: str
    number: int
    ranks: Ranks
    began: float
    duration_s: float
    exits: Mapping[str, Ranks]
    pending: Ranks = ()
    headline: str = ""
    category: str = ""


class PastRuns:
    """The last runs of a session, the newest last. Of those that are over only a summary is kept.

    Any thread may read them, while one that claims ranks adds to them.
    """

    def __init__(self) -> None:
        self._runs: tuple[tuple[CellRun, float] | PastRun, ...] = ()

    def begin(self, run: CellRun) -> None:
        """Add a run that begins."""
        kept = [
            old if isinstance(old, PastRun) or old[0].pending else _summary(*old)
            for old in self._runs[1 - MOST_RUNS :]
        ]
        self._runs = (*kept, (run, time.time()))

    def clear(self) -> None:
        """Forget them: a session begins."""
        self._runs = ()

    @property
    def runs(self) -> tuple[PastRun, ...]:
        """As they are now."""
        return tuple(old if isinstance(old, PastRun) else _summary(*old) for old in self._runs)


def _summary(run: CellRun, began: float) -> PastRun:
    left_ns, pending, diagnosis = run.events.left_ns, run.pending, run.found.diagnosis
    findings = diagnosis.findings if diagnosis is not None else ()
    end_s = time.monotonic() if pending or not left_ns else max(left_ns.values()) / 1e9
    return PastRun(
        run.title,
        run.cell,
        run.ranks,
        began,
        max(0.0, end_s - run.began_s),
        exits(run.events),
        pending,
        diagnosis.headline if diagnosis is not None and findings else "",
        findings[0].category.value if findings else "",
    )


def ipython_syntax(source: str) -> str:
    """Turn magics and shell escapes in `source` into Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    transformed: str = TransformerManager().transform_cell(source)
    return transformed


def check_cell(source: str, transform: Callable[[str], str]) -> bool:
    """Compile a cell here, before any rank runs it; True when it has a top-level `await`.

    Raises CellSyntaxError with the notebook's own line numbers (the magic is line 1).
    """

    def compiled(python: str) -> CodeType:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(python, "<cell>", "exec", flags=flags, dont_inherit=True)
        return code

    try:
        try:  # most cells are plain Python and need no transformation
            code = compiled(source)
        except SyntaxError:
            code = compiled(transform(source))
    except SyntaxError as error:
        error.lineno = (error.lineno or 0) + 1
        raise CellSyntaxError(error) from None
    except ValueError as error:  # a null character
        raise CellSyntaxError(SyntaxError(str(error), ("<cell>", 1, 1, ""))) from None
    return bool(code.co_flags & inspect.CO_COROUTINE)
