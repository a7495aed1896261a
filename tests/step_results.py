"""Benchmarks of training steps made by hand, shared by the tests of their statistics and views."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from ddp_notebook.bench import steps
from ddp_notebook.bench.steps import Block, StepBenchResult, StepPlan

MS = 1_000_000
FORWARD, BACKWARD, OPTIMIZER, EXPOSED = 2 * MS, 5 * MS, 1 * MS, 4 * MS
GRADIENTS = 8 * 2**20
STEPS = 10
OVERLAPPED = 2 * MS

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
summarise = functools.partial(steps.summarise, rounds=3)


def ranks(plan: StepPlan, world_size: int = 2, *, seed: int = 0) -> list[list[dict[str, Any]]]:
    """What each rank would tell of `plan`; each waits longer for the others than the one before."""
    blocks = plan.schedule(world_size)
    draws = [random.Random(seed + rank) for rank in range(world_size)]
    return [[_block(block, rank, draws[rank]) for block in blocks] for rank in range(world_size)]


def _block(block: Block, rank: int, draw: random.Random) -> dict[str, Any]:
    told: dict[str, Any] = {"block": block.number, "kind": block.kind, "round": block.round}
    told |= {"batch": block.batch, "bucket": block.bucket}
    local = [_parts(block.batch, 0, draw) for _ in range(STEPS)]
    if block.kind == "alone":
        return {**told, "alone": [] if rank else local}
    if block.kind == "plain":
        sync = [_parts(block.batch, EXPOSED, draw) for _ in range(STEPS)]
        return {**told, "sync": sync, "local": local}
    return {**told, "overlapped": [OVERLAPPED + rank * MS] * STEPS}


def _parts(batch: int, exposed_ns: int, draw: random.Random) -> list[int]:
    """A step: forward and backward grow with the batch, and vary by a hundredth."""
    grown = batch / 8
    parts = [FORWARD * grown, BACKWARD * grown + exposed_ns, OPTIMIZER]
    return [int(each * draw.uniform(0.99, 1.01)) for each in parts]


def plan(batches: Sequence[int] = (8, 32), buckets: Sequence[str] = ("default",)) -> StepPlan:
    """A plan of three rounds."""
    return StepPlan(model="net", batches=tuple(batches), buckets=tuple(buckets))
