"""Decides whether waiting ranks are stuck: two checks in a row agree, and no rank computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ddp_notebook.diagnosis import catalogue, diagnose_run, progress
from ddp_notebook.diagnosis.collectives.p2p import unequal_counts
from ddp_notebook.diagnosis.collectives.wait_graph import wait_graph
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Diagnosis,
    Finding,
    ProcessFacts,
    RankReport,
)

LOOK_AFTER_S = 0.6
"""How long a rank must have waited before the first check."""
LOOK_EVERY_S = 0.45
LOOK_RARELY_S = 1.8
"""The interval between checks while no rank waits."""
RESTLESS_FOR_S = 10.0
"""How long ranks may be runnable without a CPU before they count as stuck."""
_OF_A_MOMENT = frozenset(
    {
        Category.EARLY_EXIT,
        Category.MISSING_RANK,
        Category.PARAM_MISMATCH,
        Category.STORE_GONE,
        Category.UNREACHABLE_MASTER,
        Category.FIREWALL,
        Category.VERSION_MISMATCH,
        Category.FILESYSTEM,
    }
)
"""Categories that can appear briefly on a healthy run when ranks lack a CPU."""
UNDECIDED_AFTER_S = 30.0
"""After this long without any change, a stall that no rule explains is shown as it is."""
QUEUED_AFTER_S = 120.0
"""The same where ranks wait for GPUs, which may have much to compute before the collective."""
BROKEN_AFTER_S = 3.0
"""The same where a rank hears questions and its code has replaced what answers need."""
NONE_COMES_AFTER_S = 5.0
"""The same where each rank that waits does so for ranks that are gone, or that wait themselves."""


class StallDetector:
    """Checks waiting ranks repeatedly, and reports when they cannot make progress.

    `look` returns the current case. A finding counts if two checks in a row agree on it and no rank
    is busy with its own code. `moved` returns a new value whenever a rank has made progress, at no
    cost: while it changes, no rank is asked.
    """

    def __init__(
        self,
        look: Callable[[], Case],
        clock: Callable[[], float] = time.monotonic,
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self._look = look
        self._clock = clock
        self._moved = moved
        self._last_moved = moved()
        self._pause_s = LOOK_EVERY_S
        self._next_s = clock() + LOOK_AFTER_S
        self._previous: object = None
        self._picture: object = None
        self._still_since_s = clock()
        self._stuck_since_s: float | None = None
        self.stuck_in = Case(())
        """The ranks as they were found stuck; none before."""
        self.latest = Diagnosis()
        """The last diagnosis, including ranks that are only late."""
        self.seen_late: Diagnosis | None = None
        """The last diagnosis in which ranks waited for one that was only late."""
        self.standing = ""
        """Where ranks stood at the last check that have used no CPU time for long, in words."""

    def turn(self) -> Diagnosis | None:
        """Check if it is time to; return the diagnosis once no rank makes progress any more."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        if (moved := self._moved()) != self._last_moved:
            # A rank has made progress since the last check: none is asked for a while.
            self._last_moved, self._next_s = moved, now_s + LOOK_EVERY_S
            self._previous, self._pause_s = None, LOOK_EVERY_S
            self._picture = None  # a loop of slow collectives looks the same at each check
            return None
        case = self._look()
        # Ranks that compute for hours are not asked twice a second.
        waits = case.waiting or any(e.awaits.workers for e in case.ranks)
        self._pause_s = LOOK_EVERY_S if waits else min(2 * self._pause_s, LOOK_RARELY_S)
        self._next_s = now_s + self._pause_s
        self.latest = diagnose_run(case)
        self.standing = progress.standing(case.ranks)
        if self.latest.findings and not self.latest.wrong:
            self.seen_late = self.latest
        is_stuck = stuck(case, self.latest)
        if not is_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        # One look is a moment: a rank about to issue looks the same as one that never will. The
        # second look must blame the same ranks for the same.
        if is_stuck and not self._may_only_be_slow(case, now_s):
            blamed = tuple((f.category, f.ranks) for f in self.latest.findings)
            if blamed == self._previous:
                self.stuck_in = case
                return self.latest
            self._previous = blamed
            return None
        self._previous = None
        return self._after_long_stillness(case, now_s)

    def _may_only_be_slow(self, case: Case, now_s: float) -> bool:
        """Return whether the finding may be transient, because ranks lack a CPU."""
        # With more ranks than cores a thread may have got what it waited for, and no core to go on
        # with: it counts as waiting, and the others seem to miss something. A mismatch in the
        # records stays one whatever happens next; what is `_OF_A_MOMENT` is believed only once it
        # has lasted.
        sure = any(f.category not in _OF_A_MOMENT for f in self.latest.findings if not f.passing)
        assert self._stuck_since_s is not None
        restless = any(e.process.runnable for e in case.ranks if e.activity is Activity.WAITING)
        return restless and not sure and now_s - self._stuck_since_s < RESTLESS_FOR_S

    def _after_long_stillness(self, case: Case, now_s: float) -> Diagnosis | None:
        picture = tuple(
            (
                *(e.activity, e.inside, e.doing, e.arguments),
                # What proves that a rank works although it does not answer.
                e.process.main_cpu_s if e.activity is Activity.SILENT else 0.0,
            )
            for e in case.ranks
        )
        if picture != self._picture or case.where(Activity.BUSY, Activity.HELD):
            self._picture, self._still_since_s = picture, now_s
            return None
        still_s = now_s - self._still_since_s
        waits = case.waiting or case.where(Activity.SILENT)
        if not waits or still_s < _limit_s(case, still_s):
            return None
        finding = _unexplained(case, still_s)
        return replace(self.latest, findings=(*self.latest.findings, finding))


