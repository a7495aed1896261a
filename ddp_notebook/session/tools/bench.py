"""Measures the cost of collectives against tensor size, on the existing ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.results import BenchRun
from ddp_notebook.bench.summary import Setting, summarise
from ddp_notebook.errors import DDPError, UsageMistake
from ddp_notebook.model import (
    Event,
    Progress,
    Ranks,
    codec,
    format_bytes,
    format_ranks,
    name_ranks,
    said_by,
)
from ddp_notebook.rank import calls
from ddp_notebook.session.options import BACKENDS, DEVICES, check_choice, cores
from ddp_notebook.session.queries import Answers, ask
from ddp_notebook.session.tools.bench_result import BenchResult
from ddp_notebook.session.tools.measuring import Benchmarks, Measuring

if TYPE_CHECKING:
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.setup.set_up import SetUp

_MEMORY_SHARE = 0.5
"""Share of the free memory; the rest is for the user's own work and for the backend."""
_STOP_GRACE_S = 20.0
"""How long interrupted ranks have to finish the collectives they are in."""


@dataclass(frozen=True)
class BenchOptions:
    """Where a plan is run. Raises UsageMistake for values that cannot work.

    `backend` and `device` auto are those of the session. `baseline` is a run to compare with.
    """

    ranks: Ranks | None = None
    backend: str = "auto"
    device: str = "auto"
    baseline: BenchRun | None = None

    def __post_init__(self) -> None:
        check_choice("--backend", self.backend, BACKENDS)
        check_choice("--device", self.device, DEVICES)


class PartialResults:
    """The measurements so far of a running benchmark. Thread-safe."""

    def __init__(self, ranks: Ranks) -> None:
        self.done = 0.0
        """The share of the run that is done, 0 to 1."""
        self._lock = threading.Lock()
        self._visits: dict[int, list[Mapping[str, Any]]] = {rank: [] for rank in ranks}

    def take(self, events: Sequence[Event]) -> bool:
        """Add a benchmark's events; True if there were any."""
        is_news = False
        for event in events:
            if isinstance(event, Progress) and event.task == "bench" and event.rank in self._visits:
                is_news = True
                with self._lock:
                    if event.value:
                        self._visits[event.rank].append(event.value)
                    self.done = max(self.done, event.done / event.total)
        return is_news

    def visits(self) -> dict[int, list[Mapping[str, Any]]]:
        """All visits so far, by rank."""
        with self._lock:
            return {rank: list(visits) for rank, visits in self._visits.items()}


Watch = Callable[[float, Callable[[], BenchRun]], None]
"""Called with the share that is done, and what gives all that was measured so far."""


