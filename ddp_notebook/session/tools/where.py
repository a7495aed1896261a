"""The ranks' Python stacks as one tree, their parameter layout, and their software versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook import jobs
from ddp_notebook.diagnosis.parallel.layout import arranged, mesh_of_parameters
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Activity,
    Board,
    Doing,
    Ranks,
    RankStack,
    RankState,
    StackTree,
    Status,
    name_ranks,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.session.guards import existing, living
from ddp_notebook.session.processes.unresponsive import last_known, process_of
from ddp_notebook.state import stack_tree
from ddp_notebook.state.board_rows import board_of
from ddp_notebook.state.descriptions import describe

if TYPE_CHECKING:
    from ddp_notebook.diagnosis.parallel.meshes import Mesh
    from ddp_notebook.model.parallel.layout import MeshLayout
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.controller import RunController

_ASK_TIMEOUT_S = 2.0
_FACTS_TIMEOUT_S = 10.0
_NO_ANSWER = "{} did not answer, so what is held there is not known (%ddp_where says more)."


class Where:
    """Inspects the ranks of a session. From any thread, any time."""

    def __init__(self, record: Record, pool: RankPool) -> None:
        self._record = record
        self._pool = pool

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """`Session.where`."""
        processes = self._pool.need("%ddp_where")
        script = processes.script
        if script is not None and (job := script.started_ranks.job) is not None:
            return jobs.stacks.of_job(job, ranks, locals)
        cluster, snapshot = processes.cluster, self._record.snapshot
        members = tuple(sorted(set(existing(ranks, snapshot))))
        request = calls.StackRequest(with_locals=locals)
        answers = cluster.ask(living(members, snapshot), calls.STACK, request, _ASK_TIMEOUT_S)
        stacks = (_stack(snapshot.ranks[rank], answers.get(rank)) for rank in members)
        return stack_tree.merge(stacks, snapshot.world_size)

    def started_ranks(self, script: RunController | None) -> Board | None:
        """The board of the ranks that `script` has started itself; None while none run."""
        started = script.run.started_ranks if script is not None else None
        if script is None or started is None:
            return None
        script.look()
        facts = started.shown(script.run.title)
        return board_of(facts) if facts is not None else None

    def mesh_of_models(self) -> Mesh | None:
        """The largest mesh on which ranks hold parameters; None for none."""
        cluster = self._pool.need("--ranks").cluster
        everyone = tuple(range(self._record.snapshot.world_size))
        answers = cluster.ask(everyone, calls.HELD, calls.Nothing(), _ASK_TIMEOUT_S)
        return mesh_of_parameters({r: e.parameters for r, e in answered(answers).items()})

    def layout(self, mesh: Mesh | None, ranks: Ranks | None = None) -> MeshLayout:
        """`Session.layout`; `mesh` is the one that the ranks made."""
        cluster = self._pool.need("%ddp_mesh").cluster
        snapshot = self._record.snapshot
        members = existing(ranks, snapshot)
        alive = living(members, snapshot)
        answers = cluster.ask(alive, calls.HELD, calls.Nothing(), _FACTS_TIMEOUT_S)
        held = answered(answers)
        silent = [rank for rank in members if rank not in held]
        if mesh is None and not any(each.parameters for each in held.values()) and not silent:
            raise UsageMistake(
                "The ranks have no device mesh, and no model with parameters. Make them first: "
                'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), fully_shard(model).'
            )
        notes = [_NO_ANSWER.format(name_ranks(silent))] if silent else []
        return arranged(mesh, held, snapshot.world_size, notes)

    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """`Session.rank_facts`."""
        cluster = self._pool.need("%ddp_doctor").cluster
        everyone = tuple(range(self._record.snapshot.world_size))
        answers = cluster.ask(everyone, calls.SOFTWARE, calls.Nothing(), _FACTS_TIMEOUT_S)
        return {rank: dict(answer.facts) for rank, answer in answered(answers).items()}


def _stack(state: RankState, answer: RankStack | CannotAnswer | None) -> RankStack:
    """A rank's stack; without an answer, what else is known of the rank."""
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
