"""The session's verb for cells: run one on ranks, watch it, and say how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.analysis import run_rules
from ddp_notebook.errors import CellFailed, SessionLost
from ddp_notebook.model import Ranks
from ddp_notebook.session import aftermath
from ddp_notebook.session.cellrun import CellResult, CellRun, check_cell, ipython_syntax
from ddp_notebook.session.collectivesteps import Settling, table
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.running import interrupt
from ddp_notebook.session.watching import look_at_cell, run_watched, stuck, watchman_of

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.setup import Processes
    from ddp_notebook.session.why import Watchman


class CellVerbs:
    """Mixed into `Session`."""

    record: Record
    current: CellRun | None
    watchman: Watchman | None = None
    """Who looks whether the cell that runs gets on; None when nobody does."""
    _lost_reason: str

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    def _next_cell(self) -> int:
        raise NotImplementedError

    def _held(self) -> Ranks:
        raise NotImplementedError

    def run_cell(
        self,
        source: str,
        ranks: Ranks | None = None,
        *,
        number: int | None = None,
        magic_line: str = "%%ddp",
        wait: str = "progress",
        hold: bool = False,
        transform: Callable[[str], str] | None = None,
        started: Callable[[CellRun], None] | None = None,
    ) -> CellResult:
        """Run a cell on ranks until each has finished it or died, or none can get on any more.

        Then the result's `error` is `Stuck`, with the diagnosis, and the ranks stay in it until
        they are freed (`abort`). With `wait` "forever" it goes on all the same. With `hold` every
        rank stops before each collective until it is stepped on (`step`), and the result's `steps`
        says where they stand. `number` is the
        notebook's prompt number and `magic_line` the cell's first line, for tracebacks.
        `transform` turns IPython's syntax into Python's for the check that comes first (default:
        magics and shell escapes). Raises CellSyntaxError and UsageMistake before any rank runs;
        what goes wrong on ranks, or an interrupt, is the result's `error`.
        """
        processes = self._need("%%ddp")
        cluster = processes.cluster
        is_async = check_cell(source, transform or ipython_syntax)
        members = idle_ranks(ranks, "%%ddp", self.record.snapshot, self._held)
        cell = self._next_cell()
        run = self.current = CellRun(cell, members)
        function = f"ddp_notebook.agent.cells:{'start_async' if is_async else 'run'}"
        told = {"cell": cell, "number": number or cell, "magic_line": magic_line, "source": source}
        run.held = told["hold"] = hold
        run.sources = {f"cell {number or cell}": f"{magic_line}\n{source}"}
        settled = Settling(run, processes).done if hold else lambda: False

        with noted() as interrupted:
            if started is not None:
                started(run)
            send = partial(cluster.tell, name=function, arguments=told)
            look = partial(look_at_cell, run, processes, self.record)
            watched = wait != "forever" and not hold
            self.watchman = watchman_of(run, processes, look) if watched else None
            try:
                diagnosis = run_watched(
                    run,
                    send,
                    self.watchman,
                    lambda: bool(self._lost_reason) or interrupted() or settled(),
                )
            finally:
                self.watchman = None
            if diagnosis is not None:
                return replace(run.result(stuck(diagnosis)), diagnosis=diagnosis)
            if interrupted() and not run.done:
                return run.result(interrupt(run, cluster, self.record))
        if hold and not run.done:
            return replace(run.result(), steps=table(run, processes))
        if self._lost_reason:
            return run.result(SessionLost(f"{self._lost_reason} Start again: %ddp_init"))
        return self._end_of_cell(run, processes)

    def _end_of_cell(self, run: CellRun, processes: Processes) -> CellResult:
        """How a cell ended, diagnosed where it failed."""
        result = run.result()
        if result.error is None:
            return replace(result, diagnosis=aftermath.examine(run, processes))
        if not isinstance(result.error, CellFailed) or len(run.ranks) < 2:
            return result
        found = run_rules.diagnose_run(look_at_cell(run, processes, self.record))
        if found.wrong:
            result.error.diagnosis = found
            return replace(result, diagnosis=found)
        return result
