"""The session's verb that says where the ranks are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.model import (
    Activity,
    Doing,
    Ranks,
    RankStack,
    RankState,
    StackTree,
    Status,
    rank_stack_from_json,
)
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.processes.unresponsive import last_known, process_of
from ddp_notebook.state import stack_tree
from ddp_notebook.state.descriptions import describe

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record

_ASK_TIMEOUT_S = 2.0


class Looking:
    """Mixed into `Session`."""

    record: Record

    def _need(self, verb: str) -> Processes:
        raise NotImplementedError

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The Python stacks of `ranks` (all by default) as one tree. From any thread, any time.

        With `locals`, short texts of the variables in the user's frames. Of ranks that are dead
        or do not answer within two seconds the tree says what is known. Raises UsageMistake for
        a rank that does not exist, NoSession, SessionLost.
        """
        cluster = self._need("%ddp_where").cluster
        snapshot = self.record.snapshot
        members = ranks if ranks is not None else tuple(range(snapshot.world_size))
        check_ranks(members, snapshot)
        states = [snapshot.ranks[rank] for rank in sorted(set(members))]
        alive = tuple(state.rank for state in states if state.status is not Status.DEAD)
        question = "stacks with locals" if locals else "stacks"
        answers = cluster.ask(alive, question, _ASK_TIMEOUT_S)
        stacks = (_stack(state, answers.get(state.rank)) for state in states)
        return stack_tree.merge(stacks, snapshot.world_size)


def _stack(state: RankState, answer: Mapping[str, Any] | None) -> RankStack:
    """The stack that a rank gave; without one, what else is known of the rank."""
    if state.status is Status.DEAD:
        return RankStack(state.rank, Doing(Activity.DEAD, text=describe(state)))
    if answer is None:
        return RankStack(
            state.rank, Doing(Activity.SILENT, text=last_known(state, process_of(state.pid)[0]))
        )
    if "error" in answer:
        text = f"its observer failed: {answer['error']}"
        return RankStack(state.rank, Doing(Activity.SILENT, text=text))
    found = rank_stack_from_json(answer)
    return RankStack(state.rank, found.doing, found.frames)
