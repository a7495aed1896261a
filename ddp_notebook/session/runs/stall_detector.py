"""Asks the ranks what they know, and decides whether a set-up that does not get on is stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run, progress
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collectives,
    Diagnosis,
    Finding,
    Probe,
    RankReport,
    Ranks,
    Snapshot,
    Status,
    evidence_from_json,
)
from ddp_notebook.session.processes.unresponsive import silent

if TYPE_CHECKING:
    from ddp_notebook.cluster.cluster import RankCluster

ASK_TIMEOUT_S = 1.0
LOOK_AFTER_S = 0.6
"""How long somebody must have waited before it is worth a look."""
LOOK_EVERY_S = 0.45
LOOK_RARELY_S = 1.8
"""How often to look at ranks none of which waits."""
RESTLESS_FOR_S = 10.0
"""How long ranks may want a CPU before that is no excuse any more."""
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
"""What can look so for a moment where nothing is wrong, when ranks lack a CPU."""
UNDECIDED_AFTER_S = 30.0
"""After so long without any change a stop that no rule explains is shown as it is."""


@dataclass(frozen=True)
class Told:
    """What the launcher told the ranks: where to meet, and who hosts the store."""

    values: Mapping[str, str] = field(default_factory=dict)
    store_host: int | None = None
    store_alive: Callable[[], bool] = lambda: True


def gather(
    cluster: RankCluster,
    snapshot: Snapshot,
    told: Told,
    ranks_of_run: Ranks | None = None,
    asked: Callable[[], Ranks] = tuple,
    collectives: Callable[[], Collectives] = Collectives,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Case:
    """The evidence of the ranks (all by default), of dead and silent ones what the record has.

    `asked` are the ranks that have something to do: one that does nothing has not begun yet,
    and what it knows is of an earlier set-up.
    """
    states = [s for s in snapshot.ranks if ranks_of_run is None or s.rank in ranks_of_run]
    dead = {state.rank: state for state in states if state.status is Status.DEAD}
    alive = tuple(state.rank for state in states if state.rank not in dead)
    answers = cluster.ask(alive, "evidence", ASK_TIMEOUT_S)
    to_do = asked()
    ranks = []
    for state in states:
        if state.rank in dead:
            evidence = RankReport(
                state.rank,
                Activity.DEAD,
                exit_code=state.exit_code,
                last_words=state.last_words,
            )
        elif (answer := answers.get(state.rank, {})) and "error" in answer:
            doing = f"its observer failed: {answer['error']}"
            evidence = RankReport(state.rank, Activity.SILENT, doing=doing)
        elif answer:
            evidence = evidence_from_json(answer)
            if evidence.activity in (Activity.IDLE, Activity.FAILED) and state.rank in to_do:
                evidence = RankReport(state.rank, Activity.BUSY, doing="about to begin")
        else:
            evidence = silent(state)
        ranks.append(evidence)
    return Case(
        with_reach(cluster, ranks),
        dict(told.values),
        told.store_host,
        store_alive=told.store_alive(),
        collectives=collectives(),
        sources=sources,
    )


def with_reach(cluster: RankCluster, ranks: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """`ranks`, those that connect to each other across hosts with whom of them they reach.

    Asked in a second step: only now it is known where each of them listens.
    """
    connecting = [e for e in ranks if e.inside == "process-group" and e.listens]
    if len({e.network for e in connecting}) < 2:
        return tuple(ranks)
    targets = [
        each
        for e in connecting
        for each in e.listens
        if not each.startswith(("127.", "::1:"))  # on another host that is another place
    ]
    asked = tuple(e.rank for e in connecting)
    answers = cluster.ask(asked, "reach", ASK_TIMEOUT_S, {"targets": targets})
    return tuple(
        replace(e, reach=tuple(Probe(**each) for each in answers.get(e.rank, {}).get("reach", ())))
        for e in ranks
    )


class Watchman:
    """Looks again and again at ranks that wait, and says when they will not get on by themselves.

    `look` gives the case as it is. A finding counts when two looks in a row agree on it and
    no rank is busy with code of its own. `moved` gives another value whenever a rank has got
    on, and costs nothing: while it does, nobody is asked.
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
        self.latest = Diagnosis()
        """What the last look gave: also who is only late."""
        self.seen_late: Diagnosis | None = None
        """The last look that found ranks waiting for one that was only late."""

    def turn(self) -> Diagnosis | None:
        """Look, if it is time to; the diagnosis when nothing gets on any more."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        moved = self._moved()
        if moved != self._last_moved:
            self._last_moved, self._next_s = moved, now_s + LOOK_EVERY_S
            self._previous, self._pause_s = None, LOOK_EVERY_S
            self._picture = None  # a loop of slow collectives looks the same at each look
            return None
        case = self._look()
        # Ranks that compute for hours are not asked twice a second.
        waits = case.waiting or any(e.workers for e in case.ranks)
        self._pause_s = LOOK_EVERY_S if waits else min(2 * self._pause_s, LOOK_RARELY_S)
        self._next_s = now_s + self._pause_s
        self.latest = diagnose_run(case)
        if self.latest.findings and not self.latest.wrong:
            self.seen_late = self.latest
        is_stuck = stuck(case, self.latest)
        if not is_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if is_stuck and not self._may_only_be_slow(case, now_s):
            said = tuple((f.category, f.ranks) for f in self.latest.findings)
            if said == self._previous:
                return self.latest
            self._previous = said
            return None
        self._previous = None
        return self._after_long_stillness(case, now_s)

    def _may_only_be_slow(self, case: Case, now_s: float) -> bool:
        """What is found could be a moment's picture of ranks that lack a CPU to get on."""
        sure = any(f.category not in _OF_A_MOMENT for f in self.latest.findings if not f.passing)
        assert self._stuck_since_s is not None
        restless = any(e.runnable for e in case.ranks if e.activity is Activity.WAITING)
        return restless and not sure and now_s - self._stuck_since_s < RESTLESS_FOR_S

    def _after_long_stillness(self, case: Case, now_s: float) -> Diagnosis | None:
        picture = tuple(
            (e.activity, e.inside, e.doing, e.arguments, _cpu_of_silent(e)) for e in case.ranks
        )
        if picture != self._picture or case.where(Activity.BUSY, Activity.HELD):
            self._picture, self._still_since_s = picture, now_s
            return None
        mute = case.where(Activity.SILENT)
        if not (case.waiting or mute) or now_s - self._still_since_s < UNDECIDED_AFTER_S:
            return None
        facts = tuple(f"rank {rank} {text}" for rank, text in (self.latest.doing or {}).items())
        if mute:
            why = (
                f"answers nothing and uses no CPU for {UNDECIDED_AFTER_S:.0f} s: it waits in "
                "native code that holds Python's lock"
            )
        else:
            why = f"nothing has moved for {UNDECIDED_AFTER_S:.0f} s, and no rule says why"
        finding = Finding(
            Category.UNDECIDED,
            mute,
            why,
            "See what each rank does, free them with %ddp_abort, or go on waiting.",
            case.waiting,
            facts,
        )
        return replace(self.latest, findings=(*self.latest.findings, finding))


def _cpu_of_silent(e: RankReport) -> float:
    """What tells that a rank that does not answer works all the same."""
    return e.main_cpu_s if e.activity is Activity.SILENT else 0.0


def stuck(case: Case, diagnosis: Diagnosis) -> bool:
    """True when something is wrong and no rank runs code of its own that could change it."""
    return diagnosis.wrong and not any(map(progress.works, case.ranks))