class Bench:
    """The collective benchmarks of a session."""

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

    @property
    def device(self) -> str:
        """Where the tensors of a benchmark live: cpu, or cuda:0."""
        return self._pool.need("%ddp_bench").devices.device

    def run(
        self, plan: Plan, options: BenchOptions | None = None, watch: Watch | None = None
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
        processes = self._pool.need("%ddp_bench")
        members = self._runs.idle(options.ranks, "%ddp_bench")
        if self._set_up.half_way:
            raise UsageMistake("%ddp_bench needs ranks whose set-up is complete: %ddp_init")
        _check_world_sizes(plan, members)
        backend, device = _where(options, processes)
        facts = self._facts(processes, members, device)
        _check_memory(plan, facts, device)
        used = backend or _backend_for(device, facts[members[0]]["backend"])
        _check_backend(used, device)
        setting = Setting(
            plan=plan,
            ranks=members,
            backend=used,
            device=device,
            cores=cores(),
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            versions=facts[members[0]]["versions"],
            buckets_bytes=tuple(facts[members[0]]["buckets_bytes"]),
        )
        own = used == _backend_for(device, facts[members[0]]["backend"])
        with self._benchmarks.measuring(", ".join(plan.ops)) as measuring:
            run = self._measure(processes, setting, "" if own else used, watch, measuring)
        return BenchResult.of(run, options.baseline)

    def _facts(
        self, processes: Processes, members: Ranks, device: str
    ) -> dict[int, dict[str, Any]]:
        answers = ask(
            processes.cluster, self._record, members, calls.BENCH_FACTS, calls.BenchDevice(device)
        )
        if not answers.complete:
            raise UsageMistake(f"%ddp_bench cannot begin: {_why(answers, self._record)}.")
        return answers.values

    def _measure(
        self,
        processes: Processes,
        setting: Setting,
        backend: str,
        watch: Watch | None,
        measuring: Measuring,
    ) -> BenchRun:
        """Run it on the ranks, and make a result of it."""
        partial = PartialResults(setting.ranks)

        def so_far() -> BenchRun:
            return summarise(setting, partial.visits(), {}, fitted=False)

        def take(events: Sequence[Event]) -> None:
            if partial.take(events):
                measuring.done = partial.done
                if watch is not None:
                    watch(partial.done, so_far)

        request = calls.BenchRequest(
            codec.encode(setting.plan), setting.ranks, backend, setting.device
        )
        unsubscribe = self._record.subscribe(take)
        try:
            answers = ask(
                processes.cluster,
                self._record,
                setting.ranks,
                calls.BENCH,
                request,
                cancelled=measuring.cancelled,
                interrupt_grace_s=_STOP_GRACE_S,
            )
        finally:
            unsubscribe()
        visits = partial.visits()
        visits.update({rank: value["visits"] for rank, value in answers.values.items()})
        ended = "" if answers.complete else _why(answers, self._record)
        run = summarise(setting, visits, answers.values, ended)
        if not run.curves:
            raise _nothing(answers, ended)
        return run


def _nothing(answers: Answers[Any], ended: str) -> DDPError:
    """The error to raise when there is no size to show."""
    if answers.failed and not answers.dead and not answers.interrupted and not answers.pending:
        return UsageMistake(f"%ddp_bench cannot measure this: {ended}.")
    return DDPError(f"%ddp_bench ended before anything was measured: {ended}.")


def _why(answers: Answers[Any], record: Record) -> str:
    """Why a run was cut short, and what to do about it."""
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


def _check_world_sizes(plan: Plan, members: Ranks) -> None:
    for size in plan.world_sizes:
        if not 1 <= size <= len(members):
            raise UsageMistake(
                f"--world-sizes {size}: there are {len(members)} ranks to take part. For example: "
                f"--world-sizes {','.join(str(n) for n in range(2, len(members) + 1)) or 1}"
            )


def _where(options: BenchOptions, processes: Processes) -> tuple[str, str]:
    """The backend, empty for the session's, and the device the tensors live on."""
    devices = processes.devices
    device = devices.device
    if options.device == "cpu":
        device = "cpu"
    elif options.device == "cuda" and not device.startswith("cuda"):
        raise UsageMistake(
            "--device cuda: the ranks were started without GPUs. With them: "
            "%ddp_init --device cuda --replace"
        )
    return "" if options.backend == "auto" else options.backend, device


def _backend_for(device: str, known: str) -> str:
    """The backend of a group for tensors on `device`: its name may be ``cpu:gloo,cuda:nccl``."""
    by_device = dict(part.split(":") for part in known.split(",") if ":" in part)
    return by_device.get(device.split(":")[0], known)


def _check_backend(backend: str, device: str) -> None:
    if backend == "nccl" and device == "cpu":
        raise UsageMistake(
            "NCCL moves data between GPUs only, so --backend nccl cannot measure tensors on the "
            "CPU. Use --backend gloo, or --device cuda where there are GPUs."
        )


def _check_memory(plan: Plan, facts: Mapping[int, Mapping[str, Any]], device: str) -> None:
    """Raises UsageMistake, before any memory is taken, when the sizes would not fit."""
    hosts: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        # Each rank has its own GPU; the ranks of a host share its memory.
        hosts.setdefault(fact["host"] if device == "cpu" else str(rank), []).append(rank)
    for here in hosts.values():
        free = min(facts[rank]["free_bytes"] for rank in here)
        share = int(free * _MEMORY_SHARE) // len(here)
        needed = plan.memory_bytes(len(facts))
        if needed > share:
            fits = plan.largest_that_fits(len(facts), share)
            raise UsageMistake(
                f"{format_bytes(plan.max_bytes)} needs {format_bytes(needed)} on each of "
                f"{name_ranks(here)}, and {format_bytes(free)} are free there, of which a "
                f"benchmark takes half at most. What fits: --max {_option(fits)}"
            )


def _option(count: int) -> str:
    """A size as one types it: ``64M``."""
    for letter, unit in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= unit:
            return f"{count // unit}{letter}"
    return str(count)
