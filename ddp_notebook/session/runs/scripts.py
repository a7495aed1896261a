"""The session's verb for scripts: run one on the ranks, as torchrun would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed
from ddp_notebook.model import Board, Diagnosis, Ranks, Status
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.options import Settings
from ddp_notebook.session.runs import post_run
from ddp_notebook.session.runs.registry import Underway
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.session.runs.watch import Watch

if TYPE_CHECKING:
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.processes.lab_hosts import Placed
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.script import ScriptRun
    from ddp_notebook.session.setup.bring_up import BringUp


class ScriptVerbs(Underway):
    """Mixed into `Session`."""

    record: Record
    seen_late: Diagnosis | None
    _bringup: BringUp | None
    _script: ScriptRun | None

    def _next_cell(self) -> int:
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
        hold: bool = False,
        detach: bool = False,
        number: int = 0,
        started: Callable[[CellRun], None] | None = None,
        placed: Placed | None = None,
    ) -> CellResult:
        """Run a torchrun-style script on ranks, unchanged, and wait until it is over.

        It is over also when no rank can get on: then the result's `error` is `Stuck`, with the
        diagnosis, and the ranks stay in it until they are freed (`abort`). With `wait` "forever"
        it goes on all the same. `hold` and `detach` are those of `run_cell`. Raises UsageMistake
        when there is no such script, or a rank is not free. `placed` puts the ranks on hosts of
        the fault lab.
        """
        from ddp_notebook.session.runs.script import ScriptRun, find_script

        processes = self._need("%ddp_run")
        script = find_script(path)

        def made(members: Ranks) -> CellRun:
            run = CellRun(self._next_cell(), members, script.name, number or 0)
            run.held = hold
            return run

        with noted() as interrupted:
            run = self._take(ranks, "%ddp_run", made, detach=detach or hold)
            try:
                script_run = ScriptRun(processes, self.record, store, run.ranks, placed)
            except BaseException:
                self._put_down(run)
                raise
            self._script = script_run
            watch = Watch(
                processes,
                self.record,
                script_run.look,
                partial(self._end_of_script, run, script_run),
                patient=hold or wait == "forever",
            )
            send = script_run.sending(run, script, arguments, settings or {})
            return self._see_to(run, watch, send, interrupted, detach=detach, started=started)

    def _end_of_script(self, run: CellRun, script_run: ScriptRun) -> CellResult:
        """How a script ended, diagnosed where it failed; its ranks have their group again."""
        result = run.result()
        found = Diagnosis() if run.interrupted else diagnose_run(script_run.look())
        if found.wrong:
            result = replace(result, diagnosis=found)
            if isinstance(result.error, CellFailed):
                result.error.diagnosis = found
        elif result.error is None:
            result = replace(result, diagnosis=post_run.examine(run, script_run.processes))
        self.seen_late = run.watchman.seen_late if run.watchman is not None else None
        with self._freeing:
            mine = self._script is script_run  # else another verb sets the ranks up
            self._script = None if mine else self._script
        if mine:
            self._back_from_script()
        return result

    def _back_from_script(self) -> None:
        """Give the ranks back the session's own group, which the script took the place of."""
        processes, bringup = self._processes, self._bringup
        if processes is None or bringup is None or self.record.snapshot.ended:
            return
        processes.close_lab()
        if not self.record.snapshot.with_status(Status.DEAD, Status.RUNNING):
            self._set_up(replace(processes.options, settings={}, step=False))
