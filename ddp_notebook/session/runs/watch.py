"""Running a cell or a script to its end: until it is over, or can make no progress by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import SessionLost, Stuck
from ddp_notebook.model import Case, Diagnosis, Ranks
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.session.runs.stall_detector import Told, Watchman, gather
from ddp_notebook.session.runs.wait import Send, interrupt, run_to_end

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record


@dataclass(frozen=True)
class Watch:
    """How a run is seen through to its end."""

    processes: Processes
    record: Record
    look: Callable[[], Case]
    """The case as it is."""
    end: Callable[[], CellResult]
    """How it ended, once no rank is in it."""
    patient: bool
    """It goes on when no rank can get on by itself."""

    def see_through(self, run: CellRun, send: Send, given_up: Callable[[], bool]) -> CellResult:
        """Send a run and wait until it is over, gets on no more, or is given up by the user.

        Raises SessionLost when the session ends under it.
        """
        watchman = None if self.patient else self._watchman(run)
        run.watchman = watchman
        diagnosis = _run_watched(run, send, watchman, given_up)
        if diagnosis is not None:
            return replace(run.result(stuck(diagnosis)), diagnosis=diagnosis)
        if run.gone and not run.done:
            raise SessionLost(run.gone)
        if given_up() and not run.done:
            return run.result(interrupt(run, self.processes.cluster, self.record))
        return self.end()

    def _watchman(self, run: CellRun) -> Watchman:
        """Nobody is asked while a run issues collectives or prints."""
        rings = self.processes.rings
        return Watchman(self.look, moved=lambda: (rings.written(run.ranks), run.changes))


def _run_watched(
    run: CellRun, send: Send, watchman: Watchman | None, given_up: Callable[[], bool]
) -> Diagnosis | None:
    """Run it to its end; the diagnosis when it does not get on any more.

    Without a watchman it ends only when all its ranks have, or when it is `given_up`.
    """
    found: list[Diagnosis] = []

    def over() -> bool:
        diagnosis = watchman.turn() if watchman is not None else None
        if diagnosis is not None:
            found.append(diagnosis)
        return bool(found) or given_up()

    run_to_end(run, send, over)
    return found[0] if found and not run.done else None


def was_sent(ranks: Ranks) -> dict[int, Callable[[], bool]]:
    """What stands for sending a run that its ranks are in already."""
    return {rank: lambda: False for rank in ranks}


def look_at_cell(run: CellRun, processes: Processes, record: Record) -> Case:
    """The case of a cell as it is: also of the ranks that do not run it."""
    everyone = tuple(range(record.snapshot.world_size))
    return gather(
        processes.cluster,
        record.snapshot,
        Told(),
        asked=lambda: run.pending,
        collectives=lambda: processes.rings.read(everyone, run.cell),
        sources=run.sources,
    )


def stuck(diagnosis: Diagnosis) -> Stuck:
    """What a run that does not get on any more raises."""
    lines = [f"{diagnosis.headline.removesuffix('.')}."]
    if diagnosis.findings:
        lines.append(f"What to do: {diagnosis.findings[0].remedy}")
    lines.append("The ranks stay as they are: %ddp_why, %ddp_status. Free them: %ddp_abort")
    return Stuck("\n".join(lines), diagnosis)
