"""Whether the ranks of a run have come to rest: which are paused, and where each stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.model import Activity, Collective, Ranks, StepTable
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import answered
from ddp_notebook.session.collective_logs import READ_LAST
from ddp_notebook.session.runs.endings import failures
from ddp_notebook.views import step_rows
from ddp_notebook.views.step_rows import line_table

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.run_events import RunEvents

_STILL_S = 0.3
"""A rank that is not paused and has issued nothing for this long is asked what it is doing."""
_LOOKS = 2
"""Number of consecutive checks that must find it waiting."""
_ASK_TIMEOUT_S = 1.0


class Settling:
    """Whether every rank of a run is paused, waits in a collective, or has finished."""

    def __init__(
        self,
        events: RunEvents,
        logs: CollectiveLogs,
        cluster: RankCluster,
        left: Mapping[int, int | None] | None = None,
    ) -> None:
        """`left` holds the numbers of the collectives at which ranks were paused before."""
        self._left = left or {}
        self._events = events
        self._logs = logs
        self._cluster = cluster
        self._picture: object = None
        self._since_s = time.monotonic()
        self._looks = 0

    def done(self) -> bool:
        """Return whether no rank can make progress without being stepped."""
        pending = self._events.pending
        if self._events.stops.keys() >= set(pending):
            return True
        tails = self._logs.read(pending, self._events.cell, last=1).of
        # A rank that was let go says so in its record a moment later: until then the record reads
        # as if it were paused there. So being paused counts at another number only.
        paused = {*_held(tails, self._left), *self._events.stops}
        free = tuple(rank for rank in pending if rank not in paused)
        if not free:
            return True
        picture = (pending, {rank: tails.get(rank) for rank in free})
        if picture != self._picture:
            self._picture, self._since_s, self._looks = picture, time.monotonic(), 0
            return False
        if time.monotonic() - self._since_s < _STILL_S:
            return False
        # No record says that a rank waits elsewhere (in a sleep, for a lock), so it is asked. That
        # is slow beside a step: only ranks that have been still for some time are.
        self._since_s = time.monotonic()
        answers = self._cluster.ask(free, calls.REPORT, calls.Nothing(), _ASK_TIMEOUT_S)
        reports = answered(answers).values()
        # A rank that does not answer in time, or waits only briefly, may be making progress.
        waiting = len(reports) == len(free) and all(
            report.activity is Activity.WAITING for report in reports
        )
        self._looks = self._looks + 1 if waiting else 0
        return self._looks >= _LOOKS


def table(events: RunEvents, logs: CollectiveLogs) -> StepTable:
    """Return where the ranks of a run stand."""
    stops = dict(events.stops)
    # A rank paused at a line is shown at that line; of its collectives only the count is shown.
    last = 1 if stops.keys() >= set(events.pending) else READ_LAST
    collectives = logs.read(events.ranks, events.cell, last)
    made = step_rows.collective_table(
        collectives,
        events.ranks,
        events.pending,
        time.monotonic_ns(),
        what=events.script or "The cell",
        failures=failures(events),
    )
    return line_table(stops, made) if stops else made


def paused_ranks(events: RunEvents, logs: CollectiveLogs, ranks: Ranks | None = None) -> Ranks:
    """Return those of `ranks` (all by default) that pause at a line or before a collective."""
    among = tuple(rank for rank in events.pending if ranks is None or rank in ranks)
    others = tuple(rank for rank in among if rank not in events.stops)
    tails = logs.read(others, events.cell, last=1).of if others else {}
    held = _held(tails, {})
    return tuple(rank for rank in among if rank in held or rank in events.stops)


def _held(tails: Mapping[int, Sequence[Collective]], left: Mapping[int, int | None]) -> set[int]:
    """Return the ranks that pause before a collective, and not still at the number in `left`."""
    return {
        rank
        for rank, tail in tails.items()
        if any(step_rows.is_paused(r) and r.number != left.get(rank) for r in tail)
    }
