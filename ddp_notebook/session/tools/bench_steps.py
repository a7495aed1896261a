"""Measures training steps: where their time goes, on the existing ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.fit import LEAST_SIZES, NoFit, fit
from ddp_notebook.bench.steps import predict, stats
from ddp_notebook.bench.steps.plan import Memory, StepPlan
from ddp_notebook.bench.steps.results import Prediction, StepBenchResult
from ddp_notebook.diagnosis.training import construction
from ddp_notebook.errors import CellInterrupted, DDPError, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Event,
    Progress,
    Ranks,
    Status,
    codec,
    format_ranks,
    name_ranks,
    said_by,
)
from ddp_notebook.model.ddp import STOPPED, RankFailure
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Answer, Call, Request
from ddp_notebook.session.guards import check_name
from ddp_notebook.session.options import cores
from ddp_notebook.session.queries import Answers, ask
from ddp_notebook.session.tools.measuring import Benchmarks, HostLoad, Measuring
from ddp_notebook.state.descriptions import exit_text

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.setup.set_up import SetUp

_TASK = "steps"
_STOP_WITHIN_S = 15.0
"""How long interrupted ranks have to finish the steps that they are in."""
_LAST_WORD_S = 2.0
_DEATH_KNOWN_S = 0.5
"""After its peers have noticed, on an idle machine."""
_BUCKETS_FROM_BYTES = 64 * 2**10

Watch = Callable[[float, Callable[[], StepBenchResult]], None]
"""Called with the share that is done, 0 to 1, and a function that returns the points so far."""


class StepBench:
    """The benchmarks of training steps of a session."""

    def __init__(
        self,
        record: Record,
        pool: RankPool,
        runs: RunRegistry,
        set_up: SetUp,
        benchmarks: Benchmarks,
    ) -> None:
        self._record = record
        self._pool = pool
        self._runs = runs
        self._set_up = set_up
        self._benchmarks = benchmarks

    def run(
        self,
        plan: StepPlan,
        *,
        predict_for: int | None = None,
        watch: Watch | None = None,
    ) -> StepBenchResult:
        """`Session.bench_steps`."""
        processes = self._pool.need("%ddp_bench")
        members = self._runs.idle(None, "%ddp_bench")
        for name in (plan.model, plan.loss, plan.data):
            if name:
                check_name(name)
        with self._benchmarks.measuring(f"training steps of {plan.model}") as measuring:
            prepared = self._prepare(processes, members, plan, measuring)
            try:
                batches = _usable(prepared, plan)
            except DDPError:
                self._ask(processes, members, calls.FORGET_STEPS, calls.Nothing())
                raise
            about = _about(prepared[members[0]], len(members))
            partial = _PartialResults(members, watch, measuring, about)
            unsubscribe = self._record.subscribe(partial.take)
            try:
                load = HostLoad([state.pid for state in self._record.snapshot.ranks if state.pid])
                request = calls.StepsMeasurement(tuple(batches), not _communicates(prepared))
                answers = self._ask(
                    processes, members, calls.MEASURE_STEPS, request, measuring.cancelled
                )
                others_cpu = load.others()
                problem = self._end(answers, partial)
            finally:
                unsubscribe()
        notes = (*about.notes, *_left_out(prepared, plan, batches))
        result = stats.summarise(
            replace(about, notes=notes, problem=problem, others_cpu=others_cpu),
            [partial.blocks[rank] for rank in members],
            rounds=plan.rounds,
        )
        if not result.points:
            problem = f"{problem} Nothing was measured."
            raise (CellInterrupted(problem, ()) if answers.interrupted else DDPError(problem))
        if predict_for is None:
            return result
        return replace(result, prediction=predicted(result, predict_for))

    def _prepare(
        self, processes: Processes, members: Ranks, plan: StepPlan, measuring: Measuring
    ) -> dict[int, dict[str, Any]]:
        request = calls.StepsRequest(codec.encode(plan), processes.devices.device)
        answers = self._ask(processes, members, calls.PREPARE_STEPS, request, measuring.cancelled)
        if answers.complete:
            return answers.values
        if answers.pending:
            self._set_up.abort(answers.pending)
        if answers.interrupted:
            raise CellInterrupted("The benchmark was interrupted; nothing was measured.", ())
        dead = {rank: f"died, {exit_text(code)}" for rank, code in answers.dead.items()}
        raise UsageMistake(f"{plan.model} cannot be measured ({said_by(answers.texts | dead)}).")

    def _ask(
        self,
        processes: Processes,
        members: Ranks,
        call: Call[Request, Answer | RankFailure],
        request: Request,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Answers[Answer]:
        return ask(
            processes.cluster,
            self._record,
            members,
            call,
            request,
            cancelled=cancelled,
            interrupt_grace_s=_STOP_WITHIN_S,
        )

    def _end(self, answers: Answers[Any], partial: _PartialResults) -> str:
        """How it ended, empty on success; the ranks are usable afterwards."""
        if answers.complete:
            # A rank's last event arrives independently of its answer.
            blocks = {rank: answer["blocks"] for rank, answer in answers.values.items()}
            self._record.wait_for(lambda: partial.has(blocks), _LAST_WORD_S)
            return ""
        self._see_dead(answers)
        how = _how(answers)
        if answers.interrupted and not (answers.pending or answers.failed or answers.dead):
            return how
        if any(failure.kind == STOPPED for failure in answers.failed.values()):
            return f"{how} After that: %ddp_abort"  # which would end a process that is stopped
        try:
            # A rank that failed may have left the others in a collective.
            self._set_up.abort(answers.pending or None)
        except DDPError as error:
            return f"{how} The ranks could not be set up again: {error}"
        if answers.dead:
            how += f" Bring it back: %ddp_restart --ranks {format_ranks(answers.dead)}"
        return how

    def _see_dead(self, answers: Answers[Any]) -> None:
        """Count a rank as dead whose end is known only now: its peers notice it in a moment."""
        if not answers.failed or not answers.pending:
            return
        self._record.wait_for(
            lambda: bool(self._record.snapshot.with_status(Status.DEAD)),
            scaled_for_load(_DEATH_KNOWN_S),
        )
        for rank in self._record.snapshot.with_status(Status.DEAD):
            if rank in answers.pending:
                answers.dead[rank] = self._record.snapshot.ranks[rank].exit_code or 0
        answers.pending = tuple(rank for rank in answers.pending if rank not in answers.dead)


class _PartialResults:
    """The blocks that the ranks have measured so far."""

    def __init__(
        self, members: Ranks, watch: Watch | None, measuring: Measuring, about: StepBenchResult
    ) -> None:
        self.blocks: dict[int, list[Mapping[str, Any]]] = {rank: [] for rank in members}
        self._watch = watch
        self._measuring = measuring
        self._about = about

    def take(self, events: Sequence[Event]) -> None:
        """Called with what is new, from any thread."""
        for event in events:
            if isinstance(event, Progress) and event.task == _TASK and event.rank in self.blocks:
                self.blocks[event.rank].append(event.value)
                if event.rank == min(self.blocks):
                    self._measuring.done = event.done / event.total
                    if self._watch is not None:
                        self._watch(self._measuring.done, self.so_far)

    def so_far(self) -> StepBenchResult:
        """The points so far, thread-safe; computes nothing expensive."""
        return stats.so_far(self._about, [list(blocks) for blocks in self.blocks.values()])

    def has(self, counts: Mapping[int, int]) -> bool:
        """True when each rank has reported this many blocks."""
        return all(len(self.blocks[rank]) >= count for rank, count in counts.items())


def _about(first: Mapping[str, Any], ranks: int) -> StepBenchResult:
    """The facts known before anything is measured, from the first rank."""
    return StepBenchResult(
        model=first["title"],
        parameters=first["parameters"],
        gradient_bytes=first["gradient_bytes"],
        inputs=first["inputs"],
        backend=first["backend"],
        device=first["device"],
        world_size=ranks,
        cores=cores(),
        threads=first["threads"],
        notes=tuple(first["notes"]),
    )


def _usable(prepared: Mapping[int, Mapping[str, Any]], plan: StepPlan) -> list[int]:
    """The batches that can be measured. Raises UsageMistake, DDPError when there are none."""
    models = {rank: each["contents"] for rank, each in prepared.items()}
    findings = construction.compare(models, plan.model)
    if findings:
        raise UsageMistake(
            f"{plan.model} is not the same on all ranks, and DDP would hang or be wrong: "
            f"{findings[0].cause}."
        )
    for rank, facts in prepared.items():
        refusal = Memory(*facts["memory"]).refusal(plan.batches)
        if refusal:
            raise UsageMistake(f"{refusal} ({name_ranks((rank,))})")
    works = set.intersection(*(set(facts["works"]) for facts in prepared.values()))
    if not works:
        raise DDPError(f"{plan.model} cannot take a step: {_raised(prepared)}")
    return sorted(works)


def _left_out(
    prepared: Mapping[int, Mapping[str, Any]], plan: StepPlan, batches: Sequence[int]
) -> list[str]:
    notes = []
    missing = [str(batch) for batch in plan.batches if batch not in batches]
    if missing:
        notes.append(f"Not measured: batch {', '.join(missing)}. {_raised(prepared)}")
    if _communicates(prepared):
        notes.append(
            f"{plan.model} calls collectives itself, so no rank can take a step alone: efficiency "
            "is against the step under no_sync."
        )
    return notes


def _communicates(prepared: Mapping[int, Mapping[str, Any]]) -> bool:
    return any(facts["communicates"] for facts in prepared.values())


def _raised(prepared: Mapping[int, Mapping[str, Any]]) -> str:
    texts = {rank: facts["raised"] for rank, facts in prepared.items() if facts["raised"]}
    return said_by(texts, " raised ")


def _how(answers: Answers[Any]) -> str:
    """Why not all ranks finished, in words."""
    if answers.interrupted:
        return "The benchmark was interrupted."
    died = [f"rank {rank} died, {exit_text(code)}" for rank, code in answers.dead.items()]
    stopped = {r: f.text for r, f in answers.failed.items() if f.kind == STOPPED}
    why = "; ".join(died) or said_by(stopped) or said_by(answers.texts, " raised ")
    why = why or f"{name_ranks(answers.pending)} did not answer"
    return f"The benchmark ended early: {why}."


def predicted(result: StepBenchResult, world_size: int) -> Prediction:
    """What the model predicts for `world_size` ranks, or why it cannot."""
    large = [point for point in result.reduces if point.size_bytes >= _BUCKETS_FROM_BYTES]
    # Where there are enough of them: what small messages take decides nothing about buckets.
    used = large if len(large) >= LEAST_SIZES else result.reduces
    try:
        model = fit([point.size_bytes for point in used], [point.each_us / 1e6 for point in used])
    except NoFit as error:
        return Prediction(world_size, refused=str(error))
    ground = predict.Ground(
        reduce_s=model.predict,
        latency_us=model.latency_s * 1e6,
        world_size=result.world_size,
        cores=result.cores,
        threads=result.threads,
        busy_cores=max(0.1, used[-1].busy_cores),
        shares_cores=result.device == "cpu",
    )
    return predict.predict(result, ground, world_size)
