"""From every rank's times to what is shown: pure, standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_notebook.model import BenchPoint, BenchResult, format_bytes

NOISY = 2.0
"""A size is noisy when its mean is more than this times its median."""
FEW_ITERATIONS = 10
"""With fewer iterations than this p10 and p90 are little more than the extremes."""
MANY_SIZES = 4
"""More sizes than this are not named one by one."""


def summarise(
    per_rank: Sequence[Mapping[str, Any]], device: str, *, cores: int | None = None
) -> BenchResult:
    """What all ranks measured together, from what `loop.measure` returned on each.

    An iteration took as long as on its slowest rank. `cores` is the number of CPU cores the
    ranks share; None when that is not known. Raises ValueError when the ranks are not all
    there or did not measure the same, because then their iterations cannot be compared.
    """
    ranks = _aligned(per_rank)
    world_size = len(ranks)
    points = tuple(
        _point(
            int(size),
            [max(times) for times in zip(*(r["times_ns"][size] for r in ranks), strict=True)],
            world_size,
            wrong=sum(r["wrong"][size] for r in ranks),
        )
        for size in sorted(ranks[0]["times_ns"], key=int)
    )
    return BenchResult(
        op="all_reduce",
        backend=str(ranks[0]["backend"]),
        device=device,
        dtype="float32",
        world_size=world_size,
        points=points,
        notes=tuple(_notes(points, world_size, cores)),
    )


def bus_factor(world_size: int) -> float:
    """What all_reduce's algorithm bandwidth is multiplied by to get its bus bandwidth.

    2(n-1)/n: what each of n ranks must at least send, in units of the tensor. From
    nccl-tests, doc/PERFORMANCE.md ("Bandwidth"). 0 for one rank, where nothing is sent.
    """
    return 2 * (world_size - 1) / world_size


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the sorted values lie below, linearly interpolated."""
    position = share * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def _aligned(per_rank: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ranks in order, once it is certain that they measured the same."""
    ranks = sorted(per_rank, key=lambda r: int(r["rank"]))
    expected = list(range(int(ranks[0]["world_size"]))) if ranks else [0]
    if [int(r["rank"]) for r in ranks] != expected:
        raise ValueError(
            f"A benchmark needs the times of each of {len(expected)} ranks once; "
            f"there are those of {[r['rank'] for r in ranks]}."
        )
    first = _shape(ranks[0])
    for each in ranks[1:]:
        if _shape(each) != first:
            raise ValueError(
                f"Rank {each['rank']} did not measure what rank 0 measured; iterations by size: "
                f"{_shape(each)} and {first}."
            )
    if not all(first.values()):
        raise ValueError(f"A size without a single iteration says nothing: {first}.")
    return ranks


def _shape(rank: Mapping[str, Any]) -> dict[str, int]:
    """Iterations by size."""
    return {size: len(times) for size, times in rank["times_ns"].items()}


def _point(size: int, times_ns: list[int], world_size: int, *, wrong: int) -> BenchPoint:
    """One size; `times_ns` are of the slowest rank in each iteration."""
    ordered = sorted(times_ns)
    median_ns = statistics.median(ordered)
    # Bytes per nanosecond are GB per second. A clock too coarse to see it measures no bandwidth.
    algbw = size / median_ns if median_ns else 0.0
    return BenchPoint(
        size_bytes=size,
        iterations=len(ordered),
        latency_us=median_ns / 1e3,
        mean_us=statistics.fmean(ordered) / 1e3,
        p10_us=quantile(ordered, 0.1) / 1e3,
        p90_us=quantile(ordered, 0.9) / 1e3,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(world_size),
        wrong=wrong,
    )


def _notes(points: Sequence[BenchPoint], world_size: int, cores: int | None) -> Iterable[str]:
    """What the reader must know before believing the numbers; worst first."""
    wrong = [p for p in points if p.wrong]
    if wrong:
        yield (
            f"all_reduce gave wrong results at {_sizes(wrong)}: its times there mean nothing "
            "until the results are right."
        )
    if world_size == 1:
        yield "One rank sends nothing: these are the times of the call alone."
    elif cores is not None and cores < 2 * world_size:
        yield (
            f"{world_size} ranks on {cores} {'core' if cores == 1 else 'cores'}: with fewer than "
            "2 cores per rank the ranks wait for each other's turn on a core, and times of small "
            "sizes say more about the machine's scheduler than about communication."
        )
    noisy = [p for p in points if p.mean_us > NOISY * p.latency_us]
    if noisy:
        yield (
            f"Noisy at {_sizes(noisy)}: the mean is more than {NOISY:g} times the median, because "
            "a few iterations took far longer than the rest. Compare medians, not means."
        )
    few = [p for p in points if p.iterations < FEW_ITERATIONS]
    if few:
        yield (
            f"Fewer than {FEW_ITERATIONS} iterations at {_sizes(few)}: p10 and p90 are rough "
            "there. A larger time budget gives more."
        )


def _sizes(points: Sequence[BenchPoint]) -> str:
    """``4 B``, ``4 B, 16 B and 1 KiB``, ``7 sizes from 4 B to 1 MiB``."""
    *most, last = (format_bytes(p.size_bytes) for p in points)
    if len(most) >= MANY_SIZES:
        return f"{len(points)} sizes from {most[0]} to {last}"
    return f"{', '.join(most)} and {last}" if most else last
