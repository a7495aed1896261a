"""Running a cell or a script to its end: until it is over, or can make no progress by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddp_notebook.errors import Stuck
from ddp_notebook.model import Diagnosis, SetupCase
from ddp_notebook.session.cellrun import CellRun
from ddp_notebook.session.running import Send, run_to_end
from ddp_notebook.session.why import Told, Watchman, gather

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.setup import Processes


def watchman_of(run: CellRun, processes: Processes, look: Callable[[], SetupCase]) -> Watchman:
    """Who looks whether `run` gets on: nobody is asked while it issues collectives or prints."""
    return Watchman(look, moved=lambda: (processes.rings.written(run.ranks), run.changes))


def run_watched(
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


def look_at_cell(run: CellRun, processes: Processes, record: Record) -> SetupCase:
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
    lines = [f"{diagnosis.headline}."]
    if diagnosis.findings:
        lines.append(f"What to do: {diagnosis.findings[0].remedy}")
    lines.append("The ranks stay as they are: %ddp_why, %ddp_status. Free them: %ddp_abort")
    return Stuck("\n".join(lines), diagnosis)
