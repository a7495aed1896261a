"""The session's verb for scripts: run one on the ranks, as torchrun would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.analysis import run_rules
from ddp_notebook.errors import CellFailed
from ddp_notebook.model import Board, Diagnosis, Ranks, Status
from ddp_notebook.session import aftermath
from ddp_notebook.session.cellrun import CellResult, CellRun
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.options import Settings
from ddp_notebook.session.running import interrupt

if TYPE_CHECKING:
    from ddp_notebook.session.bringup import BringUp
    from ddp_notebook.session.labhosts import Placed
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.scriptrun import ScriptRun
    from ddp_notebook.session.setup import Processes


class ScriptVerbs:
    """Mixed into `Session`."""

    record: Record
    current: CellRun | None
    seen_late: Diagnosis | None
    _processes: Processes | None
    _bringup: BringUp | None
    _script: ScriptRun | None
    _awaits_script: bool = False
    """A thread waits for the end of a script."""

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    def _next_cell(self) -> int:
        raise NotImplementedError

    def _held(self) -> Ranks:
        raise NotImplementedError

    def _set_up(self, options: InitOptions) -> Board:
        raise NotImplementedError

    def run_script(
        self,
        path: str,
        arguments: Sequence[str] = (),
        ranks: Ranks | None = None,
        *,
        store: str = "session",
        settings: Settings | None = None,
        wait: str = "progress",
        number: int = 0,
        started: Callable[[CellRun], None] | None = None,
        placed: Placed | None = None,
    ) -> CellResult:
        """Run a torchrun-style script on ranks, unchanged, and wait until it is over.

        It is over also when no rank can get on: then the result's `error` is `Stuck`, with the
        diagnosis, and the ranks stay in it until they are freed (`abort`). With `wait` "forever"
        it goes on all the same. Raises
        UsageMistake when there is no such script, or a rank is not free. `placed` puts the ranks
        on hosts of the fault lab.
        """
        from ddp_notebook.session.scriptrun import ScriptRun, find_script
        from ddp_notebook.session.watching import stuck

        processes = self._need("%ddp_run")
        script = find_script(path)
        members = idle_ranks(ranks, "%ddp_run", self.record.snapshot, self._held)
        run = self.current = CellRun(self._next_cell(), members, script.name)
        script_run = self._script = ScriptRun(processes, self.record, store, members, placed)
        self._awaits_script = True
        try:
            with noted() as interrupted:
                if started is not None:
                    started(run)
                diagnosis = script_run.run(
                    run,
                    script,
                    arguments,
                    settings or {},
                    number or run.cell,
                    interrupted,
                    watched=wait != "forever",
                )
                if diagnosis is not None:
                    return replace(run.result(stuck(diagnosis)), diagnosis=diagnosis)
                if interrupted() and not run.done:
                    return run.result(interrupt(run, processes.cluster, self.record))
            return self._end_of_script(run, script_run)
        finally:
            self._awaits_script = False
            self.record.add(())

    def _end_of_script(self, run: CellRun, script_run: ScriptRun) -> CellResult:
        """How a script ended, diagnosed where it failed; its ranks have their group again."""
        result = run.result()
        found = run_rules.diagnose_run(script_run.look())
        if found.wrong:
            result = replace(result, diagnosis=found)
            if isinstance(result.error, CellFailed):
                result.error.diagnosis = found
        elif result.error is None:
            result = replace(result, diagnosis=aftermath.examine(run, script_run.processes))
        watchman = script_run.watchman
        self.seen_late = watchman.seen_late if watchman is not None else None
        self._script = None
        self._back_from_script(run.ranks)
        return result

    def _back_from_script(self, members: Ranks) -> None:
        """Give the ranks back the session's own group, which the script took the place of."""
        processes, bringup = self._processes, self._bringup
        if processes is None or bringup is None or self.record.snapshot.ended:
            return
        processes.close_lab()
        if not self.record.snapshot.with_status(Status.DEAD, Status.RUNNING):
            self._set_up(replace(processes.options, settings={}, step=False))
