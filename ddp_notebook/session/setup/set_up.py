"""The session's verbs of set-up: step through it, ask why, give it up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import SessionLost, SetupFailed, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Board,
    Case,
    Category,
    Diagnosis,
    Ranks,
    Stage,
    Status,
    StepTable,
    format_ranks,
    name_ranks,
)
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.runs import post_run
from ddp_notebook.session.runs.collective_steps import END
from ddp_notebook.session.runs.registry import Underway
from ddp_notebook.session.runs.wait import stop_started
from ddp_notebook.session.runs.watch import look_at_cell
from ddp_notebook.session.tools.lab import LabVerbs
from ddp_notebook.state.board import exit_text

if TYPE_CHECKING:
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.script import ScriptRun
    from ddp_notebook.session.setup.bring_up import BringUp
    from ddp_notebook.session.tools.ddp_construction import Wrap, WrapOptions


_NOT_FREED = "Nothing but a new process could free"
_REPLACED = "A new process has taken the place of"
_BEGUN_WITHIN_S = 0.5
"""On a quiet machine, from sending a cell to a rank's word that it began."""


class SetupVerbs(Underway, LabVerbs):
    """Mixed into `Session`."""

    record: Record
    _processes: Processes | None
    _bringup: BringUp | None
    _script: ScriptRun | None
    wrapping: Wrap | None
    seen_late: Diagnosis | None
    """What the last script's ranks waited for when one was only late; None when none was."""

    def status(self) -> Board:
        """The board now."""
        raise NotImplementedError

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    def _next_cell(self) -> int:
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
                    self._run_set_up(bringup, options, interrupted)
        except KeyboardInterrupt:
            lost = self._give_up(bringup.everyone)
            kept = f"{_NOT_FREED} {name_ranks(lost)}." if lost else "They keep their variables."
            raise SetupFailed(
                f"Set-up was interrupted. The ranks are idle. {kept} Try again with %ddp_init.",
                self.status(),
            ) from None
        except SetupFailed as failure:
            failure.board = self.status()
            raise
        return self.status()

    def _run_set_up(
        self, bringup: BringUp, options: InitOptions, interrupted: Callable[[], bool]
    ) -> None:
        """Set-up in one go. A port that we chose and that somebody else was faster to take is
        chosen anew."""
        for pause_s in (0.1, 0.4, 1.6):
            try:
                return bringup.run(options.settings, options.store, interrupted)
            except SetupFailed as failure:
                ours = options.store == "rank0" and not options.master_port and not options.settings
                found = failure.diagnosis.findings if failure.diagnosis is not None else ()
                if not ours or not any(f.category is Category.PORT_IN_USE for f in found):
                    raise
                self._give_up(bringup.everyone)
                time.sleep(pause_s * random.random())  # noqa: S311
        return bringup.run(options.settings, options.store, interrupted)

    def _set_up_again(self, options: InitOptions) -> Board:
        """Once more with ranks whose set-up failed: in place, as far as their processes live."""
        processes = self._need("%ddp_init")
        self.make_ready()
        moved = not options.same_store(processes.options)
        processes.options = options
        if moved and options.init_method != "file":
            processes.open_store()
        return self._set_up(options)

    def _give_up(self, ranks: Ranks) -> Ranks:
        """Free ranks from what blocks them; those that needed a new process for it."""
        with self._freeing:
            return self._free(ranks)

    def _free(self, ranks: Ranks) -> Ranks:
        bringup, processes = self._bringup, self._processes
        assert bringup is not None and processes is not None
        given_up = [run for run in self.runs if not run.done and set(run.ranks) & set(ranks)]
        for run in given_up:
            run.interrupted = True

        def begun() -> bool:
            return all(set(run.pending) & set(ranks) <= run.started for run in given_up)

        # Until a rank's word that it began has arrived it passes for one that waits for a cell.
        self.record.wait_for(begun, scaled_for_load(_BEGUN_WITHIN_S))
        for run in given_up:
            stop_started(run, processes.cluster)
        stuck = bringup.free(ranks)
        processes.replace(stuck)
        if set(bringup.everyone) <= set(ranks):
            processes.close_lab()
        return stuck

    # -- verbs ---------------------------------------------------------------------------

    def step(self, ranks: Ranks | None = None, to: str | None = None) -> StepTable:
        """Move paused ranks one stage, or one collective, on; or through all up to `to`.

        Returns when each has arrived, or can only wait for others. Raises UsageMistake.
        """
        from ddp_notebook.session.setup.stepping import step

        processes = self._need("%ddp_step")
        assert self._bringup is not None
        if ranks is not None:
            check_ranks(ranks, self.record.snapshot)
        run = self.current
        if run is not None and run.held and not (run.done and self._half_way):
            from ddp_notebook.session.runs import collective_steps

            with noted() as interrupted:
                table = collective_steps.step(run, processes, self.record, ranks, to, interrupted)
                self._await_put_down()
                return table
        if run is not None and run.pending and not self._half_way:
            raise UsageMistake(
                f"{run.heading} runs freely on {name_ranks(run.pending)}: its collectives are not "
                "held. From its beginning they can be: %%ddp --step collective, "
                "%ddp_run --step collective train.py"
            )
        if self.wrapping is not None and not self._half_way:
            return self._step_wrapping(self.wrapping, ranks, to)
        stages = {stage.value: stage for stage in Stage} | {END: Stage.VERIFIED}
        if to is not None and to not in stages:
            raise UsageMistake(f"--to is one of {', '.join(list(stages)[1:])}, not {to!r}.")
        with noted() as interrupted:
            return step(self._bringup, ranks, stages[to] if to else None, interrupted)

    def _step_wrapping(self, wrapping: Wrap, ranks: Ranks | None, to: str | None) -> StepTable:
        if wrapping.stage is None:
            raise UsageMistake(
                "There is nothing to step: set-up and %ddp_wrap are complete. The buckets "
                "after a training step: %ddp_wrap --buckets"
            )
        if ranks is not None:
            raise UsageMistake("A stage of %ddp_wrap takes every rank: type %ddp_step")
        stages = {stage.value: stage for stage in WrapStage} | {END: WrapStage.REDUCER}
        if to is not None and to not in stages:
            raise UsageMistake(
                f"{wrapping.name} is being wrapped: --to is one of {', '.join(stages)}, not {to!r}."
            )
        return wrapping.step(stages[to] if to is not None else None)

    def step_table(self) -> StepTable:
        """Where the ranks stand in set-up."""
        from ddp_notebook.session.setup.stepping import table

        self._need("%ddp_step")
        assert self._bringup is not None
        return table(self._bringup)

    def why(self) -> Diagnosis:
        """What is wrong with the ranks, as far as can be told now. From any thread, any time."""
        found = diagnose_run(self._look("%ddp_why"))
        if found.findings or self.current is None or self._processes is None or self._half_way:
            return found
        silent = post_run.examine(self.current, self._processes)
        return found if silent is None else replace(found, findings=silent.findings)

    def _look(self, verb: str) -> Case:
        """What is known of the ranks, and of what they run or ran last, as it is now."""
        processes = self._need(verb)
        assert self._bringup is not None
        if self._script is not None:
            return self._script.look()
        if self.current is not None and not self._half_way:
            return look_at_cell(self.current, processes, self.record)
        return self._bringup.look()

    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """Versions and environment of each rank that answers, for `%ddp_doctor`."""
        processes = self._need("%ddp_doctor")
        everyone = tuple(range(self.record.snapshot.world_size))
        answers = processes.cluster.ask(everyone, "facts", 10.0)
        return {rank: dict(facts) for rank, facts in answers.items() if "error" not in facts}

    # -- DDP -----------------------------------------------------------------------------

    def wrap(self, name: str, options: WrapOptions) -> Wrap:
        """Take a model on the ranks through DDP's construction; of a wrapped one, its buckets.

        Raises UsageMistake before anything is done, CellInterrupted.
        """
        from ddp_notebook.session.tools.ddp_construction import wrap

        cluster = self._need("%ddp_wrap").cluster
        self._idle(None, "%ddp_wrap")
        self.wrapping = wrap(cluster, self.record, None, name, options, self.wrapping)
        return self.wrapping

    # -- beginning again -----------------------------------------------------------------

    def restart(self, ranks: Ranks | None = None) -> Board:
        """Give `ranks` (all, by default) new processes and build the group anew.

        The other ranks keep their processes and variables. Raises SetupFailed, and
        UsageMistake when another rank is dead, or in a cell that somebody waits for.
        """
        processes = self._need("%ddp_restart")
        everyone = tuple(range(self.record.snapshot.world_size))
        members = ranks if ranks is not None else everyone
        check_ranks(members, self.record.snapshot)
        survivors = tuple(r for r in everyone if r not in members)
        unset = self._in_set_up(survivors)
        processes.stop(members)
        if unset:  # they wait for the old group, and nothing else ends that
            self._give_up(unset)
        self._await_survivors(survivors, members)
        self._script = None
        self._await_put_down()
        processes.launch(members)
        return self._set_up(replace(processes.options, settings={}, step=False))

    def _in_set_up(self, ranks: Ranks) -> Ranks:
        """Those of `ranks` that are in set-up, or held in it."""
        states = self.record.snapshot.ranks
        within = (Status.SETTING_UP, Status.PAUSED)
        return tuple(rank for rank in ranks if states[rank].status in within)

    def _await_survivors(self, survivors: Ranks, stopped: Ranks) -> None:
        """Ranks that waited for a stopped one fail now; wait until they are idle.

        Those that waited for one of these are not told by torch. They are freed, unless
        somebody waits for their cell.
        """

        def busy() -> Ranks:
            states = self.record.snapshot.ranks
            return tuple(r for r in survivors if states[r].status is Status.RUNNING)

        self.record.wait_for(lambda: not busy(), 2.0)
        left = busy()
        if left and not any(run.in_hand for run in self.runs):
            self._give_up(left)
            self.record.wait_for(lambda: not busy(), 2.0)
            left = busy()
        dead = self.record.snapshot.with_status(Status.DEAD)
        others = tuple(r for r in dead if r not in stopped)
        if left or others:
            both = format_ranks((*stopped, *left, *others))
            verb = "is" if len(left or others) == 1 else "are"
            where = "still in a cell" if left else "dead"
            free = "Free them with their variables: %ddp_abort. Or restart" if left else "Restart"
            raise UsageMistake(
                f"The group needs every rank, and {name_ranks(left or others)} {verb} {where}. "
                f"{free} them together: %ddp_restart --ranks {both}"
            )

    # -- getting ranks back --------------------------------------------------------------

    def abort(self, ranks: Ranks | None = None) -> Board:
        """Free ranks that are blocked in set-up, a cell or a script; the board after it.

        Ranks that nothing else frees get new processes, and so do those that died: its notes
        say which, and why. When every rank had a process group, it is built anew.
        """
        processes = self._need("%ddp_abort")
        bringup = self._bringup
        assert bringup is not None
        members = ranks if ranks is not None else bringup.everyone
        check_ranks(members, self.record.snapshot)
        had_group = not self._half_way
        said = (_NOT_FREED, _REPLACED)
        notes = [n for n in self.record.snapshot.notes if not n.startswith(said)]
        script = next((run for run in self.runs if run.in_hand and run.script), None)
        restarted = self._give_up(members)
        # One that is stopped is not always known to be in anything: it may have been idle, or its
        # word that it began a cell may not have left it.
        stopped = bringup.stopped(members)
        processes.replace(stopped)
        if restarted := tuple(sorted({*restarted, *stopped})):
            notes.append(f"{_NOT_FREED} {name_ranks(restarted)}; variables are gone there.")
        notes += self._replace_dead(processes, members)
        self.record.note(notes=tuple(notes))
        if self.record.snapshot.ended:
            raise SessionLost(f"{self.record.snapshot.ended} Start again: %ddp_init")
        self._await_put_down()
        if script is not None and (script.in_hand or not self._half_way):
            return self.status()  # who waits for the script sets the ranks up when it is over
        if had_group and not self.record.snapshot.with_status(Status.DEAD, Status.RUNNING):
            self._script = None
            return self._set_up(replace(processes.options, settings={}, step=False))
        return self.status()

    def _replace_dead(self, processes: Processes, members: Ranks) -> list[str]:
        """New processes for those of `members` that are dead; a note for each."""
        states = self.record.snapshot.ranks
        dead = tuple(rank for rank in members if states[rank].status is Status.DEAD)
        if not self.record.snapshot.ended:
            processes.replace(dead)
        return [
            f"{_REPLACED} rank {rank} ({exit_text(states[rank].exit_code or 0)}); its variables "
            "are gone."
            for rank in dead
        ]
