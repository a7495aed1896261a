"""Brings ranks up, sets them up again, and frees them: init, restart and abort."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import SessionLost, SetupFailed, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Board,
    Category,
    Diagnosis,
    Ranks,
    Snapshot,
    Stage,
    Status,
    agree,
    are,
    exit_text,
    format_ranks,
    name_ranks,
    verb,
)
from ddp_notebook.session import preflight
from ddp_notebook.session.bring_up import BringUp
from ddp_notebook.session.findings import SET_UP, Found
from ddp_notebook.session.guards import check_ranks, living
from ddp_notebook.session.interrupts import deferred, noted
from ddp_notebook.session.pool import launch_mode
from ddp_notebook.views.board_rows import board

if TYPE_CHECKING:
    from ddp_notebook.launch.devices import DevicePlan
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.options import InitOptions
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.session_processes import Processes

_IDLE_WITHIN_S = 2.0
"""How long ranks that waited for an ended one have to fail."""


class SetUp:
    """Owns the process group of a session: builds it, rebuilds it, and unblocks its ranks."""

    def __init__(
        self, record: Record, pool: RankPool, runs: RunRegistry, findings: LastFindings
    ) -> None:
        self.bring_up: BringUp | None = None
        """The stages of the ranks that there are; None before the first start."""
        self.replaced: tuple[str, ...] = ()
        """The board's notes about the processes that were last replaced, because ranks were blocked
        or dead."""
        self._record = record
        self._pool = pool
        self._runs = runs
        self._findings = findings
        self._freeing = threading.RLock()
        """Held while ranks are unblocked: no setup may begin on them before that is over."""

    @property
    def store(self) -> str:
        """Who hosts the store of the group: session or rank0."""
        return self.bring_up.store if self.bring_up is not None else "session"

    @property
    def half_way(self) -> bool:
        """True when there are ranks whose setup is not complete."""
        return any(
            (s.stage is not Stage.VERIFIED and s.status is not Status.DEAD)
            or (s.status is Status.DEAD and s.stage in (None, Stage.LAUNCHED))
            for s in self._record.snapshot.ranks
        )

    @property
    def complete(self) -> bool:
        """True when every living rank has a process group, as far as is known."""
        return not (self.half_way or self._record.snapshot.groupless)

    def need(self, verb: str) -> BringUp:
        """Return the stages of the ranks, for `verb` to work on. Raises NoSession, SessionLost."""
        self._pool.need(verb)
        assert self.bring_up is not None
        return self.bring_up

    def as_before(self) -> InitOptions:
        """Return the options of the ranks' setup, without what was changed on single ranks."""
        return replace(self._pool.need("%ddp_init").options, settings={}, step=False)

    def _board(self) -> Board:
        return board(self._record.snapshot)

    @property
    def _everyone(self) -> Ranks:
        return tuple(range(self._record.snapshot.world_size))

    # -- starting ------------------------------------------------------------------------

    def init(self, options: InitOptions, *, replace: bool = False) -> Board:
        """Start the ranks and bring torch.distributed up; returns when it is verified.

        With `options.step` it returns before the first stage. Ranks whose setup failed before
        are set up again in place. `replace` ends existing ranks first. Raises UsageMistake for
        options that cannot work, SetupFailed when setup cannot succeed; started ranks are kept.
        """
        with self._interrupted_in_words("%ddp_init"):
            processes = self._pool.processes
            why_anew = ""
            if processes is not None and not self._pool.lost_reason and not replace:
                dead = self._record.snapshot.with_status(Status.DEAD)
                # Ranks whose setup failed are set up again in place: they have torch loaded, and
                # keep their variables. That some have died is no hindrance, as these are replaced
                # on the way.
                if self.complete and len(dead) < self._record.snapshot.world_size:
                    raise UsageMistake(_running_already(options, self._record.snapshot))
                if options.same_processes(processes.options):
                    self._findings.begin(Found(SET_UP))
                    try:
                        self.make_ready()
                        processes.adopt(options)
                        return self._set_up(options)
                    except SessionLost:  # it was lost before, and only now is that known
                        why_anew = (
                            "All processes are new, without variables: those before had ended."
                        )
            preflight.check_package()
            preflight.check_versions()
            devices = self._pool.plan(options)  # first: an impossible plan costs no ranks
            if processes is None:
                preflight.check_start(options.world_size, far=bool(options.hosts))
            self._findings.begin(Found(SET_UP))
            if processes is not None and not self._pool.lost_reason and replace:
                lacking = options.world_size - len(living(self._everyone, self._record.snapshot))
                preflight.check_processes("%ddp_init --replace", ranks=max(0, lacking))
                why_anew = processes.why_not_kept(options)
                if not why_anew:
                    return self._resize(processes, options, devices)
                why_anew = f"All processes are new, without variables: {why_anew}."
            with deferred():
                self._pool.close("New ranks were started.")
            self._start(options, devices, why_anew)
            return self._set_up(options)

    def _resize(self, processes: Processes, options: InitOptions, devices: DevicePlan) -> Board:
        """Replace the existing ranks; those that stay keep their variables."""
        states, device_of = self._record.snapshot.ranks, processes.devices.environment
        kept = {
            rank
            for rank, environment in enumerate(devices.environment[: len(states)])
            if states[rank].status is not Status.DEAD and device_of[rank] == environment
        }
        ended = tuple(state.rank for state in states if state.rank not in kept)
        under_way = [run.heading for run in self._runs.all if run.state.claimed]
        processes.end_script()
        with self._unless_lost("%ddp_init"), self._record.restarting(ended):
            # Those that go end first: ranks that stay may wait for them in a collective, and torch
            # lets them out once the connection is closed. The others are then freed for certain.
            processes.stop(ended)
            blocked = self.free(tuple(sorted(kept)))
            self._runs.await_released()
            # In one piece: between the two halves options and record have different world sizes.
            with deferred():
                self._runs.reset()
                processes.adopt(options)
                processes.resize(tuple(kept), devices)
        stayed, now = kept - set(blocked), set(range(options.world_size))
        over, new = sorted({*ended, *blocked} - now), sorted(now - stayed)
        parts = []
        if stayed:
            their = agree(stayed, "its variables", "their variables")
            parts.append(f"{name_ranks(sorted(stayed))} stayed, with {their}")
        if over:
            parts.append(f"{verb(over, 'has', 'have')} ended")
        if new:
            parts.append(f"{verb(new, 'is', 'are')} new")
        text = "; ".join(parts)
        note = f"{text[:1].upper()}{text[1:]}. Fresh processes for all: %ddp_restart"
        self._record.note(notes=(*devices.notes, *options.notes()))
        self._note_replaced((*(f"{run} ran, and was ended by this." for run in under_way), note))
        return self._set_up(options)

    def _start(self, options: InitOptions, devices: DevicePlan, why_anew: str) -> None:
        """Start the processes. When that fails nothing is left of them."""
        self._pool.lost_reason = ""
        self._runs.reset()
        notes = (*devices.notes, *options.notes(), *filter(None, [why_anew]))
        self._record.begin(options.world_size, backend=devices.backend, notes=notes)
        mode = launch_mode(options.launcher)
        try:
            processes = self._pool.open(options, devices, mode)
            self.bring_up = BringUp(processes, self._record)
            processes.start()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # nothing may be left
            # Whatever it was, and wherever an interrupt came: nothing was run on these ranks, so
            # there are no variables to save, and ending all of them leaves no half-started one.
            with noted():  # an impatient user interrupts again
                failed, lost = self._board(), self._pool.lost_reason
                self._pool.close("The ranks could not be started.")
                self._record.note(ended="setup did not finish.", loading=None)
                if mode == "fork":
                    self._pool.warm_fork_server(mode)  # for the next try
                why = preflight.why_not_started(SessionLost(lost) if lost else error)
            raise SetupFailed(why, failed) from None

    # -- setting up ----------------------------------------------------------------------

    def set_up(self, options: InitOptions) -> Board:
        """Take the ranks that there are through setup again. Raises SetupFailed."""
        self._findings.begin(Found(SET_UP))
        self.make_ready()
        with self._interrupted_in_words("%ddp_init"):
            return self._set_up(options)

    def make_ready(self) -> None:
        """Unblock every rank and replace dead ones, so that all accept calls."""
        bring_up = self.need("%ddp_fault")
        with self._interrupted_in_words("Setup"):
            bring_up.processes.end_script()
            blocked = self.free(bring_up.everyone)
            self._runs.await_released()
            unblocked = [_not_unblocked(blocked)] if blocked else []
            self._note_replaced((*unblocked, *self._replace_dead(bring_up.everyone)))

    def _set_up(self, options: InitOptions) -> Board:
        """Take the ranks through setup, or stop before it. They stay whatever the outcome."""
        bring_up = self.bring_up
        assert bring_up is not None
        try:
            with noted() as interrupted:
                if options.step:
                    bring_up.prepare(options.settings, options.store)
                else:
                    self._bring_up(bring_up, options, interrupted)
        except KeyboardInterrupt:
            now = bring_up.diagnose()  # freed ranks no longer show the problem
            unsure = "" if now.wrong else "No problem was found before setup was interrupted."
            self._keep(replace(now, unsure=unsure))
            replaced = self.free(bring_up.everyone)
            note = _not_unblocked(replaced) if replaced else "They keep their variables."
            raise SetupFailed(
                f"Setup was interrupted. The ranks are idle. {note} Try again with %ddp_init.",
                self._board(),
            ) from None
        except SetupFailed as failure:
            failure.board = self._board()
            if failure.diagnosis is not None and failure.diagnosis.findings:
                self._keep(failure.diagnosis)
            raise
        return self._board()

    def _keep(self, diagnosis: Diagnosis) -> None:
        """Keep why setup failed, also where it was done for a script or an abort."""
        found = Found(SET_UP)
        found.take(diagnosis)
        self._findings.begin(found)

    def _bring_up(
        self, bring_up: BringUp, options: InitOptions, interrupted: Callable[[], bool]
    ) -> None:
        """Set up in one go; retries with another port if another process took the chosen one."""
        for pause_s in (0.1, 0.4, 1.6):
            try:
                return bring_up.run(options.settings, options.store, interrupted)
            except SetupFailed as failure:
                # Rank 0 binds the port a while after it was found free here, so another process may
                # come between. Only a port that was chosen here may be another one: of what the
                # user named, or changed on a rank, the error is what is to be seen.
                ours = options.store == "rank0" and not options.master_port and not options.settings
                findings = failure.diagnosis.findings if failure.diagnosis is not None else ()
                if not ours or not any(f.category is Category.PORT_IN_USE for f in findings):
                    raise
                self.free(bring_up.everyone)
                time.sleep(pause_s * random.random())  # noqa: S311
        return bring_up.run(options.settings, options.store, interrupted)

    # -- freeing -------------------------------------------------------------------------

    def free(self, ranks: Ranks) -> Ranks:
        """Unblock ranks; returns those that needed a new process for it."""
        bring_up = self.bring_up
        assert bring_up is not None
        with self._freeing:
            runs = [run for run in self._runs.all if not run.done and set(run.ranks) & set(ranks)]
            for run in runs:
                run.abort()

            def begun() -> bool:
                return all(set(run.pending) & set(ranks) <= run.events.started for run in runs)

            # Until a rank's CellStarted event has arrived, it looks idle. On a quiet machine that
            # takes much less than this from sending the cell.
            self._record.wait_for(begun, scaled_for_load(0.5))
            for run in runs:
                run.signal_started()
                run.end_started_ranks()
            # Runs first, then setup: a rank in a cell leaves it by a signal, one in a stage by a
            # request at its control socket. What does neither, as C code that never returns to
            # Python does not, can only be ended; its variables are the price of a group that works.
            blocked = bring_up.free(ranks)
            bring_up.processes.replace(blocked)
            return blocked

    def abort(self, ranks: Ranks | None = None) -> Board:
        """Unblock ranks that hang in setup, a cell or a script; returns the board afterwards.

        Ranks that cannot be unblocked get new processes, as do dead ones; the board's notes say
        which, and why. If every rank had a process group, it is rebuilt.
        """
        bring_up = self.need("%ddp_abort")
        members = ranks if ranks is not None else bring_up.everyone
        check_ranks(members, self._record.snapshot)
        with self._interrupted_in_words("%ddp_abort"):
            script = bring_up.processes.script
            if script is not None and self._runs.in_script:
                self._unblock(bring_up, script.ranks)  # it is one job: it ends on all its ranks
                self._runs.await_released()
                bring_up.processes.end_script()
                return self._board()
            bring_up.processes.end_script()
            # Asked before anything is freed: to be freed costs a rank its group, and afterwards all
            # look as if their setup had not been complete.
            had_group = not self.half_way
            self._note_replaced((*self._unblock(bring_up, members), *self._replace_dead(members)))
            self._record.check_not_lost()
            self._runs.await_released()
            if had_group and not self._record.snapshot.with_status(Status.DEAD, Status.RUNNING):
                return self._set_up(self.as_before())
            return self._board()

    def _unblock(self, bring_up: BringUp, members: Ranks) -> list[str]:
        """Free `members`; return a note about those that needed a new process for it."""
        blocked = self.free(members)
        # A stopped process is not always known to be in a cell: it may have been idle, or its
        # event that it began one may not have left it.
        stopped = bring_up.stopped(members)
        bring_up.processes.replace(stopped)
        replaced = tuple(sorted({*blocked, *stopped}))
        return [_not_unblocked(replaced)] if replaced else []

    def _note_replaced(self, replaced: tuple[str, ...]) -> None:
        """Note on the board which processes were replaced, in place of the previous notes."""
        others = [note for note in self._record.snapshot.notes if note not in self.replaced]
        self.replaced = replaced
        self._record.note(notes=(*others, *replaced))

    def _replace_dead(self, members: Ranks) -> list[str]:
        """Give new processes to those of `members` that are dead; return a note for each."""
        states = self._record.snapshot.ranks
        dead = tuple(rank for rank in members if states[rank].status is Status.DEAD)
        if dead and not self._record.snapshot.ended:
            self._pool.need("%ddp_abort").replace(dead)
        return [
            f"Rank {rank} was dead ({exit_text(states[rank].exit_code or 0)}). Its process was "
            "replaced; its variables are lost."
            for rank in dead
        ]

    # -- beginning again -----------------------------------------------------------------

    def restart(self, ranks: Ranks | None = None) -> Board:
        """Give `ranks` (all, by default) new processes and rebuild the group.

        The other ranks keep their processes and variables. Raises SetupFailed, and
        UsageMistake when another rank is dead, or in a cell that a thread waits for.
        """
        processes = self._pool.need("%ddp_restart")
        snapshot = self._record.snapshot
        members = ranks if ranks is not None else self._everyone
        check_ranks(members, snapshot)
        dead = len({*members} - {*living(members, snapshot)})
        preflight.check_processes("%ddp_restart", ranks=dead)
        processes.end_script()
        survivors = tuple(rank for rank in self._everyone if rank not in members)
        in_stages = self._record.snapshot.with_status(Status.SETTING_UP, Status.PAUSED)
        in_set_up = tuple(sorted({*survivors}.intersection(in_stages)))
        paused = tuple(sorted({*survivors}.intersection(self._runs.paused())))
        with self._interrupted_in_words("%ddp_restart"):
            with self._unless_lost("%ddp_restart"), self._record.restarting(members):
                self._runs.restarts(members)
                if paused:  # nothing else would let them leave their cell
                    self.free(paused)
                processes.stop(members)
                if in_set_up:  # they wait for the old group and must be unblocked
                    self.free(in_set_up)
                self._await_survivors(survivors, members)
                self._runs.await_released()
                freed: tuple[str, ...] = ()
                if paused:
                    who = verb(paused, "was", "were").capitalize()
                    their = agree(paused, "its", "their")
                    freed = (f"{who} paused: {their} cell was aborted, {their} variables stay.",)
                self._note_replaced(freed)
                processes.launch(members)
            return self._set_up(self.as_before())

    @contextmanager
    def _interrupted_in_words(self, what: str) -> Iterator[None]:
        """Turn an interrupt inside the context into SetupFailed: what is left, and what to type.

        Wherever it comes, a rank has a process, or is known to be dead: processes are ended and
        started in `deferred` pieces. So what is left can be read from the state.
        """
        try:
            yield
        except KeyboardInterrupt:
            snapshot = self._record.snapshot
            dead = snapshot.with_status(Status.DEAD)
            if self._pool.processes is None:
                left = "Nothing is left running. Try again with %ddp_init."
            elif dead:
                back = f"%ddp_restart --ranks {format_ranks(dead)}"
                left = f"{verb(dead, 'has', 'have').capitalize()} no process now. Start: {back}"
            elif self.half_way:
                left = "Every rank has its process. To set them up again: %ddp_init"
            else:
                left = "The ranks are as they were."
            raise SetupFailed(f"{what} was interrupted. {left}", self._board()) from None

    @contextmanager
    def _unless_lost(self, verb: str) -> Iterator[None]:
        """Turn an error inside the context into the reason why the session was lost, if it was."""
        try:
            yield
        except (OSError, SessionLost):  # its folder or a connection is gone
            self._pool.need(verb)
            raise

    def _await_survivors(self, survivors: Ranks, stopped: Ranks) -> None:
        """Wait until ranks that waited for an ended one have failed and are idle.

        torch does not notify ranks that waited for one of these. They are unblocked, unless a
        thread waits for their cell.
        """

        def busy() -> Ranks:
            running = self._record.snapshot.with_status(Status.RUNNING)
            return tuple(rank for rank in survivors if rank in running)

        self._record.wait_for(lambda: not busy(), _IDLE_WITHIN_S)
        left = busy()
        if left and not any(run.state.claimed for run in self._runs.all):
            self.free(left)
            self._record.wait_for(lambda: not busy(), _IDLE_WITHIN_S)
            left = busy()
        dead = self._record.snapshot.with_status(Status.DEAD)
        others = tuple(rank for rank in dead if rank not in stopped)
        if missing := left or others:  # a group needs every rank
            where, then = "dead", "Restart"
            if left:
                where = "still in a cell"
                then = "Free them with their variables: %ddp_abort. Or restart"
            ended = verb(
                stopped, "was ended and has no new process", "were ended and have no new processes"
            )
            raise UsageMistake(
                f"{ended[:1].upper()}{ended[1:]} yet. The group needs every rank, and "
                f"{name_ranks(missing)} {are(missing)} {where}. {then} them together: "
                f"%ddp_restart --ranks {format_ranks((*stopped, *left, *others))}"
            )


def _running_already(options: InitOptions, known: Snapshot) -> str:
    """Say that `%ddp_init` has nothing to start, and how to have what `options` ask for."""
    size, busy = known.world_size, known.with_status(Status.RUNNING)
    other = ""
    if options.world_size != size:
        other = (
            ". Another number of ranks, of which those that stay keep their variables: "
            f"%ddp_init --world-size {options.world_size} --replace"
        )
    if dead := known.with_status(Status.DEAD):
        back = f"%ddp_restart --ranks {format_ranks(dead)}"
        return f"{name_ranks(dead).capitalize()} {are(dead)} dead. To bring back: {back}{other}"
    where = f", and {name_ranks(busy)} still in a cell (to free: %ddp_abort)" if busy else ""
    return f"{size} ranks are running already{where}. Fresh ranks: %ddp_restart{other}"


def _not_unblocked(ranks: Ranks) -> str:
    """Say that `ranks` have new processes because nothing else could unblock them."""
    replaced = agree(ranks, "Its process was replaced; its", "Their processes were replaced; their")
    return (
        f"{name_ranks(ranks).capitalize()} could not be unblocked. {replaced} variables are lost."
    )
