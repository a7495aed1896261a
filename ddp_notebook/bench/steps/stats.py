"""From every rank's blocks to where the time of a training step goes.

A block is a JSON object made by `steps_loop`; blocks with the same number belong together. A block
that one rank lacks, because it was stopped or died, is left out for all ranks.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ddp_notebook.bench.steps.arrivals import Block, Hooked, beside
from ddp_notebook.bench.steps.results import ReducePoint, StepBenchResult, StepPoint, name_bucket

_RESAMPLES = 400


def summarise(
    about: StepBenchResult, per_rank: Sequence[Sequence[Block]], *, rounds: int
) -> StepBenchResult:
    """`about` with the points of the blocks that every rank has; there may be none.

    `rounds` are those of the plan: the budget may end before.
    """
    blocks = list(_together(per_rank))
    points = tuple(_points(blocks, len(per_rank)))
    result = replace(
        about,
        world_size=len(per_rank),
        points=points,
        reduces=tuple(_reduces(blocks, about.gradient_bytes)),
        notes=(
            *about.notes,
            *_budget_notes(blocks, about, rounds),
            *_notes(points, about, len(per_rank)),
        ),
    )
    return replace(result, break_even=break_even(result.main_points))


def so_far(about: StepBenchResult, per_rank: Sequence[Sequence[Block]]) -> StepBenchResult:
    """`about` with the points of a run in progress: only the parts of each step.

    Intervals take a tenth of a second to compute, which would disturb the ranks.
    """
    blocks = list(_together(per_rank))
    points = (_point(key, plain, len(per_rank), resamples=0) for key, plain in _in_order(blocks))
    return replace(about, world_size=len(per_rank), points=tuple(points))


def _together(per_rank: Sequence[Sequence[Block]]) -> Iterator[list[Block]]:
    """Each block that all ranks have: what each of them measured in it, by rank."""
    by_number = [{block["block"]: block for block in blocks} for blocks in per_rank]
    numbers = set.intersection(*map(set, by_number)) if by_number else set()
    for number in sorted(numbers):
        yield [blocks[number] for blocks in by_number]


def _points(blocks: Sequence[list[Block]], ranks: int) -> Iterator[StepPoint]:
    hooked = _by(blocks, "hooked", "bucket", "batch")
    alone = _by(blocks, "alone", "batch")
    for key, plain in _in_order(blocks):
        ours = [sum(parts) for block in alone.get(key[1:], ()) for parts in block[0]["alone"]]
        yield _point(key, plain, ranks, hooked.get(key, []), ours)


def _in_order(blocks: Sequence[list[Block]]) -> Iterator[tuple[tuple[Any, ...], list[list[Block]]]]:
    """The steps that were timed, by bucket size and then batch."""
    plain = _by(blocks, "plain", "bucket", "batch")
    for key in sorted(plain, key=lambda key: (_order(key[0]), key[1])):
        yield key, plain[key]


def _order(bucket: str) -> float:
    """The sort key of a bucket size: by size, the default last."""
    try:
        return float(bucket)
    except ValueError:
        return math.inf


def _by(
    blocks: Sequence[list[Block]], kind: str, *names: str
) -> dict[tuple[Any, ...], list[list[Block]]]:
    sorted_blocks: dict[tuple[Any, ...], list[list[Block]]] = {}
    for block in blocks:
        if block[0]["kind"] == kind:
            sorted_blocks.setdefault(tuple(block[0][name] for name in names), []).append(block)
    return sorted_blocks


def _point(
    key: tuple[Any, ...],
    plain: Sequence[list[Block]],
    ranks: int,
    hooked: Sequence[list[Block]] = (),
    alone_ns: Sequence[int] = (),
    resamples: int = _RESAMPLES,
) -> StepPoint:
    sync = [parts for block in plain for parts in slowest(block, "sync")]
    local = [parts for block in plain for parts in slowest(block, "local")]
    sync_ns, local_ns = [sum(parts) for parts in sync], [sum(parts) for parts in local]
    step, still = statistics.median(sync_ns), statistics.median(local_ns)
    looked = Hooked.of(hooked) if hooked else None
    forward, backward, optimizer = middle_parts(local)
    return StepPoint(
        batch=key[1],
        bucket=key[0],
        steps=len(sync_ns),
        step_us=step / 1e3,
        local_us=still / 1e3,
        forward_us=forward / 1e3,
        backward_us=backward / 1e3,
        optimizer_us=optimizer / 1e3,
        exposed_us=(step - still) / 1e3,
        exposed_interval_us=_interval_us(sync_ns, local_ns, resamples),
        alone_us=(statistics.median(alone_ns) if alone_ns else still) / 1e3,
        world_size=ranks,
        times_us=tuple(time / 1e3 for time in sync_ns),
        **(looked.fields(step) if looked is not None else {}),
    )


def slowest(block: Sequence[Block], kind: str) -> list[Sequence[int]]:
    """The parts of each step on its slowest rank."""
    return [max(step, key=sum) for step in beside(block, kind)]


def middle_parts(steps: Sequence[Sequence[int]]) -> list[float]:
    """The parts of a typical step: their means over the middle fifth of the steps.

    Medians of the parts do not add up to the median of the whole; the sum of these means is close.
    """
    ordered = sorted(steps, key=sum)
    outside = 2 * len(ordered) // 5
    middle = ordered[outside : len(ordered) - outside]
    return [statistics.fmean(parts) for parts in zip(*middle, strict=True)]


def _interval_us(one: Sequence[int], other: Sequence[int], resamples: int) -> tuple[float, float]:
    """95 % interval of the difference of the medians, by bootstrap; infinite without resamples."""
    if not resamples:
        return -math.inf, math.inf
    draw = random.Random(len(one))  # noqa: S311  # resampling, no secret
    differences = sorted(
        statistics.median(draw.choices(one, k=len(one)))
        - statistics.median(draw.choices(other, k=len(other)))
        for _ in range(resamples)
    )
    return differences[int(0.025 * resamples)] / 1e3, differences[int(0.975 * resamples) - 1] / 1e3


# -- beside the steps ------------------------------------------------------------------


def _reduces(blocks: Sequence[list[Block]], gradient_bytes: int) -> Iterator[ReducePoint]:
    by_size = _by(blocks, "reduce", "size_bytes")
    for (size,), each in sorted(by_size.items()):
        at_once = int(each[0][0]["at_once"])
        slow = [max(times) for block in each for times in beside(block, "reduce")]
        each_us = statistics.median(slow) / at_once / 1e3
        yield ReducePoint(
            size_bytes=size,
            each_us=each_us,
            total_us=each_us * gradient_bytes / size,
            busy_cores=statistics.median(b["busy"] for block in each for b in block),
            scaled=round(gradient_bytes / size) > at_once,
        )


def break_even(points: Sequence[StepPoint]) -> float | None:
    """The batch size from which all ranks together are faster than one rank; None if at none.

    0 if they are at every batch size. Between two batch sizes it is interpolated linearly over the
    logarithm of the batch size.
    """
    gains = [(p.batch, p.efficiency * p.world_size - 1) for p in points]
    if not gains or points[0].world_size < 2 or gains[-1][1] < 0:
        return None
    for (low, below), (high, above) in reversed(list(pairwise(gains))):
        if below < 0:
            part = below / (below - above)
            return float(low * (high / low) ** part)
    return 0.0 if gains[0][1] >= 0 else None


def _budget_notes(
    blocks: Sequence[list[Block]], about: StepBenchResult, planned: int
) -> Iterator[str]:
    rounds = len({block[0]["round"] for block in blocks})
    if rounds < planned and not about.problem:
        yield (
            f"The budget was enough for {rounds} of {planned} rounds: a disturbance of a "
            "moment may have fallen on one point alone. A larger --budget gives the others."
        )


def _notes(points: Sequence[StepPoint], about: StepBenchResult, ranks: int) -> Iterator[str]:
    """What the reader should know about the numbers."""
    if ranks == 1:
        yield "One rank sends nothing: there is no communication to tell apart."
    elif about.device == "cpu" and about.cores < ranks * about.threads:
        yield (
            f"{ranks} ranks of {about.threads} threads share {about.cores} cores: they wait for "
            "each other's turn on a core, and one rank alone, which has them all, is far ahead. "
            "Efficiency here says how crowded the machine is, not how DDP scales."
        )
    elif about.device == "cpu" and ranks > 1 and about.cores < ranks * (about.threads + 1):
        yield (
            f"{ranks} ranks compute on all {about.cores} cores, so none is free to communicate "
            "beside it: what overlaps slows the backward down, and little is hidden."
        )
    if about.device == "cuda" and ranks > 1:
        yield (
            "On a GPU a rank comes to an all_reduce when its host has issued it, which is before "
            "the GPU has the gradients: arrivals tell of the hosts."
        )
    for name, seen in (("a hook", "hook_exposed_us"), ("DDP's logger", "logger_exposed_us")):
        yield from _difference(points, name, seen)
    unsure = [p for p in points if ranks > 1 and p.exposed_interval_us[0] <= 0]
    if unsure:
        yield (
            f"At batch {_listed(p.batch for p in unsure)} the exposed communication cannot be told "
            "from noise: its interval includes 0. A larger --budget gives more steps."
        )


def _difference(points: Sequence[StepPoint], name: str, seen: str) -> Iterator[str]:
    """The median error, over points, of one way of measuring exposed communication."""
    known = [p for p in points if getattr(p, seen) is not None and p.exposed_interval_us[0] > 0]
    if not known:
        return
    point = known[len(known) // 2]
    value, (low, high) = getattr(point, seen), point.exposed_interval_us
    at = f"at batch {point.batch} with {name_bucket(point.bucket)}"
    text = f"Exposed communication {at}: {point.exposed_us / 1e3:.1f} ms by no_sync, "
    text += f"{value / 1e3:.1f} ms by {name}"
    if low <= value <= high:
        yield f"{text}, which agree within the noise."
    elif value < low:
        yield (
            f"{text}, {(point.exposed_us - value) / 1e3:.1f} ms too little: it sees when buckets "
            "come and go, and not that communication slows the computation beside it."
        )
    else:
        yield (
            f"{text}, {(value - point.exposed_us) / 1e3:.1f} ms too much: it takes for "
            "communication what is waiting, for other ranks or for a core."
        )


def _listed(batches: Iterable[int]) -> str:
    return ", ".join(str(batch) for batch in sorted(set(batches)))
