"""The ranks' board, their stacks as one tree, their parameter layout and software versions."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_notebook import jobs
from ddp_notebook.diagnosis.collectives.meshes import arranged, mesh_of_parameters
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Activity,
    Board,
    Collectives,
    Diagnosis,
    Doing,
    Ranks,
    RankStack,
    Snapshot,
    StackTree,
    Status,
    name_ranks,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.session.guards import existing, living
from ddp_notebook.session.unresponsive import last_known
from ddp_notebook.views import stack_tree
from ddp_notebook.views.board_rows import BoardFacts, board_of, describe, stuck_note

if TYPE_CHECKING:
    from ddp_notebook.diagnosis.collectives.meshes import Mesh
    from ddp_notebook.model.ddp import MeshLayout
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.runs.run import CellRun

_ASK_TIMEOUT_S = 2.0
_FACTS_TIMEOUT_S = 10.0
_NO_ANSWER = "{} did not answer, so what is held there is not known (%ddp_where says more)."


class Where:
    """Inspects the ranks of a session. From any thread, any time."""

    def __init__(self, record: Record, pool: RankPool) -> None:
        self._record = record
        self._pool = pool

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The Python stacks of `ranks` (all by default) as one tree. From any thread, any time.

        With `locals`, short texts of the variables in the user's frames. For ranks that are dead or
        do not answer within two seconds the tree shows what is known. Raises UsageMistake for a
        rank that does not exist, NoSession, SessionLost.
        """
        processes = self._pool.need("%ddp_where")
        script = processes.script
        if script is not None and (job := script.started_ranks.job) is not None:
            return jobs.target.stacks_of(job, ranks, locals)
        cluster, snapshot = processes.cluster, self._record.snapshot
        members = tuple(sorted(set(existing(ranks, snapshot))))
        request = calls.StackRequest(with_locals=locals)
        answers = cluster.ask(living(members, snapshot), calls.STACK, request, _ASK_TIMEOUT_S)
        stacks = []
        for rank in members:
            state, answer = snapshot.ranks[rank], answers.get(rank)
            if state.status is Status.DEAD:
                stack = RankStack(rank, Doing(Activity.DEAD, text=describe(state)))
            elif answer is None:
                text = last_known(state, cluster.process(state.pid).state)
                stack = RankStack(rank, Doing(Activity.SILENT, text=text))
            elif isinstance(answer, CannotAnswer):
                text = f"its observer failed: {answer.why}"
                stack = RankStack(rank, Doing(Activity.SILENT, text=text))
            else:
                stack = RankStack(rank, answer.doing, answer.frames)
            stacks.append(stack)
        return stack_tree.merge(stacks, snapshot.world_size)

    def board(self, runs: RunRegistry, store: str) -> Board:
        """Return the board now, with what ranks do that are in a run, without asking them.

        While ranks run that a script has started itself, theirs.
        """
        script = runs.script
        if script is not None and script.started_ranks is not None:
            script.look()
            if (shown := script.started_ranks.shown(script.title)) is not None:
                return board_of(shown)
        facts, run = BoardFacts(self._record.snapshot, store=store), runs.current
        snapshot, collectives = facts.snapshot, Collectives()
        if self._pool.processes is None or run is None or run.done or snapshot.ended:
            return board_of(facts)
        # The collective logs are closed from another thread when the session ends.
        with contextlib.suppress(ValueError):
            # How many collectives of each rank the board looks at.
            collectives = run.logs.read(run.ranks, run.cell, 64)
        diagnosis = _still_true(run, snapshot, collectives)
        facts = replace(
            facts,
            snapshot=_with_waits(snapshot, run, diagnosis),
            collectives=collectives,
            pending=run.pending,
            diagnosis=diagnosis,
            stops=runs.stops,
            members=run.ranks,
        )
        board = board_of(facts)
        notes = filter(None, [stuck_note(board, diagnosis)])
        return replace(board, notes=(*notes, *board.notes))

    def mesh_of_models(self) -> Mesh | None:
        """The largest mesh on which ranks hold parameters; None for none."""
        cluster = self._pool.need("--ranks").cluster
        everyone = tuple(range(self._record.snapshot.world_size))
        answers = cluster.ask(everyone, calls.HELD, calls.Nothing(), _ASK_TIMEOUT_S)
        return mesh_of_parameters({r: e.parameters for r, e in answered(answers).items()})

    def layout(self, mesh: Mesh | None, ranks: Ranks | None = None) -> MeshLayout:
        """Return `mesh`, which ranks made, and what `ranks` hold of each parameter."""
        cluster = self._pool.need("%ddp_mesh").cluster
        snapshot = self._record.snapshot
        members = existing(ranks, snapshot)
        alive = living(members, snapshot)
        answers = cluster.ask(alive, calls.HELD, calls.Nothing(), _FACTS_TIMEOUT_S)
        held = answered(answers)
        silent = [rank for rank in members if rank not in held]
        if mesh is None and not any(own.parameters for own in held.values()) and not silent:
            raise UsageMistake(
                "The ranks have no device mesh, and no model with parameters. Make them first: "
                'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), fully_shard(model).'
            )
        notes = [_NO_ANSWER.format(name_ranks(silent))] if silent else []
        return arranged(mesh, held, snapshot.world_size, notes)

    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """Versions and environment of each rank that answers, for `%ddp_doctor`."""
        cluster = self._pool.need("%ddp_doctor").cluster
        everyone = tuple(range(self._record.snapshot.world_size))
        answers = cluster.ask(everyone, calls.SOFTWARE, calls.Nothing(), _FACTS_TIMEOUT_S)
        return {rank: dict(answer.facts) for rank, answer in answered(answers).items()}


def _still_true(run: CellRun, snapshot: Snapshot, collectives: Collectives) -> Diagnosis | None:
    """Return what was found of a run that ranks are in, if none of them has moved since.

    Ranks are not asked for the board.
    """
    if run.detector is not None:
        return run.detector.latest
    issued = (record.issued_ns for records in collectives.of.values() for record in records[-1:])
    moved = (snapshot.ranks[rank].since_ns for rank in run.pending)
    same = max((*issued, *moved), default=0) <= run.found.at_ns
    return run.found.diagnosis if same else None


def _with_waits(snapshot: Snapshot, run: CellRun, diagnosis: Diagnosis | None) -> Snapshot:
    """Add what ranks of the run were found to wait in; a rank itself sends only its line."""
    if diagnosis is None or not diagnosis.wrong:
        return snapshot
    doing = {rank: text for rank, text in (diagnosis.doing or {}).items() if rank in run.pending}
    ranks = (replace(s, doing=doing.get(s.rank, s.doing)) for s in snapshot.ranks)
    return replace(snapshot, ranks=tuple(ranks))