def _limit_s(case: Case, still_s: float) -> float:
    """Return after how long a stall that no rule explains ends the run."""
    if _broken(case):
        return BROKEN_AFTER_S
    undecided_s = QUEUED_AFTER_S if any(e.awaits.gpu for e in case.ranks) else UNDECIDED_AFTER_S
    # The graph is made only once it may matter: of many ranks it takes a while.
    may_move = case.where(Activity.SILENT) or any(e.process.runnable for e in case.ranks)
    if still_s < NONE_COMES_AFTER_S or may_move or not case.waiting:
        return undecided_s
    proven = set(wait_graph(case).stuck) >= set(case.waiting)
    return NONE_COMES_AFTER_S if proven else undecided_s


def _broken(case: Case) -> tuple[RankReport, ...]:
    """Return the ranks that hear questions and cannot answer, or run another program now."""
    silent = [e for e in case.ranks if e.activity is Activity.SILENT]
    return tuple(e for e in silent if e.process.cannot_answer or e.process.program)


def _unexplained(case: Case, still_s: float) -> Finding:
    """Describe a stall that no rule explains; what each rank does stands beside it."""
    ranks, kind, process = case.where(Activity.SILENT), "undecided.no-answer", ProcessFacts()
    if broken := _broken(case):
        ranks, process = tuple(e.rank for e in broken), broken[0].process
        kind = "undecided.other-program" if process.program else "undecided.cannot-answer"
    elif any(e.process.unreachable for e in case.ranks if e.rank in ranks):
        kind = "undecided.unreachable"
    elif not ranks:
        kind = "undecided.nothing-moves"
    return catalogue.finding(
        kind,
        ranks,
        waiting=case.waiting,
        evidence=unequal_counts(case.collectives),
        program=process.program,
        why_not=process.cannot_answer,
        still_s=UNDECIDED_AFTER_S if ranks else still_s,
    )


def stuck(case: Case, diagnosis: Diagnosis) -> bool:
    """Return whether a problem was found and no rank runs its own code that could resolve it."""
    return diagnosis.wrong and not any(map(progress.works, case.ranks))
