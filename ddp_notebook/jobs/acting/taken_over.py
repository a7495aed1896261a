"""A prepared job on which this process may act: pauses, steps and ends its ranks, gives them back.

Each rank decides itself whom it obeys: the process that took it over, until that gives it back or
ends (`rank/prepared/taken_over.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.cluster.questions import ask
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import prepared
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity, Collective, LineStopped, Ranks, StepTable, name_ranks
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import (
    Answer,
    CannotAnswer,
    How,
    Move,
    Question,
    Request,
    answered,
)
from ddp_notebook.state import collective_table
from ddp_notebook.state.line_table import line_table

if TYPE_CHECKING:
    from ddp_notebook.jobs.prepared import Job
    from ddp_notebook.jobs.targets import Prepared

_ASK_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 0.02
_STILL_S = 0.3
"""A rank that is not paused and has issued nothing for this long is asked what it does."""
_LOOKS = 2
"""Number of consecutive answers that must say that it waits."""
_ENDS_WITHIN_S = _BACK_WITHIN_S = 10.0
_END_AGAIN_S = 0.5


class TakenOver:
    """A job whose ranks obey this process. Raises UsageMistake where none of them does."""

    def __init__(self, target: Prepared) -> None:
        self._target = target
        self._told: dict[int, int] = {}
        """By rank, the last stop that the others were told of."""
        taken, refused = self._take()
        self.refused: Mapping[int, str] = refused
        """Ranks that cannot be acted on, and why; they go on as before."""
        if not taken:
            why = "; ".join(dict.fromkeys(refused.values())) or "it has ended"
            raise UsageMistake(f"{target.name} cannot be taken over: {why}. It goes on as before.")

    def _take(self) -> tuple[Ranks, Mapping[int, str]]:
        """The ranks that obey, and why the others do not; those of a new attempt as well."""
        job = self._target.job
        answers = self._ask(job, job.alive, calls.TAKE_OVER)
        taken = tuple(answered(answers))
        why = {rank: answers.get(rank) for rank in job.alive if rank not in taken}
        return taken, {
            rank: said.why if isinstance(said, CannotAnswer) else "it does not answer"
            for rank, said in why.items()
        }

    @property
    def name(self) -> str:
        """``job 12345 (train.py)``."""
        return self._target.name

    @property
    def world_size(self) -> int:
        """As the ranks were told."""
        return self._target.world_size

    @property
    def alive(self) -> Ranks:
        """The ranks whose processes run."""
        return self._target.job.alive

    @property
    def folder(self) -> Path:
        """The working directory in which it was started."""
        return Path(self._target.job.first.folder)

    @property
    def script(self) -> str:
        """The path of its script."""
        return self._target.job.first.script

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._target.job.processes[rank].about.pid

    def obeying(self) -> Ranks:
        """The ranks that run and obey; those of a new attempt as well."""
        return self._take()[0]

    def ask(
        self, ranks: Ranks, question: Question[Request, Answer], request: Request, timeout_s: float
    ) -> dict[int, Answer | CannotAnswer]:
        """Ask ranks; omits those that miss `timeout_s`."""
        sockets = prepared.sockets_of(self._target.job)
        return ask({r: at for r, at in sockets.items() if r in ranks}, question, request, timeout_s)

    def stops(self) -> dict[int, LineStopped]:
        """The ranks that are paused at lines, and where."""
        job = self._target.job
        replies = self._ask(job, job.alive, calls.STOPPED)
        now = answered(replies).items()
        stops = {rank: replace(stop, rank=rank) for rank, of in now for stop in of.stops}
        if new := {rank: stop.stop for rank, stop in stops.items()}.items() - self._told.items():
            # Who waits for a paused rank is not to be ended by a time limit.
            self._ask(job, tuple(r for r in job.alive if r not in stops), calls.ARM)
            self._told |= dict(new)
        return stops

    def step(
        self,
        ranks: Ranks | None,
        move: Move,
        over: Callable[[], bool],
        *,
        operation: str = "",
        by_line: bool = False,
        to_stop: bool = False,
    ) -> StepTable:
        """Move ranks that are paused at lines; without any, those paused before collectives.

        Where none is paused, they pause before their next collective. With `operation` they
        continue to the next one of that. To the end none is paused any more: waits only where
        breakpoints are to stop them (`to_stop`). Ends early when `over`. Raises UsageMistake if
        there is nothing to step.
        """
        obeying = self.obeying()
        wanted = tuple(rank for rank in obeying if ranks is None or rank in ranks)
        if not wanted:
            raise UsageMistake(f"None of these ranks of {self._target.name} can be stepped.")
        while True:
            left = self._let_go(wanted, move, by_line)
            if move.how is How.END and not to_stop:
                return replace(self.table(), title=f"{name_ranks(wanted)} run on.", next_call="")
            self._settle(wanted, left, over)
            tails = self._tails(wanted)
            paused = [tail for tail in tails.values() if collective_table.is_paused(tail)]
            reached = any(record.operation == operation for record in paused)
            if not operation or over() or not paused or reached:
                return self.table()

    def wait(self, timeout_s: float | None, over: Callable[[], bool]) -> StepTable:
        """Wait until no rank can make progress: paused, waiting for others, or at its end."""
        until_s = time.monotonic() + timeout_s if timeout_s is not None else math.inf
        self._settle(self.alive, {}, lambda: over() or time.monotonic() > until_s)
        return self.table()

    def _let_go(self, wanted: Ranks, move: Move, by_line: bool) -> dict[int, int | None]:
        """Resume them; before which collective each was paused that was paused before one."""
        job, stops = self._target.job, self.stops()
        if move.how is How.END:
            self._ask(job, wanted, calls.RESUME)
            self._moved(wanted, move)
            return {}
        if by_line or any(rank in stops for rank in wanted):
            at_lines = tuple(r for r in wanted if r in stops or (by_line and self._at_gate(r)))
            if not at_lines:
                raise UsageMistake(
                    f"No rank of {self._target.name} is paused at a line. To stop where it comes "
                    "to: %ddp_break train.py:42, then %ddp_wait"
                )
            left = self._moved(at_lines, move)
            gates = tuple(r for r in wanted if r not in at_lines and self._at_gate(r))
            return left | self._stepped(gates)
        if stops and not any(map(self._at_gate, wanted)):
            who = name_ranks(wanted)
            raise UsageMistake(f"Of {who}, none is paused; {name_ranks(stops)} can be stepped.")
        paused = self._ask(job, wanted, calls.PAUSE)
        at = {rank: before.collective for rank, before in answered(paused).items()}
        self._stepped(tuple(rank for rank in at if at[rank] is not None))
        return at

    def _stepped(self, ranks: Ranks) -> dict[int, int | None]:
        steps = self._ask(self._target.job, ranks, calls.STEP) if ranks else {}
        return {rank: at.collective for rank, at in answered(steps).items()}

    def _moved(self, ranks: Ranks, move: Move) -> dict[int, int | None]:
        """Move ranks at lines. Raises UsageMistake where none of them can be moved so."""
        replies = self.ask(ranks, calls.MOVE, move, scaled_for_load(_ASK_TIMEOUT_S))
        answers = answered(replies)
        problems = {moved.problem for moved in answers.values()}
        if problems and all(problems):
            raise UsageMistake(f"{'; '.join(sorted(problems))}. The ranks did not move.")
        return {rank: answer.collective for rank, answer in answers.items()}

    def _at_gate(self, rank: int) -> bool:
        return any(map(collective_table.is_paused, self._tails((rank,)).values()))

    def _settle(
        self, ranks: Ranks, left: Mapping[int, int | None], over: Callable[[], bool]
    ) -> None:
        settled = _Settled(self, ranks, left)
        while not settled.now() and not over():
            time.sleep(_LOOK_EVERY_S)

    def end(self, ranks: Ranks | None) -> Mapping[int, int]:
        """Interrupt ranks, and end what they wait in; the pids of those that run all the same."""
        obeying, _ = self._take()
        until_s = time.monotonic() + scaled_for_load(_ENDS_WITHIN_S)
        while True:
            job = self._target.job
            left = tuple(r for r in job.alive if r in obeying and (ranks is None or r in ranks))
            if not left or time.monotonic() > until_s:
                return {rank: job.processes[rank].about.pid for rank in left}
            self._ask(job, left, calls.FREE)
            time.sleep(_END_AGAIN_S)

    def give_back(self) -> Ranks:
        """No rank stays paused, and none obeys any more; but for those that do not answer."""
        until_s, back = time.monotonic() + _BACK_WITHIN_S, set[int]()
        while True:
            try:
                job = self._target.job
            except UsageMistake:
                return ()  # its record is no more
            back.update(self._ask(job, self._left(job, back), calls.GIVE_BACK))
            if not (left := self._left(job, back)) or time.monotonic() > until_s:
                return left

    def _left(self, job: Job, back: Collection[int]) -> Ranks:
        return tuple(rank for rank in job.alive if rank not in back)

    def activities(self, ranks: Ranks) -> Mapping[int, Activity]:
        """What ranks do that answer."""
        reports = self._ask(self._target.job, ranks, calls.REPORT)
        return {rank: report.activity for rank, report in answered(reports).items()}

    def running(self, ranks: Ranks) -> dict[int, Collective | None]:
        """The last collective of those of `ranks` that run."""
        alive = tuple(rank for rank in self._target.job.alive if rank in ranks)
        tails = self._tails(alive)
        return {rank: tails.get(rank) for rank in alive}

    def _tails(self, ranks: Ranks) -> dict[int, Collective]:
        records = {r: p.log(r, 1).records for r, p in self._target.job.processes.items()}
        return {rank: of[-1] for rank, of in records.items() if rank in ranks and of}

    def table(self) -> StepTable:
        """Where its ranks are."""
        job = self._target.job
        collectives = prepared.collectives_of(job)
        what, now_ns = job.title, time.monotonic_ns()
        everyone = tuple(job.processes)
        made = collective_table.step_table(collectives, everyone, job.alive, now_ns, what=what)
        stops = self.stops()
        return line_table(stops, made) if stops else made

    def _ask(
        self, job: Job, ranks: Ranks, question: Question[calls.Nothing, Answer]
    ) -> dict[int, Answer | CannotAnswer]:
        sockets = {r: at for r, at in prepared.sockets_of(job).items() if r in ranks}
        return ask(sockets, question, calls.Nothing(), scaled_for_load(_ASK_TIMEOUT_S))


class _Settled:
    """Whether each rank that was stepped is paused again, waits for others, or has ended."""

    def __init__(self, job: TakenOver, ranks: Ranks, left: Mapping[int, int | None]) -> None:
        """`left` holds the numbers of the collectives at which ranks were paused before."""
        self._job, self._ranks, self._left = job, ranks, left
        self._picture: object = None
        self._since_s = 0.0
        self._looks = 0

    def now(self) -> bool:
        """True when none of them can make progress without being stepped."""
        tails = self._job.running(self._ranks)
        stops = self._job.stops()
        free = {
            rank: tail
            for rank, tail in tails.items()
            if rank not in stops and not self._is_paused(rank, tail)
        }
        if free != self._picture:
            self._picture, self._since_s, self._looks = free, time.monotonic(), 0
        if free and time.monotonic() - self._since_s < _STILL_S:
            return False
        self._since_s = time.monotonic()
        doing = self._job.activities(tuple(free)) if free else {}
        # A rank that does not answer in time, or waits only briefly, may be making progress.
        waiting = all(doing.get(rank) is Activity.WAITING for rank in free)
        self._looks = self._looks + 1 if waiting else 0
        return not free or self._looks >= _LOOKS

    def _is_paused(self, rank: int, tail: Collective | None) -> bool:
        if tail is None or not collective_table.is_paused(tail):
            return False
        return tail.number != self._left.get(rank, -1)


def words(taken: TakenOver) -> str:
    """What can be done with it now, and what that will do."""
    others = "".join(
        f"\n{name_ranks((rank,)).capitalize()} is not taken over: {why}"
        for rank, why in taken.refused.items()
    )
    return f"{WHAT_EACH_DOES}{others}"


WHAT_EACH_DOES = (
    "It is taken over: it runs on as before until you type one of these.\n"
    "%ddp_break train.py:42 stops ranks at that line, and so does breakpoint() in its code from "
    "now on; %ddp_wait waits until they are there. %ddp_step, %ddp_print, %ddp_set and %ddp_frame "
    "then do what they do in cells of this notebook; what --log prints is in the job's output.\n"
    "%ddp_step without a rank at a line pauses each rank before its next collective; then each "
    "call lets the ranks (or --ranks 1) do that one and pauses them before the next (or --to "
    "all_reduce). --to end: none is paused any more. What ranks wait in for paused ones does not "
    "time out meanwhile.\n"
    "%ddp_abort ends what it runs: each rank gets a KeyboardInterrupt, as by Ctrl-C, and one that "
    "is blocked in torch loses its connections. Its launcher then ends the rest, or starts it "
    "again if it was told to.\n"
    "%ddp_detach gives it back: no rank stays paused, and no breakpoint is left. So does the end "
    "of this notebook's kernel."
)
