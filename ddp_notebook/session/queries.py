"""Calls ranks without waiting for answers that cannot arrive.

A rank that is dead or stopped never answers; a failed one may have left the others blocked in a
collective. The wait then ends by itself, or earlier when it is cancelled or interrupted.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, Status
from ddp_notebook.model.ddp import STOPPED, RankFailure
from ddp_notebook.rank.calls import Answer, Call, Request
from ddp_notebook.session.interrupts import noted, quick_switches
from ddp_notebook.session.record import Record
from ddp_notebook.session.unresponsive import StoppedRanks

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster

OTHERS_GRACE_S = 2.0
"""How long the other ranks have to answer once a rank died or failed."""
_ANSWER_S = 10.0
_STOP_WITHIN_S = 0.7
"""How long interrupted ranks have to answer, by default."""


@dataclass
class Answers(Generic[Answer]):
    """The ranks' answers, and the ranks without one."""

    pending: Ranks
    """Ranks that have not answered."""
    values: dict[int, Answer] = field(default_factory=dict)
    failed: dict[int, RankFailure] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)
    """Exit codes of ranks that died during the call."""
    interrupted: bool = False

    @property
    def texts(self) -> dict[int, str]:
        """How the ranks failed that did, in words."""
        return {rank: failure.text for rank, failure in self.failed.items()}

    @property
    def complete(self) -> bool:
        """True when every rank answered without an error."""
        return not (self.pending or self.failed or self.dead or self.interrupted)


def ask(
    cluster: RankCluster,
    record: Record,
    ranks: Ranks,
    call: Call[Request, Answer | RankFailure],
    request: Request,
    cancelled: Callable[[], bool] = lambda: False,
    interrupt_grace_s: float = _STOP_WITHIN_S,
) -> Answers[Answer]:
    """Call ranks, all with the same request.

    Returns when all have answered; `OTHERS_GRACE_S` after one died, failed or was stopped, which
    counts as a failure; or when the user interrupts or `cancelled` returns True: then the ranks are
    interrupted and have `interrupt_grace_s` to answer. Raises SessionLost.
    """
    with quick_switches(), noted() as interrupted:
        sent = cluster.call(ranks, call, lambda _: request)
        gathering = _Gathering(cluster, record, sent)
        answers = gathering.answers
        gathering.wait(lambda: interrupted() or cancelled())
        if interrupted() or cancelled():
            answers.interrupted = True
            gathering.interrupt(interrupt_grace_s)

    def idle() -> bool:
        states = record.snapshot.ranks
        answered = answers.values.keys() | answers.failed.keys()
        return not any(states[rank].status is Status.RUNNING for rank in answered)

    # The event that ends a rank's work travels apart from its answer; it is busy until then.
    record.wait_for(idle, 1.0)
    return answers


class _Gathering(Generic[Answer]):
    """Answers as they arrive."""

    def __init__(
        self, cluster: RankCluster, record: Record, sent: Mapping[int, Future[Answer | RankFailure]]
    ) -> None:
        self.answers: Answers[Answer] = Answers(pending=tuple(sent))
        self._cluster = cluster
        self._record = record
        self._sent = sent
        self._stopped = StoppedRanks(lambda: record.snapshot.ranks, cluster.stopped)

    def wait(self, stopped: Callable[[], bool], until_s: float = math.inf) -> None:
        """Collect until all have answered, `stopped` is true, or no more answers can arrive.

        Returns at `until_s` of the monotonic clock at the latest.
        """
        answers, deadline_s = self.answers, until_s
        expecting = True
        while answers.pending and not stopped():
            # Once, at the first: the others may be in a collective without that rank and answer
            # never, or fail by themselves in a moment. Each further failure would give the rest
            # another grace.
            if expecting and (answers.failed or answers.dead):
                expecting = False
                deadline_s = min(deadline_s, time.monotonic() + OTHERS_GRACE_S)
            if time.monotonic() > deadline_s:
                break
            self._take()
            if answers.pending:
                self._record.wait_for(
                    lambda: any(self._sent[rank].done() for rank in answers.pending), 0.01
                )
                self._take()

    def interrupt(self, grace_s: float) -> None:
        """Interrupt the ranks, and collect what they answer within `grace_s`.

        A rank that is still idle ignores an interrupt; it gets another one when it begins.
        """

        def running() -> set[int]:
            states = self._record.snapshot.ranks
            return {r for r in self.answers.pending if states[r].status is Status.RUNNING}

        # All are signalled once, also those that seem idle: that they began may not be known yet.
        signalled = running()
        for rank in self.answers.pending:
            self._cluster.signal(rank, signal.SIGINT)

        def begun() -> bool:
            for rank in running() - signalled:
                signalled.add(rank)
                self._cluster.signal(rank, signal.SIGINT)
            return False

        self.wait(begun, time.monotonic() + grace_s)

    def _take(self) -> None:
        self._record.check_not_lost()
        answers, snapshot = self.answers, self._record.snapshot
        for rank in answers.pending:
            if snapshot.ranks[rank].status is Status.DEAD:
                answers.dead[rank] = snapshot.ranks[rank].exit_code or 0
            # Dead first: the call of a rank whose process ended is done as well, with an error that
            # says nothing of how it ended.
            elif self._sent[rank].done():
                value: Answer | RankFailure
                try:
                    value = self._cluster.value_of(self._sent[rank], _ANSWER_S)
                except UsageMistake as error:  # the rank raised
                    value = RankFailure("error", str(error))
                if isinstance(value, RankFailure):
                    answers.failed[rank] = value
                else:
                    answers.values[rank] = value
        for rank, why in self._stopped.among(answers.pending).items():
            answers.failed.setdefault(rank, RankFailure(STOPPED, why))
        known = answers.values.keys() | answers.failed.keys() | answers.dead.keys()
        answers.pending = tuple(rank for rank in self._sent if rank not in known)
