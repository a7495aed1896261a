"""The session: the parts that do its verbs, and by its own name what programs call most."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.archive.replay import Replay
from ddp_notebook.archive.save import check_target, saved_run, write
from ddp_notebook.errors import NoSession, SessionLost
from ddp_notebook.rank.calls import How
from ddp_notebook.session.findings import LastFindings
from ddp_notebook.session.pool import RankPool
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.registry import RunRegistry
from ddp_notebook.session.set_up import SetUp
from ddp_notebook.session.stepping import Step, Stepping
from ddp_notebook.session.tools.bench import Benchmarks
from ddp_notebook.session.tools.breakpoints import Breakpoints
from ddp_notebook.session.tools.ddp_construction import DdpConstruction
from ddp_notebook.session.tools.fault_lab import FaultLab
from ddp_notebook.session.tools.looking import Looking
from ddp_notebook.session.tools.values import Values
from ddp_notebook.session.tools.where import Where
from ddp_notebook.session.tools.why import Why

if TYPE_CHECKING:
    from ddp_notebook.diagnosis.collectives.meshes import Mesh
    from ddp_notebook.model import Board, Ranks, StepTable
    from ddp_notebook.model.ddp import MeshLayout
    from ddp_notebook.session.options import InitOptions


class Session:
    """Ranks, and what can be done with them: each part documents its own verbs.

    `setup` starts, restarts and frees ranks, `runs` runs cells and scripts on them, `stepping`
    steps what is paused, `breakpoints` stops ranks at lines and `looking` looks there, `overview`
    and `values` show where ranks are and what they hold, `diagnosis` says what is wrong,
    `construction` wraps models, `benchmarks` measures, `lab` injects faults. `record.subscribe`
    reports every change, on any thread.

    What programs call most is also here, documented where it stands, as by
    `help(session.run_cell)`: init set_up restart abort shutdown, run_cell run_script wait output,
    where why why_now variables evaluate push pull, wrap bench bench_steps fault repair save.

    No part knows the session: each is given the others that it needs.
    """

    def __init__(self) -> None:
        self.record = Record()
        self.pool = RankPool(self.record)
        self.findings = LastFindings()
        self.runs = RunRegistry(self.record, self.pool, self.findings)
        self.setup = SetUp(self.record, self.pool, self.runs, self.findings)
        self.construction = DdpConstruction(self.record, self.pool, self.runs, self.findings)
        self.stepping = Stepping(self.record, self.runs, self.setup, self.construction)
        self.breakpoints = Breakpoints(self.record, self.pool, self.runs)
        self.runs.before_run = self.breakpoints.run_begins
        self.runs.breakpoints_of = self.breakpoints.of_rank
        self.looking = Looking(self.record, self.pool, self.runs)
        self.values = Values(self.record, self.pool, self.runs)
        self.overview = Where(self.record, self.pool)
        self.diagnosis = Why(self.runs, self.setup, self.findings, self.record)
        self.benchmarks = Benchmarks(self.record, self.pool, self.runs, self.setup)
        self.lab = FaultLab(self.record, self.pool, self.setup, self.runs, self.construction)

        # What programs call most. Each is documented where it stands: help(session.run_cell).
        self.init = self.setup.init
        self.set_up = self.setup.set_up
        self.restart = self.setup.restart
        self.abort = self.setup.abort
        self.shutdown = self.pool.shut_down
        self.run_cell = self.runs.run_cell
        self.run_script = self.runs.run_script
        self.wait = self.runs.wait
        self.where = self.overview.where
        self.why = self.diagnosis.diagnose
        self.why_now = self.diagnosis.diagnose_now
        self.variables = self.values.variables
        self.evaluate = self.looking.evaluate
        self.push = self.values.push
        self.pull = self.values.pull
        self.wrap = self.construction.wrap
        self.bench = self.benchmarks.collectives
        self.bench_steps = self.benchmarks.training_steps
        self.fault = self.lab.fault
        self.repair = self.lab.repair
        self.output = self.values.output

    replay = staticmethod(Replay.read)

    @property
    def running(self) -> bool:
        """True while there are ranks."""
        return self.pool.processes is not None

    @property
    def ready(self) -> bool:
        """True while there are ranks whose setup is complete."""
        return self.running and self.setup.complete

    @property
    def options(self) -> InitOptions:
        """The options with which the ranks were set up. Raises NoSession, SessionLost."""
        return self.pool.need("%ddp_fault").options

    def status(self) -> Board:
        """Return the board now; while ranks run that a script has started itself, theirs."""
        return self.overview.board(self.runs, self.setup.store)

    def step(
        self, ranks: Ranks | None = None, to: str | None = None, how: How = How.NEXT
    ) -> StepTable:
        """Move paused ranks one stage, one line or one collective on; or through all up to `to`.

        `how`: from a line, to the next one, into a call, or out of the function.
        Returns when each has arrived, or can only wait for others. Raises UsageMistake.
        """
        self.breakpoints.ranks_move()
        return self.looking.with_watched(self.stepping.step(Step(ranks, to, how)))

    def save(
        self, path: str | os.PathLike[str], *, output: bool = False, force: bool = False
    ) -> SavedRun:
        """Write the run to `path`, to be read with `Session.replay`; return what was written.

        Also after the session was lost. The file is readable by this user alone and written
        atomically. It contains the ranks' output only with `output`; an existing file is replaced
        only with `force`. Raises UsageMistake when it cannot be written there, NoSession when there
        is nothing.
        """
        target = check_target(path, force)
        if not self.record.snapshot.ranks:
            raise NoSession("%ddp_save")
        case, found = None, None
        # A lost session has no ranks to ask; its record is saved nevertheless.
        # A session that is ending closes its connections during the calls.
        with contextlib.suppress(NoSession, SessionLost, OSError):
            case = self.diagnosis.case("%ddp_save")
            found = self.diagnosis.diagnose()
        run = self.runs.current
        script, cell = (run.script, run.cell) if run is not None else ("", 0)
        kept = self.record.kept()
        saved = saved_run(*kept, case, found, script=script, run=cell, output=output)
        write(target, saved, force)
        return saved

    def mesh(self) -> Mesh | None:
        """Return the mesh that the ranks have made, if any. Raises NoSession, SessionLost."""
        return self.diagnosis.mesh() or self.overview.mesh_of_models()

    def layout(self, ranks: Ranks | None = None) -> MeshLayout:
        """Return the mesh, and what `ranks` (all by default) hold of each parameter. Any time.

        Raises UsageMistake where there is neither, NoSession, SessionLost.
        """
        self.pool.need("%ddp_mesh")
        return self.overview.layout(self.diagnosis.mesh(), ranks)
