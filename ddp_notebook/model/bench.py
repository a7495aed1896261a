"""What a benchmark measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One tensor size. Times are of the slowest rank in each iteration, in microseconds.

    `latency_us` is the median over iterations. `algbw_gb_per_s` is size over that time,
    `busbw_gb_per_s` the same times 2(n-1)/n: nccl-tests' definitions, GB = 1e9 bytes.
    `wrong` counts results that were not what all_reduce must give.
    """

    size_bytes: int
    iterations: int
    latency_us: float
    mean_us: float
    p10_us: float
    p90_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What `%ddp_bench` measured, smallest size first."""

    op: str
    backend: str
    device: str
    dtype: str
    world_size: int
    points: tuple[BenchPoint, ...]
    notes: tuple[str, ...] = ()
