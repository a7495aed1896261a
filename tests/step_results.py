"""Benchmarks of training steps made by hand, shared by the tests of their statistics and views."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from ddp_notebook.bench.steps import stats
from ddp_notebook.bench.steps.plan import Block, StepPlan, reduce_sizes, reduces_at_once
from ddp_notebook.bench.steps.results import StepBenchResult

MS = 1_000_000
FORWARD, BACKWARD, OPTIMIZER, EXPOSED = 2 * MS, 5 * MS, 1 * MS, 4 * MS
GRADIENTS = 8 * 2**20
SIZES = [5 * 2**20, 3 * 2**20]
STEPS = 10
US_PER_BYTE = 1e-3
LATENCY_US = 300.0

ABOUT = StepBenchResult(
    model="net",
    parameters=GRADIENTS // 4,
    gradient_bytes=GRADIENTS,
    inputs="random inputs, mean square of the output",
    backend="gloo",
    device="cpu",
    world_size=2,
    cores=8,
    threads=1,
)
summarise = functools.partial(stats.summarise, rounds=3)


def ranks(
    plan: StepPlan,
    world_size: int = 2,
    *,
    late: int | None = None,
    late_ns: int = 2 * MS,
    seed: int = 0,
) -> list[list[dict[str, Any]]]:
    """What each rank would tell of `plan`; rank `late` comes `late_ns` later to each bucket."""
    sizes = reduce_sizes(GRADIENTS) if world_size > 1 else ()
    blocks = plan.schedule(plan.batches, sizes, world_size)
    draws = [random.Random(seed + rank) for rank in range(world_size)]
    return [
        [_block(block, rank, late_ns * (rank == late), draws[rank]) for block in blocks]
        for rank in range(world_size)
    ]


def _block(block: Block, rank: int, late_ns: int, draw: random.Random) -> dict[str, Any]:
    told: dict[str, Any] = {"block": block.number, "kind": block.kind, "round": block.round}
    if block.kind == "reduce":
        at_once = reduces_at_once(block.size_bytes, GRADIENTS)
        each_ns = (LATENCY_US + block.size_bytes * US_PER_BYTE) * 1e3
        times = [int(each_ns * at_once)] * STEPS
        return {
            **told,
            "size_bytes": block.size_bytes,
            "at_once": at_once,
            "reduce": times,
            "busy": 0.5,
        }
    told["batch"] = block.batch
    local = [_parts(block.batch, 0, draw) for _ in range(STEPS)]
    if block.kind == "alone":
        return {**told, "alone": [] if rank else local}
    told["bucket"] = block.bucket
    if block.kind == "plain":
        sync = [_parts(block.batch, EXPOSED, draw) for _ in range(STEPS)]
        return {**told, "sync": sync, "local": local}
    return {**told, **_stamped(block.batch, late_ns, draw)}


def _parts(batch: int, exposed_ns: int, draw: random.Random) -> list[int]:
    """A step: forward and backward grow with the batch, and vary by a hundredth."""
    grown = batch / 8
    parts = [FORWARD * grown, BACKWARD * grown + exposed_ns, OPTIMIZER]
    return [int(each * draw.uniform(0.99, 1.01)) for each in parts]


def _stamped(batch: int, late_ns: int, draw: random.Random) -> dict[str, Any]:
    times, began, buckets = [], [], []
    for step in range(STEPS):
        start = step * 1000 * MS
        ready = [start + int(BACKWARD * part * draw.uniform(0.99, 1.01)) for part in (0.5, 1.0)]
        ready = [each + late_ns * (number + 1) for number, each in enumerate(ready)]
        times.append(_parts(batch, EXPOSED, draw))
        began.append(start)
        buckets.append([[at, at + 10_000, at + 3 * MS, 0] for at in ready])
    return {
        "hooked": times,
        "backward_began": began,
        "forward_waited": [0] * STEPS,
        "buckets": buckets,
        "sizes": SIZES,
        "logged": [[6 * MS, 3 * MS]] * (STEPS - 1),
        "on_host": True,
    }


def plan(batches: Sequence[int] = (8, 32), buckets: Sequence[str] = ("default",)) -> StepPlan:
    """A plan of three rounds."""
    return StepPlan(model="net", batches=tuple(batches), buckets=tuple(buckets))
