"""The rank's side of a benchmark: it times all_reduce and checks what it gives.

Every rank runs the same collectives in the same order. What depends on the clock (how long to
warm up, how often to measure) is decided by rank 0 and broadcast, or the ranks would part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.bench.plan import FLOAT32_BYTES, Plan

_RAMP = 2**18
"""Elements filled and checked at a time: bounds the memory the check needs, to a few MiB."""
_RAMP_PERIOD = 251
_PIECE_PERIOD = 61
"""Primes, so that a piece of the tensor in a wrong place is seen. Small, so that all sums
are whole numbers a float32 holds exactly (below 2**24), whatever the order of adding."""

_KEEP_WARMING_UP = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """One run on one rank. `payload` is as large as the largest size; a size is its front."""

    plan: Plan
    device: torch.device
    rank: int
    world_size: int
    payload: torch.Tensor
    ramp: torch.Tensor
    deadline_ns: int


def measure(
    plan: Mapping[str, Any], device: str, report: Callable[[int, int, dict[str, Any]], None]
) -> dict[str, Any]:
    """Times all_reduce (float32, SUM, default group) on this rank; all ranks must call it.

    `plan` is `Plan.to_json()`, `device` where the tensors live (``cpu``, ``cuda:0``).
    `report(done, total, {})` is called after each measurement of one size.

    Returns a JSON object. ``times_ns`` maps each size, written as text, to the time of every
    iteration; iteration i is the same collective on all ranks. ``wrong`` maps it to the
    number of failed checks: there are two in each round, one of a sum of known values and one
    that the zeros summed in all timed iterations are still zero.
    """
    bench = _prepare(Plan.from_json(plan), torch.device(device))
    schedule = bench.plan.schedule()
    times_ns: dict[str, list[int]] = {str(size): [] for size in bench.plan.sizes()}
    wrong = dict.fromkeys(times_ns, 0)
    for done, size in enumerate(schedule):
        payload = bench.payload[: size // FLOAT32_BYTES]
        wrong[str(size)] += not _sums_exactly(bench, payload)
        payload.zero_()
        iterations = _warm_up(bench, payload, measurements=len(schedule) - done)
        _wait_for_all(bench.device)
        times_ns[str(size)] += _time(payload, iterations)
        wrong[str(size)] += bool(payload.any())
        report(done + 1, len(schedule), {})
    return {
        "times_ns": times_ns,
        "wrong": wrong,
        "rank": bench.rank,
        "world_size": bench.world_size,
        "backend": dist.get_backend(),
    }


def _prepare(plan: Plan, device: torch.device) -> _Bench:
    """Everything that is allocated once. The budget runs from here."""
    count = plan.sizes()[-1] // FLOAT32_BYTES
    whole = torch.arange(min(count, _RAMP), dtype=torch.int32, device=device)
    return _Bench(
        plan=plan,
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        payload=torch.zeros(count, dtype=torch.float32, device=device),
        ramp=whole.remainder(_RAMP_PERIOD).to(torch.float32),
        deadline_ns=time.perf_counter_ns() + int(plan.budget_s * 1e9),
    )


def _sums_exactly(bench: _Bench, payload: torch.Tensor) -> bool:
    """True when one all_reduce of known values gives exactly their sum on this rank.

    Element i of rank r is ``i % 251 + p + r``, p telling which piece of the tensor it is in.
    """
    for piece, number in _pieces(payload):
        piece.copy_(bench.ramp[: piece.numel()]).add_(number + bench.rank)
    dist.all_reduce(payload)
    ranks = bench.world_size
    sum_of_ranks = ranks * (ranks - 1) // 2
    return all(
        torch.equal(piece, bench.ramp[: piece.numel()] * ranks + (number * ranks + sum_of_ranks))
        for piece, number in _pieces(payload)
    )


def _pieces(payload: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensor in pieces of `_RAMP` elements, each with the number that tells it apart."""
    for start in range(0, payload.numel(), _RAMP):
        yield payload[start : start + _RAMP], start // _RAMP % _PIECE_PERIOD


def _warm_up(bench: _Bench, payload: torch.Tensor, measurements: int) -> int:
    """Warms up until rank 0 finds the time settled; the number of iterations to time then."""
    times_ns: list[int] = []
    decision = torch.zeros(1, dtype=torch.int64, device=bench.device)
    while True:
        _wait_for_all(bench.device)
        times_ns += _time(payload, bench.plan.warmup)
        if bench.rank == 0:
            decision.fill_(_decide(bench, times_ns, measurements))
        dist.broadcast(decision, src=0)
        iterations = int(decision.item())
        if iterations != _KEEP_WARMING_UP:
            return iterations


def _decide(bench: _Bench, times_ns: list[int], measurements: int) -> int:
    """Rank 0's decision: the number of iterations to time, or `_KEEP_WARMING_UP`.

    Once the budget is spent nothing waits for the time to settle.
    """
    plan = bench.plan
    left_ns = max(bench.deadline_ns - time.perf_counter_ns(), 0)
    if left_ns and not plan.has_settled(times_ns):
        return _KEEP_WARMING_UP
    last = times_ns[-plan.warmup :]
    return plan.iterations(sum(last) / len(last), left_ns, measurements)


def _wait_for_all(device: torch.device) -> None:
    """Returns when every rank has called it, and the device has nothing left to do.

    On a GPU this is an all_reduce of one element, which is how ProcessGroupNCCL makes its
    barrier: `dist.barrier` would have to guess the device.
    """
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        torch.cuda.synchronize(device)
    else:
        dist.barrier()


def _time(payload: torch.Tensor, iterations: int) -> list[int]:
    """The time of each of `iterations` all_reduces, back to back, in nanoseconds."""
    if payload.device.type == "cuda":
        return _time_on_gpu(payload, iterations)
    stamps = [time.perf_counter_ns()]
    for _ in range(iterations):
        dist.all_reduce(payload)
        stamps.append(time.perf_counter_ns())
    return [end - start for start, end in pairwise(stamps)]


def _time_on_gpu(payload: torch.Tensor, iterations: int) -> list[int]:
    """As `_time`, by the GPU's clock: the host only queues the work and runs ahead of it."""
    stream = torch.cuda.current_stream(payload.device)
    stamps = [_gpu_event() for _ in range(iterations + 1)]
    stamps[0].record(stream)
    for stamp in stamps[1:]:
        dist.all_reduce(payload)
        stamp.record(stream)
    stamps[-1].synchronize()
    return [round(start.elapsed_time(end) * 1e6) for start, end in pairwise(stamps)]


def _gpu_event() -> torch.cuda.Event:
    """A point in a stream whose time the GPU notes."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
