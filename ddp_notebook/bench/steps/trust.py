"""How far the times of training steps can be trusted, and why not further."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ddp_notebook.bench.results import Trust
from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint
from ddp_notebook.bench.trust import from_load, worst_first

PERFECT = 1.05
"""A higher efficiency is impossible: then the step of the single rank was disturbed."""
_SPREAD_FAIR, _SPREAD_NOISY = 0.15, 0.3
"""Half of the range of the middle half of the steps, as a share of their median."""
_LEAST_STEPS = 8
NOISE = {Trust.GOOD: 0.05, Trust.FAIR: _SPREAD_FAIR, Trust.NOISY: _SPREAD_NOISY}
"""Two rates that are not further apart than this share cannot be told apart."""


def judge(result: StepBenchResult) -> tuple[Trust, tuple[str, ...]]:
    """The badge, and every reason why it is not better, worst first."""
    return worst_first(
        [
            *from_load(result.world_size, result.cores, result.others_cpu),
            *_from_efficiency(result.points, result.world_size),
            *_from_steps(result.points),
        ]
    )


def _from_efficiency(points: Iterable[StepPoint], ranks: int) -> Iterable[tuple[Trust, str]]:
    yield from _at_batches(
        [p for p in points if ranks > 1 and p.efficiency > PERFECT],
        Trust.NOISY,
        "a step of one rank alone took longer than one of all ranks, which cannot be: something "
        "else slowed it down, so there is no efficiency to tell",
    )


def _from_steps(points: Iterable[StepPoint]) -> Iterable[tuple[Trust, str]]:
    timed = [p for p in points if p.times_us]
    few = [p for p in timed if len(p.times_us) < _LEAST_STEPS]
    yield from _at_batches(
        few,
        Trust.FAIR,
        f"fewer than {_LEAST_STEPS} steps were timed before the budget ended. A larger --budget "
        "helps",
    )
    spreads = [_spread(p.times_us) for p in timed if p not in few]
    spread = statistics.median(spreads) if spreads else 0.0
    if spread > _SPREAD_FAIR:
        yield (
            Trust.NOISY if spread > _SPREAD_NOISY else Trust.FAIR,
            f"equal steps take unequally long: half of them are further than ±{spread:.0%} from "
            "their median",
        )


def _at_batches(points: Iterable[StepPoint], trust: Trust, why: str) -> Iterable[tuple[Trust, str]]:
    """A reason that applies to these points; none without points."""
    batches = ", ".join(str(p.batch) for p in points)
    if batches:
        yield trust, f"at batch {batches} {why}"


def _spread(times_us: tuple[float, ...]) -> float:
    low, middle, high = statistics.quantiles(times_us, n=4)
    return (high - low) / 2 / middle if middle > 0 else 0.0
