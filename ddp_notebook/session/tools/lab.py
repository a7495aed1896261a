"""The session's verbs of the fault lab: inject a fault, apply its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Board, Ranks, Status

if TYPE_CHECKING:
    from ddp_notebook.faults import Fault
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.processes.lab_hosts import Placed
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.run import CellRun
    from ddp_notebook.session.runs.script import ScriptRun
    from ddp_notebook.session.session import Session
    from ddp_notebook.session.setup.bring_up import BringUp
    from ddp_notebook.session.tools.fault_lab import FaultResult


class LabVerbs:
    """Mixed into `Session`."""

    record: Record
    _bringup: BringUp | None
    _script: ScriptRun | None
    _last_fault: Fault | None

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    def _set_up(self, options: InitOptions) -> Board:
        raise NotImplementedError

    def _give_up(self, ranks: Ranks) -> Ranks:
        raise NotImplementedError

    def _await_put_down(self) -> None:
        raise NotImplementedError

    @property
    def options(self) -> InitOptions:
        """With what the ranks were set up."""
        return self._need("%ddp_fault").options

    def set_up(self, options: InitOptions) -> Board:
        """Take the ranks that there are through set-up again. Raises SetupFailed."""
        self.make_ready()
        return self._set_up(options)

    def make_ready(self) -> None:
        """Free every rank and bring back the dead, so that all of them take calls."""
        processes = self._need("%ddp_fault")
        assert self._bringup is not None
        self._script = None
        self._give_up(self._bringup.everyone)
        self._await_put_down()
        processes.replace(self.record.snapshot.with_status(Status.DEAD))

    def open_lab(self, names: tuple[str, ...], drops: str, port: int) -> Placed:
        """Put the ranks of the next script on two hosts. Raises UsageMistake."""
        return self._need("%ddp_fault").open_lab(names, drops, port)

    def fault(self, name: str, started: Callable[[CellRun], None] | None = None) -> FaultResult:
        """Inject a fault of the lab into a set-up. Raises UsageMistake."""
        from ddp_notebook.session.tools import fault_lab

        self._need("%ddp_fault")
        fault = fault_lab.find(name)
        fault_lab.check(fault)
        self.make_ready()
        result = fault_lab.inject(cast("Session", self), fault, started)
        self._last_fault = fault
        return result

    def repair(self, started: Callable[[CellRun], None] | None = None) -> FaultResult:
        """Apply the remedy of the last fault: set-up comes to its end. Raises UsageMistake."""
        from ddp_notebook.session.tools import fault_lab

        self._need("%ddp_fault")
        if self._last_fault is None:
            raise UsageMistake("There is nothing to repair: inject a fault first, %ddp_fault NAME")
        return fault_lab.repair(cast("Session", self), self._last_fault, started)
