"""Where the ranks are, as one tree of Python stacks; and what software they run on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.model import (
    Activity,
    Doing,
    Ranks,
    RankStack,
    RankState,
    StackTree,
    Status,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.processes.unresponsive import last_known, process_of
from ddp_notebook.state import stack_tree
from ddp_notebook.state.descriptions import describe

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record

_ASK_TIMEOUT_S = 2.0
_FACTS_TIMEOUT_S = 10.0


class Where:
    """Looks at the ranks of a session; from any thread, any time."""

    def __init__(self, record: Record, pool: RankPool) -> None:
        self._record = record
        self._pool = pool

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """`Session.where`."""
        cluster = self._pool.need("%ddp_where").cluster
        snapshot = self._record.snapshot
        members = ranks if ranks is not None else tuple(range(snapshot.world_size))
        check_ranks(members, snapshot)
        states = [snapshot.ranks[rank] for rank in sorted(set(members))]
        alive = tuple(state.rank for state in states if state.status is not Status.DEAD)
        request = calls.StackRequest(with_locals=locals)
        answers = cluster.ask(alive, calls.STACK, request, _ASK_TIMEOUT_S)
        stacks = (_stack(state, answers.get(state.rank)) for state in states)
        return stack_tree.merge(stacks, snapshot.world_size)

    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """`Session.rank_facts`."""
        cluster = self._pool.need("%ddp_doctor").cluster
        everyone = tuple(range(self._record.snapshot.world_size))
        answers = cluster.ask(everyone, calls.SOFTWARE, calls.Nothing(), _FACTS_TIMEOUT_S)
        return {
            rank: dict(answer.facts)
            for rank, answer in answers.items()
            if not isinstance(answer, CannotAnswer)
        }


def _stack(state: RankState, answer: RankStack | CannotAnswer | None) -> RankStack:
    """The stack that a rank gave; without one, what else is known of the rank."""
    if state.status is Status.DEAD:
        return RankStack(state.rank, Doing(Activity.DEAD, text=describe(state)))
    if answer is None:
        return RankStack(
            state.rank, Doing(Activity.SILENT, text=last_known(state, process_of(state.pid)[0]))
        )
    if isinstance(answer, CannotAnswer):
        text = f"its observer failed: {answer.why}"
        return RankStack(state.rank, Doing(Activity.SILENT, text=text))
    return RankStack(state.rank, answer.doing, answer.frames)
