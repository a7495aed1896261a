"""The session's verbs of set-up: step through it, ask why, give it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.errors import SessionLost, SetupFailed, UsageMistake
from ddp_notebook.model import Board, Diagnosis, Ranks, Stage, Status, StepTable
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.interrupts import noted

if TYPE_CHECKING:
    from ddp_notebook.session.bringup import BringUp
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.setup import Processes


class SetupVerbs:
    """Mixed into `Session`."""

    record: Record
    _processes: Processes | None
    _bringup: BringUp | None

    def status(self) -> Board:
        """The board now."""
        raise NotImplementedError

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    # -- setting up ----------------------------------------------------------------------

    @property
    def _half_way(self) -> bool:
        """True when there are ranks whose set-up did not come to its end."""
        states = self.record.snapshot.ranks
        return bool(states) and any(
            (s.stage is not Stage.VERIFIED and s.status is not Status.DEAD)
            or (s.status is Status.DEAD and s.stage in (None, Stage.LAUNCHED))
            for s in states
        )

    def _set_up(self, options: InitOptions) -> Board:
        """Take the ranks through set-up, or stop before it. They stay whatever comes of it."""
        bringup = self._bringup
        assert bringup is not None
        try:
            with noted() as interrupted:
                if options.step:
                    bringup.prepare(options.settings, options.store)
                else:
                    bringup.run(options.settings, options.store, interrupted)
        except KeyboardInterrupt:
            self._give_up(bringup.everyone)
            raise SetupFailed(
                "Set-up was interrupted. The ranks are idle and keep their variables. "
                "Try again with %ddp_init.",
                self.status(),
            ) from None
        except SetupFailed as failure:
            failure.board = self.status()
            raise
        return self.status()

    def _set_up_again(self, options: InitOptions) -> Board:
        """Once more with ranks whose set-up failed: in place, as far as their processes live."""
        bringup, processes = self._bringup, self._processes
        assert bringup is not None and processes is not None
        self._give_up(bringup.everyone)
        dead = self.record.snapshot.with_status(Status.DEAD)
        if dead:
            processes.stop(dead)
            processes.launch(dead)
        if not options.same_store(processes.options):
            processes.move_store(options)
        processes.options = options
        return self._set_up(options)

    def _give_up(self, ranks: Ranks) -> Ranks:
        """Free ranks from what blocks them; those that needed a new process for it."""
        bringup, processes = self._bringup, self._processes
        assert bringup is not None and processes is not None
        stuck = bringup.free(ranks)
        if stuck:
            processes.stop(stuck)
            processes.launch(stuck)
        return stuck

    # -- verbs ---------------------------------------------------------------------------

    def step(self, ranks: Ranks | None = None, to: str | None = None) -> StepTable:
        """Move paused ranks one stage on, or through all stages up to `to`.

        Returns when each has arrived, or can only wait for others. Raises UsageMistake.
        """
        from ddp_notebook.session.stepping import step

        self._need("%ddp_step")
        assert self._bringup is not None
        if ranks is not None:
            check_ranks(ranks, self.record.snapshot)
        stages = {stage.value: stage for stage in Stage}
        if to is not None and to not in stages:
            raise UsageMistake(f"--to is one of {', '.join(list(stages)[1:])}, not {to!r}.")
        with noted() as interrupted:
            return step(self._bringup, ranks, stages[to] if to else None, interrupted)

    def step_table(self) -> StepTable:
        """Where the ranks stand in set-up."""
        from ddp_notebook.session.stepping import table

        self._need("%ddp_step")
        assert self._bringup is not None
        return table(self._bringup)

    def why(self) -> Diagnosis:
        """What is wrong with the ranks, as far as can be told now. From any thread, any time."""
        self._need("%ddp_why")
        assert self._bringup is not None
        return self._bringup.diagnose()

    def abort(self, ranks: Ranks | None = None) -> Board:
        """Free ranks that are blocked in set-up, a cell or a script; the board after it.

        Ranks that nothing else frees get new processes. When every rank had a process
        group, it is built anew.
        """
        processes = self._need("%ddp_abort")
        bringup = self._bringup
        assert bringup is not None
        members = ranks if ranks is not None else bringup.everyone
        check_ranks(members, self.record.snapshot)
        had_group = not self._half_way
        restarted = self._give_up(members)
        if restarted:
            self.record.note(notes=(*self.record.snapshot.notes, _restarted_text(restarted)))
        if self.record.snapshot.ended:
            raise SessionLost(f"{self.record.snapshot.ended} Start again: %ddp_init")
        if had_group and not self.record.snapshot.with_status(Status.DEAD, Status.RUNNING):
            return self._set_up(processes.options)
        return self.status()


def _restarted_text(ranks: Ranks) -> str:
    from ddp_notebook.model import name_ranks

    return f"Nothing else could free {name_ranks(ranks)}: new processes, their variables are gone."
