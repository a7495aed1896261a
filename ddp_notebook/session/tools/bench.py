"""Benchmarks on the existing ranks: of collectives against tensor size, and of training steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ddp_notebook.bench import steps
from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchRun, Conditions
from ddp_notebook.bench.stats import others_cpu, summarise
from ddp_notebook.bench.steps import Memory, StepBenchResult, StepPlan
from ddp_notebook.diagnosis.training import construction
from ddp_notebook.errors import CellInterrupted, DDPError, UsageMistake
from ddp_notebook.launch import gpu_links
from ddp_notebook.launch.gpu_links import Links
from ddp_notebook.launch.host_facts import cores
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Event,
    Progress,
    Ranks,
    Status,
    codec,
    exit_text,
    format_bytes,
    format_ranks,
    name_ranks,
    said_by,
)
from ddp_notebook.model.ddp import STOPPED, RankFailure
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Answer, Call, Request
from ddp_notebook.session.guards import check_group, check_name
from ddp_notebook.session.options import BACKENDS, DEVICES, check_choice
from ddp_notebook.session.queries import Answers, ask
from ddp_notebook.session.tools.bench_result import BenchResult

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.set_up import SetUp

Result = TypeVar("Result")
Watch: TypeAlias = Callable[[float, Callable[[], Result]], None]
"""Called with the share that is done, 0 to 1, and what gives all that was measured so far."""


@dataclass(frozen=True)
class BenchOptions:
    """Where a plan is run. Raises UsageMistake for values that cannot work.

    `backend` and `device` auto are those of the session. `baseline` is a run to show beside it.
    """

    ranks: Ranks | None = None
    backend: str = "auto"
    device: str = "auto"
    baseline: BenchRun | None = None

    def __post_init__(self) -> None:
        check_choice("--backend", self.backend, BACKENDS)
        check_choice("--device", self.device, DEVICES)


class Measuring:
    """A running benchmark: what it measures, its progress, and how to cancel it. Thread-safe."""

    def __init__(self, what: str, members: Ranks) -> None:
        self.what = what
        """A title of what is measured."""
        self.done = 0.0
        """The share that is done, 0 to 1."""
        self.over = threading.Event()
        self.heard: dict[int, list[Mapping[str, Any]]] = {rank: [] for rank in members}
        """The reports of each rank so far, in its order."""
        self._cancelled = threading.Event()
        self._watch: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        """End it as an interrupt of its cell does: the partial result is kept."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Return whether it is to end."""
        return self._cancelled.is_set()

    def follow(
        self, watch: Watch[Result] | None, result: Callable[[Mapping[int, Any]], Result]
    ) -> None:
        """Call `watch` with whatever is reported from now on; `result` makes reports a result."""

        def so_far() -> Result:
            # The reports are copied, since more arrive while the result is made.
            return result({rank: list(reports) for rank, reports in self.heard.items()})

        if watch is not None:
            self._watch = lambda: watch(self.done, so_far)

    def take(self, events: Sequence[Event]) -> None:
        """Add what ranks report. Called by whichever thread receives it."""
        for event in events:
            if (
                isinstance(event, Progress)
                and event.task in ("bench", "steps")
                and event.rank in self.heard
            ):
                if event.value:
                    self.heard[event.rank].append(event.value)
                self.done = max(self.done, event.done / event.total)
                self._watch()


