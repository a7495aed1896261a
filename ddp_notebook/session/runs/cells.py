"""The session's verb for cells: run one on ranks, watch it, and say how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed
from ddp_notebook.model import Ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.runs import post_run
from ddp_notebook.session.runs.registry import Underway
from ddp_notebook.session.runs.run import CellResult, CellRun, check_cell, ipython_syntax
from ddp_notebook.session.runs.watch import Watch, look_at_cell

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes


class CellVerbs(Underway):
    """Mixed into `Session`."""

    def _next_cell(self) -> int:
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
        detach: bool = False,
        transform: Callable[[str], str] | None = None,
        started: Callable[[CellRun], None] | None = None,
    ) -> CellResult:
        """Run a cell on ranks until each has finished it or died, or none can get on any more.

        Then the result's `error` is `Stuck`, with the diagnosis, and the ranks stay in it until
        they are freed (`abort`). With `wait` "forever" it goes on all the same. With `hold` every
        rank stops before each collective until it is stepped on (`step`), and the result's `steps`
        says where they stand. With `detach` it returns at once, with `pending` ranks: `wait` waits
        for the end. `number` is the notebook's prompt number and `magic_line` the cell's first
        line, for tracebacks. `transform` turns IPython's syntax into Python's for the check that
        comes first (default: magics and shell escapes). Raises CellSyntaxError and UsageMistake
        before any rank runs; what goes wrong on ranks, or an interrupt, is the result's `error`.
        """
        processes = self._need("%%ddp")
        is_async = check_cell(source, transform or ipython_syntax)
        function = f"ddp_notebook.rank.cells.runner:{'start_async' if is_async else 'run'}"

        def made(members: Ranks) -> CellRun:
            run = CellRun(self._next_cell(), members, number=number or 0)
            run.held = hold
            run.sources = {run.title: f"{magic_line}\n{source}"}
            return run

        with noted() as interrupted:
            run = self._take(ranks, "%%ddp", made, detach=detach or hold)
            told = {
                "cell": run.cell,
                "number": run.number,
                "magic_line": magic_line,
                "source": source,
                "hold": hold,
            }
            watch = Watch(
                processes,
                self.record,
                partial(look_at_cell, run, processes, self.record),
                partial(self._end_of_cell, run, processes),
                patient=hold or wait == "forever",
            )
            send = partial(processes.cluster.tell, name=function, arguments=told)
            return self._see_to(run, watch, send, interrupted, detach=detach, started=started)

    def _end_of_cell(self, run: CellRun, processes: Processes) -> CellResult:
        """How a cell ended, diagnosed where it failed."""
        result = run.result()
        if result.error is None:
            return replace(result, diagnosis=post_run.examine(run, processes))
        if not isinstance(result.error, CellFailed) or len(run.ranks) < 2 or run.interrupted:
            return result
        found = diagnose_run(look_at_cell(run, processes, self.record))
        if found.wrong:
            result.error.diagnosis = found
            return replace(result, diagnosis=found)
        return result
