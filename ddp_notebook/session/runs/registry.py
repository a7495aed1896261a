"""The runs of a session: whose ranks are taken, those that were detached, and waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.model import Ranks, name_ranks
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.interrupts import LOOK_EVERY_S, noted
from ddp_notebook.session.runs.collective_steps import Settling, held, table
from ddp_notebook.session.runs.run import CellResult, CellRun, SeeThrough
from ddp_notebook.session.runs.watch import Watch, was_sent

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.wait import Send

_ENDS_WITHIN_S = 10.0
"""How long the one who waits for a run may take to notice its end, and to clear up."""


class Detached:
    """A run whose end a thread of its own waits for."""

    def __init__(self, run: CellRun, see_through: SeeThrough) -> None:
        self.run = run
        self.ended: Future[CellResult] = Future()
        """How it ended; also with ranks in it, when these do not get on by themselves."""
        self.told = False
        """Somebody has seen how it ended."""
        self._stop = threading.Event()
        threading.Thread(
            target=self._work, args=(see_through,), name="ddp-detached", daemon=True
        ).start()

    def stop(self) -> None:
        """End it as an interrupt ends a cell that is waited for."""
        self._stop.set()

    def _work(self, see_through: SeeThrough) -> None:
        try:
            result = see_through(self._stop.is_set)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.ended.set_exception(error)
        else:
            self.ended.set_result(result)


class Underway:
    """Mixed into `Session`."""

    record: Record
    runs: list[CellRun]
    """The last run of every rank, and those that ranks are still in; the newest last."""
    detached: Detached | None
    """The run that was detached last."""
    _lock: threading.RLock
    _freeing: threading.RLock
    """Held while ranks are freed: no set-up may begin on them before that is over."""
    _processes: Processes | None

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    @property
    def current(self) -> CellRun | None:
        """The run that ranks are in, else the last one; the newest when there are several."""
        busy = (run for run in reversed(self.runs) if not run.done)
        return next(busy, self.runs[-1] if self.runs else None)

    # -- whose ranks -----------------------------------------------------------------------

    def _idle(self, ranks: Ranks | None, verb: str) -> Ranks:
        """The ranks a verb is for, all by default. Raises UsageMistake when one is not free."""
        taken = {rank: run.title for run in self.runs if run.in_hand for rank in run.pending}
        return idle_ranks(ranks, verb, self.record.snapshot, taken, self._held)

    def _held(self) -> Ranks:
        """The ranks that are held before a collective of the run that ranks are in."""
        run = self.current
        return held(run, self._need("%ddp_step")) if run is not None and run.held else ()

    def _take(
        self, ranks: Ranks | None, verb: str, make: Callable[[Ranks], CellRun], *, detach: bool
    ) -> CellRun:
        """A new run, in hand, which `make` makes of its ranks. Raises UsageMistake."""
        with self._lock:
            run = make(self._idle(ranks, verb))
            for other in self.runs:
                if other.in_hand:
                    self._check_beside(run, other, detach=detach)
            known = [*self.runs, run]
            last = {rank: each for each in known for rank in each.ranks}
            self.runs = [each for each in known if not each.done or each in last.values()]
            run.in_hand = True
            if self._processes is not None:
                self._processes.begin_words(run.ranks)
            return run

    def _check_beside(self, run: CellRun, other: CellRun, *, detach: bool) -> None:
        """Raises UsageMistake when `run` cannot be while `other` is, on other ranks.

        When a script ends, all ranks get a new group: none may be in another run meanwhile.
        """
        if run.script or other.script:
            raise UsageMistake(
                f"{other.heading} is not over on {name_ranks(other.ranks)}, and "
                f"{run.script or other.script} needs every rank: it ends with a new group for all. "
                "Wait: %ddp_wait. Or give it up: %ddp_abort"
            )
        if detach and self.detached is not None and other is self.detached.run:
            raise UsageMistake(
                f"{other.heading} is detached already, on {name_ranks(other.ranks)}; one run can "
                "be. Wait for it: %ddp_wait. Or leave --detach out."
            )

    def _put_down(self, run: CellRun) -> None:
        run.in_hand = False
        self.record.add(())

    def _await_put_down(self) -> None:
        """Wait until it is told how runs ended that are over, or were just given up."""

        def told() -> bool:
            ending = (run for run in self.runs if run.done or run.gone or run.interrupted)
            return not any(run.in_hand for run in ending)

        self.record.wait_for(told, _ENDS_WITHIN_S)

    # -- to the end --------------------------------------------------------------------------

    def _in_hand(
        self, run: CellRun, see_through: SeeThrough, given_up: Callable[[], bool]
    ) -> CellResult:
        """See a run through to its end; then its ranks are free for others."""
        run.in_hand = True
        try:
            return see_through(given_up)
        except Exception:
            if not run.gone:  # else what is asked of a session that ends can fail anyhow
                raise
            return run.result(SessionLost(f"{run.gone} Start again: %ddp_init"))
        finally:
            self._put_down(run)

    def _see_to(
        self,
        run: CellRun,
        watch: Watch,
        send: Send,
        interrupted: Callable[[], bool],
        *,
        detach: bool,
        started: Callable[[CellRun], None] | None,
    ) -> CellResult:
        """How a run in hand ended; of one that is to be detached, or is held, how it stands."""
        try:
            if started is not None:
                started(run)
        except BaseException:
            self._put_down(run)
            raise
        run.again = partial(self._in_hand, run, partial(watch.see_through, run, was_sent))
        seen = partial(self._in_hand, run, partial(watch.see_through, run, send))
        if not detach and not run.held:
            return seen(interrupted)
        detached = self.detached = Detached(run, seen)
        if not detach:
            return self._follow(detached, None, interrupted)
        if interrupted():
            detached.stop()
        return run.standing()

    def wait(
        self, timeout_s: float | None = None, started: Callable[[CellRun], None] | None = None
    ) -> CellResult:
        """Wait for the run that was detached, or that ranks are still in; how it ended.

        As with a cell, an interrupt stops the ranks. After `timeout_s` seconds it is how the run
        stands: `pending` are the ranks in it, and `outputs` what was written since that was asked
        for last. So it is with a run whose ranks are held; `steps` says where. Raises UsageMistake
        when there is nothing to wait for.
        """
        with noted() as interrupted:
            detached = self._to_wait_for()
            if started is not None:
                started(detached.run)
            return self._follow(detached, timeout_s, interrupted)

    def _to_wait_for(self) -> Detached:
        detached = self.detached
        if detached is not None and not detached.told and not _left_with_ranks(detached):
            return detached
        self._need("%ddp_wait")
        for run in reversed(self.runs):
            mine = detached is not None and run is detached.run and not detached.told
            got_on = run.started & set(run.pending) or (mine and not run.interrupted)
            if got_on and run.again is not None and not run.in_hand:
                run.in_hand = True
                self.detached = Detached(run, run.again)
                return self.detached
        if detached is not None and not detached.told:
            return detached
        if any(run.in_hand for run in self.runs):
            raise UsageMistake("Another thread waits for it already. Where it is: %ddp_where")
        raise UsageMistake(
            "There is nothing to wait for: no rank is in a cell or a script. To have one that "
            "runs while the notebook is free: %%ddp --detach, or %ddp_run --detach train.py"
        )

    def _follow(
        self, detached: Detached, timeout_s: float | None, interrupted: Callable[[], bool]
    ) -> CellResult:
        """Wait for the end of a detached run, an interrupt, or until its ranks are all held."""
        run, ended = detached.run, detached.ended
        all_held = self._all_held(run)
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        over = threading.Event()
        ended.add_done_callback(lambda _: over.set())
        while not over.wait(min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))):
            if interrupted():
                detached.stop()
            elif all_held():
                steps = table(run, self._need("%ddp_wait"))
                return replace(run.standing(), error=run.error(), steps=steps)
            elif time.monotonic() >= deadline_s:
                return run.standing()
        detached.told = True
        return ended.result()

    def _all_held(self, run: CellRun) -> Callable[[], bool]:
        """Whether the ranks of a run stand where only a step gets them on."""
        processes = self._processes
        if not run.held or processes is None:
            return lambda: False
        settling = Settling(run, processes)

        def held() -> bool:
            try:
                return settling.done() and not run.done
            except Exception:
                if not run.gone:
                    raise
                return False

        return held


def _left_with_ranks(detached: Detached) -> bool:
    """Its end was told while ranks were in it: they may have got on since, or been freed."""
    ended = detached.ended
    if not ended.done() or ended.exception() is not None or detached.run.gone:
        return False
    return bool(ended.result().pending)