class Benchmarks:
    """The benchmarks of a session; at most one is running."""

    def __init__(self, record: Record, pool: RankPool, runs: RunRegistry, set_up: SetUp) -> None:
        self.current: Measuring | None = None
        """The running benchmark; None without one."""
        self._record = record
        self._pool = pool
        self._runs = runs
        self._set_up = set_up

    @property
    def device(self) -> str:
        """Where the tensors of a benchmark live: cpu, or each rank's GPU (cuda)."""
        return self._pool.need("%ddp_bench").devices.device

    @contextmanager
    def _measuring(self, what: str, members: Ranks) -> Iterator[Measuring]:
        """A context in which a benchmark of `what` is registered as running, and hears its ranks.

        A rank's last report may arrive after its answer: what hears it must outlive the call.
        """
        measuring = self.current = Measuring(what, members)
        unsubscribe = self._record.subscribe(measuring.take)
        self._record.add(())
        try:
            yield measuring
        finally:
            unsubscribe()
            self.current = None
            measuring.over.set()
            self._record.add(())

    def _ask(
        self,
        members: Ranks,
        call: Call[Request, Answer | RankFailure],
        request: Request,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Answers[Answer]:
        """Return the ranks' answers. Interrupted, they have a while to finish their collectives."""
        cluster = self._pool.need("%ddp_bench").cluster
        record = self._record
        return ask(
            cluster, record, members, call, request, cancelled=cancelled, interrupt_grace_s=20.0
        )

    # -- collectives ---------------------------------------------------------------------

    def collectives(
        self,
        plan: Plan,
        options: BenchOptions | None = None,
        watch: Watch[BenchRun] | None = None,
    ) -> BenchResult:
        """Measure collectives against tensor size, on all ranks or those of `options`.

        The method: ranks are aligned by a barrier before each batch of iterations, every rank
        stamps every iteration, and an iteration took as long as on its slowest rank. Sizes are
        visited in at least three rounds, each in another order, until the 95 % interval of the
        median is within `plan.precision` or `plan.budget_s` ends. Results are compared exactly.
        Bandwidths are nccl-tests', GB = 1e9 bytes. `ddp_notebook.rank.bench.loop` names the
        sources.

        `watch` is called with the progress, from another thread. After an interrupt, when
        `measuring` is cancelled, or when a rank dies, the partial result is returned and `ended`
        says why. Raises UsageMistake when it cannot begin, DDPError when it ends before anything
        was measured.
        """
        options = options or BenchOptions()
        device = self.device
        members = self._runs.idle(options.ranks, "%ddp_bench")
        check_group(self._record.snapshot)
        if self._set_up.half_way:
            raise UsageMistake("%ddp_bench needs ranks whose setup is complete: %ddp_init")
        for size in plan.world_sizes:
            if not 1 <= size <= len(members):
                example = ",".join(str(n) for n in range(2, len(members) + 1)) or 1
                raise UsageMistake(
                    f"--world-sizes {size}: there are {len(members)} ranks to take part. For "
                    f"example: --world-sizes {example}"
                )
        if options.device == "cuda" and not device.startswith("cuda"):
            raise UsageMistake(
                "--device cuda: the ranks were started without GPUs. With them: "
                "%ddp_init --device cuda --replace"
            )
        device = "cpu" if options.device == "cpu" else device
        answers = self._ask(members, calls.BENCH_FACTS, calls.BenchDevice(device))
        if not answers.complete:
            raise UsageMistake(f"%ddp_bench cannot begin: {_why(answers)}.")
        facts = answers.values
        _check_memory(plan, facts, device)
        first = facts[members[0]]
        # The name of a backend may be ``cpu:gloo,cuda:nccl``: that of each device.
        by_device = dict(part.split(":") for part in first["backend"].split(",") if ":" in part)
        own = by_device.get(device.split(":")[0], first["backend"])
        backend = own if options.backend == "auto" else options.backend
        if backend == "nccl" and device == "cpu":
            raise UsageMistake(
                "NCCL moves data between GPUs only, so --backend nccl cannot measure tensors on "
                "the CPU. Use --backend gloo, or --device cuda where there are GPUs."
            )
        links = self._links(members, facts) if (backend, device) == ("nccl", "cuda") else Links()
        about = BenchRun(
            backend=backend,
            device=device,
            links=links.text,
            limit_gb_per_s=links.limit_gb_per_s,
            bucket_bytes=tuple(first["bucket_bytes"]),
            conditions=Conditions(cores=cores()),
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            versions=first["versions"],
        )
        made_for_it = "" if backend == own else backend
        request = calls.BenchRequest(
            codec.encode(plan), members, made_for_it, device, time.time_ns()
        )
        with self._measuring(", ".join(plan.ops), members) as measuring:
            measuring.follow(watch, lambda heard: summarise(about, plan, members, heard, {}))
            told = self._ask(members, calls.BENCH, request, measuring.cancelled)
        # An answer has all visits; of a rank without one, those that it reported count.
        visits = measuring.heard | {rank: value["visits"] for rank, value in told.values.items()}
        ended = "" if told.complete else _why(told)
        run = summarise(replace(about, ended=ended), plan, members, visits, told.values)
        if run.curves:
            return BenchResult.of(run, options.baseline)
        if told.failed and not (told.dead or told.interrupted or told.pending):
            raise UsageMistake(f"%ddp_bench cannot measure this: {ended}.")
        raise DDPError(f"%ddp_bench ended before anything was measured: {ended}.")

    def _links(self, members: Ranks, facts: Mapping[int, Mapping[str, Any]]) -> Links:
        """Return what joins these ranks' GPUs; nothing on several hosts, or of shared ones."""
        gpus = [self._pool.need("%ddp_bench").devices.gpus[rank] for rank in members]
        hosts = {each["host"] for each in facts.values()}
        one_each = len(set(gpus)) == len(gpus) and len(hosts) == 1
        return gpu_links.read(gpus) if one_each else Links()

    # -- training steps ------------------------------------------------------------------

    def training_steps(
        self,
        plan: StepPlan,
        watch: Watch[StepBenchResult] | None = None,
        ranks: Ranks | None = None,
    ) -> StepBenchResult:
        """Measure the steps of a model on `ranks`, by default all; any thread calls `watch`.

        The measurements are kept when a rank fails or dies, the user interrupts, or the benchmark
        is cancelled: then the result's `problem` says so. Raises UsageMistake before anything is
        measured when the model, its loss or data cannot be used, differ between ranks or do not
        fit into memory; CellInterrupted and DDPError when nothing was measured.
        """
        device = self.device
        members = self._runs.idle(ranks, "%ddp_bench")
        check_group(self._record.snapshot)
        for name in filter(None, (plan.model, plan.loss, plan.data)):
            check_name(name)
        with self._measuring(f"training steps of {plan.model}", members) as measuring:
            prepared = self._prepare(members, plan, device, measuring)
            try:
                batches = _usable(prepared, plan)
            except DDPError:
                # What was prepared is a copy of the model, with its data, on each rank: it would
                # stay in memory until the next benchmark.
                self._ask(members, calls.FORGET_STEPS, calls.Nothing())
                raise
            communicates = any(facts["communicates"] for facts in prepared.values())
            first = prepared[members[0]]
            about = StepBenchResult(
                model=first["title"],
                parameters=first["parameters"],
                gradient_bytes=first["gradient_bytes"],
                inputs=first["inputs"],
                backend=first["backend"],
                device=first["device"],
                world_size=len(members),
                cores=cores(),
                threads=first["threads"],
                notes=tuple(first["notes"]),
            )

            def result(heard: Mapping[int, Any], **known: Any) -> StepBenchResult:
                told = [heard[rank] for rank in members]
                return steps.summarise(replace(about, **known), told, rounds=plan.rounds)

            measuring.follow(watch, result)
            wanted = calls.StepsMeasurement(
                tuple(batches), not communicates, members, time.time_ns()
            )
            answers = self._ask(members, calls.MEASURE_STEPS, wanted, measuring.cancelled)
            problem = self._end(answers, measuring)
        notes = list(about.notes)
        missing = [str(batch) for batch in plan.batches if batch not in batches]
        if missing:
            notes.append(f"Not measured: batch {', '.join(missing)}. {_raised(prepared)}")
        if communicates:
            notes.append(
                f"{plan.model} calls collectives itself, so no rank can take a step alone: "
                "efficiency is against the step under no_sync."
            )
        others = others_cpu(answers.values.values())
        found = result(measuring.heard, notes=tuple(notes), problem=problem, others_cpu=others)
        if not found.points:
            problem = f"{problem} Nothing was measured."
            raise (CellInterrupted(problem, ()) if answers.interrupted else DDPError(problem))
        return found

    def _prepare(
        self, members: Ranks, plan: StepPlan, device: str, measuring: Measuring
    ) -> dict[int, dict[str, Any]]:
        request = calls.StepsRequest(codec.encode(plan), device, members)
        answers = self._ask(members, calls.PREPARE_STEPS, request, measuring.cancelled)
        if answers.complete:
            return answers.values
        if answers.pending:
            self._set_up.abort(answers.pending)
        if answers.interrupted:
            raise CellInterrupted("The benchmark was interrupted; nothing was measured.", ())
        dead = {rank: f"died, {exit_text(code)}" for rank, code in answers.dead.items()}
        raise UsageMistake(f"{plan.model} cannot be measured ({said_by(answers.texts | dead)}).")

    def _end(self, answers: Answers[Any], measuring: Measuring) -> str:
        """Return how it ended, empty on success; the ranks are usable afterwards."""
        if answers.complete:
            # A rank's last report arrives independently of its answer.
            counts = {rank: answer["blocks"] for rank, answer in answers.values.items()}
            heard = measuring.heard
            self._record.wait_for(
                lambda: all(len(heard[rank]) >= count for rank, count in counts.items()), 2.0
            )
            return ""
        record = self._record
        if answers.failed and answers.pending:
            # One of the pending ranks may be dead and not known to be so: its peers notice the
            # closed connection a moment before the kernel hears of the end of the process.
            record.wait_for(
                lambda: bool(record.snapshot.with_status(Status.DEAD)), scaled_for_load(0.5)
            )
            for rank in record.snapshot.with_status(Status.DEAD):
                if rank in answers.pending:
                    answers.dead[rank] = record.snapshot.ranks[rank].exit_code or 0
            answers.pending = tuple(rank for rank in answers.pending if rank not in answers.dead)
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


def _why(answers: Answers[Any]) -> str:
    """Return why a benchmark of collectives was cut short, and the remedy."""
    parts = [
        f"rank {rank} died (exit code {code}): %ddp_restart --ranks {rank}"
        for rank, code in answers.dead.items()
    ]
    if answers.failed and not answers.dead:  # else the others only report that their peer is gone
        parts.append(said_by(answers.texts))
    if answers.interrupted:
        parts.append("it was interrupted")
    if answers.pending:
        parts.append(
            f"{name_ranks(answers.pending)} still in a collective: %ddp_abort, or with new "
            f"processes %ddp_restart --ranks {format_ranks(answers.pending)}"
        )
    return "; ".join(parts)


def _how(answers: Answers[Any]) -> str:
    """Return why not all ranks finished their training steps."""
    if answers.interrupted:
        return "The benchmark was interrupted."
    died = [f"rank {rank} died, {exit_text(code)}" for rank, code in answers.dead.items()]
    stopped = {r: f.text for r, f in answers.failed.items() if f.kind == STOPPED}
    why = "; ".join(died) or said_by(stopped) or said_by(answers.texts, " raised ")
    why = why or f"{name_ranks(answers.pending)} did not answer"
    return f"The benchmark ended early: {why}."


def _check_memory(plan: Plan, facts: Mapping[int, Mapping[str, Any]], device: str) -> None:
    """Raises UsageMistake, before any memory is taken, when the sizes would not fit.

    Half of what is free is left to the user's own work and to the backend.
    """
    hosts: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        # Each rank has its own GPU; the ranks of a host share its memory.
        hosts.setdefault(fact["host"] if device == "cpu" else str(rank), []).append(rank)
    for here in hosts.values():
        free = min(facts[rank]["free_bytes"] for rank in here)
        share = free // 2 // len(here)
        needed = plan.memory_bytes(len(facts))
        if needed > share:
            fits = plan.largest_that_fits(len(facts), share)
            power = min(max(fits.bit_length() - 1, 0) // 10, 3)
            raise UsageMistake(
                f"{format_bytes(plan.max_bytes)} needs {format_bytes(needed)} on each of "
                f"{name_ranks(here)}, and {format_bytes(free)} are free there; a "
                f"benchmark uses half of it at most. What fits: --max {fits >> 10 * power}"
                f"{('', 'K', 'M', 'G')[power]}"
            )


def _usable(prepared: Mapping[int, Mapping[str, Any]], plan: StepPlan) -> list[int]:
    """Return the batches that can be measured. Raises UsageMistake; DDPError without any."""
    contents = {rank: each["contents"] for rank, each in prepared.items()}
    findings = construction.compare(contents, plan.model)
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


def _raised(prepared: Mapping[int, Mapping[str, Any]]) -> str:
    texts = {rank: facts["raised"] for rank, facts in prepared.items() if facts["raised"]}
    return said_by(texts, " raised ")
