"""A prepared job on which this process may act: pauses, steps and ends its ranks, gives them back.

Each rank decides itself whom it obeys: the process that took it over, until that gives it back or
ends (`rank/prepared/taken_over.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ddp_notebook.cluster.questions import ask
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import prepared
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity, Collective, Ranks, StepTable, name_ranks
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Answer, CannotAnswer, Question, answered
from ddp_notebook.state import collective_table

if TYPE_CHECKING:
    from ddp_notebook.jobs.prepared import Job
    from ddp_notebook.jobs.targets import Prepared

END = "end"
"""As a goal: pause no rank any more."""
GOALS = (*collective_table.OPERATIONS, END)
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

    def step(self, ranks: Ranks | None, to: str | None, over: Callable[[], bool]) -> StepTable:
        """Pause ranks before their next collective, or move paused ones on to the next.

        To the next of the operation `to`; to the end none is paused any more. Ends early when
        `over`. Raises UsageMistake if there is nothing to step.
        """
        obeying, _ = self._take()
        wanted = tuple(rank for rank in obeying if ranks is None or rank in ranks)
        if not wanted:
            raise UsageMistake(f"None of these ranks of {self._target.name} can be stepped.")
        if to == END:
            self._ask(self._target.job, wanted, calls.RESUME)
            return self._table()
        while True:
            self._step_once(wanted, over)
            tails = self._tails(wanted)
            paused = [tail for tail in tails.values() if collective_table.is_paused(tail)]
            if to is None or over() or not paused or any(r.operation == to for r in paused):
                return self._table()

    def _step_once(self, wanted: Ranks, over: Callable[[], bool]) -> None:
        """Each of them to its next collective; who is not paused yet is from now on."""
        job = self._target.job
        paused = self._ask(job, wanted, calls.PAUSE)
        at = {rank: before.collective for rank, before in answered(paused).items()}
        self._ask(job, tuple(r for r in at if at[r] is not None), calls.STEP)
        settled = _Settled(self, wanted, at)
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

    def _table(self) -> StepTable:
        job = self._target.job
        collectives = prepared.collectives_of(job)
        what, now_ns = job.title, time.monotonic_ns()
        everyone = tuple(job.processes)
        return collective_table.step_table(collectives, everyone, job.alive, now_ns, what=what)

    def _ask(
        self, job: Job, ranks: Ranks, question: Question[calls.Nothing, Answer]
    ) -> dict[int, Answer | CannotAnswer]:
        sockets = {r: at for r, at in prepared.sockets_of(job).items() if r in ranks}
        return ask(sockets, question, calls.Nothing(), _ASK_TIMEOUT_S)


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
        free = {rank: tail for rank, tail in tails.items() if not self._is_paused(rank, tail)}
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
    "It is taken over: nothing has changed in it yet.\n"
    "%ddp_step pauses each rank before its next collective; then each call lets the ranks (or "
    "--ranks 1) do that one and pauses them before the next (or --to all_reduce). --to end: none "
    "is paused any more. What ranks wait in for paused ones does not time out meanwhile.\n"
    "%ddp_abort ends what it runs: each rank gets a KeyboardInterrupt, as by Ctrl-C, and one that "
    "is blocked in torch loses its connections. Its launcher then ends the rest, or starts it "
    "again if it was told to.\n"
    "%ddp_detach gives it back: no rank stays paused. So does the end of this notebook's kernel."
)
