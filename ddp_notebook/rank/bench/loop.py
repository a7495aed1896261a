"""Visits sizes as rank 0 decides, times each one and checks its result.

Every rank runs the same collectives in the same order. What depends on the clock (how long to
warm up, what to measure next, how often, when to stop) is decided by rank 0 and broadcast, or
the ranks would diverge.

One visit: the result of one collective on known values is compared exactly, it is warmed up,
the ranks are aligned by a barrier, every rank times every iteration, and the times of the
slowest rank are computed for the next decision. The protocol is that of the MPI benchmarks:
S. Hunold and A. Carpen-Amarie, "Reproducible MPI Benchmarking is Still Not as Easy as You
Think", IEEE TPDS 27, 2016 (synchronised starts, the slowest rank, several shuffled runs), and
T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems", SC 2015
(medians with intervals by rank, measure until they are narrow).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.bench.plan import IN_FLIGHT, CurvePlan, Plan
from ddp_notebook.bench.schedule import Item, Schedule
from ddp_notebook.rank.bench import gloo_thread
from ddp_notebook.rank.bench.operations import Buffers, Operation
from ddp_notebook.rank.bench.timing import time_each, time_issue

_STOP = -1
_KEEP_WARMING_UP = 0
_ISSUES = 3
"""Collectives in each visit whose issue is timed separately; 1 if they are slow."""
_SLOW_NS = 10_000_000
_CHECKED_ROUNDS = 3
"""Results are compared in this many visits; later ones only check that zeros stay zeros."""

Report = Callable[[float, dict[str, Any]], None]


@dataclass
class Bench:
    """One run on one rank.

    `groups` are by world size, of the first so many ranks, None where this rank is not in it;
    `control` is of all ranks that take part. `device` is where the tensors live.
    """

    plan: Plan
    device: torch.device
    rank: int
    control: Any
    groups: Mapping[int, Any]
    report: Report
    stopped: Callable[[], bool]
    """Tells rank 0 whether to stop."""
    buffers: Buffers = field(init=False)
    usual: gloo_thread.Policies = field(default_factory=dict)
    """How gloo's loop threads are scheduled without tuning."""
    visits: list[dict[str, Any]] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_s


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Runs the plan on this rank; all ranks of `bench.control` must call it.

    After each visit to one size `bench.report(share done, visit)` is called. Returns all
    visits: ``number`` counts them, the same on all ranks, ``curve`` is the number of the curve,
    ``size_bytes`` the size, ``times_ns`` the time of every iteration (iteration i is the same
    collective on all ranks), ``issue_ns`` how long this rank took to issue its part, ``wrong``
    how many elements were wrong, ``loop_cpu`` how many cores gloo's loop threads kept busy, None
    without such threads.
    """
    curves = bench.plan.curves(bench.control.size())
    bench.buffers = _allocate(curves, bench)
    items = [
        Item(number, size)
        for number, curve in enumerate(curves)
        for size in curve.sizes(bench.plan.sizes())
    ]
    schedule, number = Schedule(bench.plan, items), 0
    bench.usual = gloo_thread.policies()
    try:
        while (item := _decide_item(bench, schedule, items)) is not None:
            visit = _visit(bench, schedule, item, curves[item.curve])
            if visit is not None:
                bench.visits.append({"number": number, **visit})
            number += 1
            latest = bench.visits[-1] if visit is not None else {}
            bench.report(schedule.progress(bench.spent_s), latest)
    finally:
        gloo_thread.restore(bench.usual)
    return bench.visits


def _allocate(curves: Sequence[CurvePlan], bench: Bench) -> Buffers:
    """Memory for the most that any curve needs."""
    sent = received = 1
    for curve in curves:
        largest = max(curve.sizes(bench.plan.sizes()), default=0)
        largest *= IN_FLIGHT if curve.mode == "pipelined" else 1
        sent = max(sent, largest)
        if not curve.operation.in_place:
            received = max(received, largest)
    return Buffers(sent, received, bench.device)


def _decide_item(bench: Bench, schedule: Schedule, items: Sequence[Item]) -> Item | None:
    number = _STOP
    if bench.rank == 0 and not bench.stopped():
        item = schedule.next(bench.spent_s)
        number = items.index(item) if item is not None else _STOP
    number = _agree(bench, number, bench.control)
    return None if number == _STOP else items[number]


def _visit(bench: Bench, schedule: Schedule, item: Item, curve: CurvePlan) -> dict[str, Any] | None:
    """Measures one size once; None on a rank that is not in its group, which only waits.

    `schedule` is the same on all ranks, though only rank 0 asks it what is next.
    """
    group = bench.groups[curve.world_size]
    new = schedule.is_new(item)
    if group is None:
        schedule.took(item, [1])
        return None
    if curve.tuned:
        gloo_thread.batch()
    elif bench.plan.tune:
        gloo_thread.restore(bench.usual)
    operation = Operation(curve, item.size_bytes, bench.buffers, group, bench.rank)
    wrong = operation.check() if schedule.rounds_of(item) < _CHECKED_ROUNDS else 0
    iterations = _warm_up(bench, schedule, operation, item, group, new)
    loop_s, began_s = gloo_thread.cpu_s(), time.monotonic()
    _wait_for_all(group, bench.device)
    times_ns = time_each(operation.calls, iterations, bench.device)
    loop = _share(loop_s, gloo_thread.cpu_s(), time.monotonic() - began_s)
    slowest_ns = _slowest(times_ns, group, bench.device)
    issues = 1 if min(slowest_ns) > _SLOW_NS else _ISSUES
    issue_ns = time_issue(operation.calls[0], issues)
    wrong += operation.left()
    schedule.took(item, slowest_ns)
    return {
        "curve": item.curve,
        "size_bytes": item.size_bytes,
        "times_ns": times_ns,
        "issue_ns": issue_ns,
        "wrong": wrong,
        "loop_cpu": loop,
    }


def _share(before_s: float | None, after_s: float | None, span_s: float) -> float | None:
    """The time between two readings as a share of `span_s`; None if not known."""
    return None if before_s is None or after_s is None else (after_s - before_s) / span_s


def _warm_up(
    bench: Bench, schedule: Schedule, operation: Operation, item: Item, group: Any, new: bool
) -> int:
    """Warms up until rank 0 finds the times stable; returns the number of iterations to time.

    A size that was measured before needs only one short warm-up.
    """
    times_ns: list[int] = []
    at_a_time = bench.plan.warmup if new else 1
    while True:
        times_ns += time_each(operation.calls, at_a_time, bench.device)
        last = times_ns[-bench.plan.warmup :]
        decision = schedule.iterations(item, last)
        if new and bench.spent_s < bench.plan.budget_s and not bench.plan.has_settled(times_ns):
            decision = _KEEP_WARMING_UP
        decision = _agree(bench, decision, group)
        if decision != _KEEP_WARMING_UP:
            return decision


def _agree(bench: Bench, decision: int, group: Any) -> int:
    """What rank 0 decided."""
    shared = torch.tensor([decision], dtype=torch.int64, device=bench.device)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared.item())


def _slowest(times_ns: Sequence[int], group: Any, device: torch.device) -> list[int]:
    """The time of each iteration on its slowest rank."""
    times = torch.tensor(times_ns, dtype=torch.int64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return [int(t) for t in times.tolist()]


def _wait_for_all(group: Any, device: torch.device) -> None:
    """Returns when every rank has called it and the device is idle.

    On a GPU this is an all_reduce of one element, as ProcessGroupNCCL implements its barrier:
    `dist.barrier` would have to guess the device.
    """
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
        torch.cuda.synchronize(device)
    else:
        dist.barrier(group=group)
