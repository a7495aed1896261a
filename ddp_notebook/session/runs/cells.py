"""Runs a cell on ranks: checks it, sends it, and reports its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed
from ddp_notebook.model import Ranks
from ddp_notebook.rank import calls
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.runs import post_run
from ddp_notebook.session.runs.cell_syntax import check_cell, ipython_syntax
from ddp_notebook.session.runs.controller import RunController
from ddp_notebook.session.runs.gather import LaunchParameters
from ddp_notebook.session.runs.run import CellResult, CellRun, RunOptions

_MOST_TEXTS = 1000
"""Sources of earlier cells, to show the lines of their functions."""

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.runs.registry import RunRegistry


class Cells:
    """The cells of a session."""

    def __init__(self, pool: RankPool, runs: RunRegistry) -> None:
        self._pool = pool
        self._runs = runs
        self._texts: dict[str, str] = {}

    def run(
        self,
        source: str,
        ranks: Ranks | None,
        options: RunOptions,
        *,
        magic_line: str = "%%ddp",
        transform: Callable[[str], str] | None = None,
        colors: str = "",
    ) -> CellResult:
        """`Session.run_cell`."""
        processes = self._pool.need("%%ddp")
        is_async = check_cell(source, transform or ipython_syntax)
        claim = self._runs.claim(ranks, "%%ddp", processes.cluster, processes.logs, options)
        with noted() as interrupted, claim as controller:
            run = controller.run
            run.sources = {run.title: f"{magic_line}\n{source}"}
            self._texts.update(run.sources)
            for old in list(self._texts)[:-_MOST_TEXTS]:
                del self._texts[old]
            run.earlier = self._texts
            processes.begin_last_words(run.ranks)
            work = CellWork(
                run, processes.cluster, source, magic_line, is_async=is_async, colors=colors
            )
            return self._runs.carry_out(controller, work, interrupted, options)


@dataclass(frozen=True)
class CellWork:
    """A cell, for a `RunController`."""

    run: CellRun
    cluster: RankCluster
    source: str
    magic_line: str
    is_async: bool
    """It has a top-level `await`."""
    colors: str = ""
    launch = LaunchParameters()

    def send(self, ranks: Ranks) -> Ranks:
        """Send the cell to `ranks`; returns those that could not be reached."""
        run = self.run
        request = calls.Cell(
            run.cell, run.number, self.magic_line, self.source, run.pausing, self.colors
        )
        order = calls.START_CELL if self.is_async else calls.RUN_CELL
        return self.cluster.tell(ranks, order, request)

    def end(self, controller: RunController) -> CellResult:
        """How the cell ended, with a diagnosis where it failed or computed something wrong."""
        run = self.run
        result = run.result()
        if result.error is None:
            return replace(
                result, diagnosis=post_run.examine(run, controller.cluster, controller.logs)
            )
        if not isinstance(result.error, CellFailed) or len(run.ranks) < 2 or controller.aborted:
            return result
        diagnosis = diagnose_run(controller.look())
        if diagnosis.wrong:
            result.error.diagnosis = diagnosis
            return replace(result, diagnosis=diagnosis)
        return result
