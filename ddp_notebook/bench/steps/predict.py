"""Training steps at another number of ranks, by a model checked against measurements.

A step is the computation, measured under no_sync, and the exposed communication. Each bucket is
ready at its point of the backward, and its all_reduce takes the time that a latency-bandwidth fit
gives for its size; buckets are reduced one after the other (Li et al., PVLDB 13 (12), 2020, section
3.2.3). The time they need after the last gradient is exposed. If ranks compute on all cores,
communication takes CPU time from the computation, and none of it is hidden.

Separate all_reduces do not tell everything: during a backward a bucket takes longer, because the
backend's threads must first get a core from the computation (two ranks on two cores: 1 to 2 ms a
bucket, whatever its size). This latency is the only number fitted to the steps: with it the model's
errors are as often positive as negative. Each point is checked with the latency fitted to the other
points, so that the stated error is that of a prediction.

For another number of ranks, latency grows like the steps of a ring all_reduce, 2(n-1), and the time
of sending like the bytes that each rank sends, 2(n-1)/n. Ranks that share cores compute more slowly
when they outnumber the cores. How they take turns depends on the scheduler, which is not measured
here: the stated error grows with their number. (From 2 to 4 ranks on 2 cores half of the points
were off by 5 to 18 % and none by more than 33 %.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ddp_notebook.bench.steps.results import PredictedStep, Prediction, StepBenchResult, StepPoint

_MOST_ERROR = 0.2
"""A model with a larger median error is not used for predictions."""
_HALVINGS = 40

ReduceTime = Callable[[float], float]
"""Seconds that reducing so many bytes takes, at the number of ranks that was measured."""


@dataclass(frozen=True, slots=True)
class Ground:
    """The inputs of a prediction. `latency_us` is the part of `reduce_s` without any bytes."""

    reduce_s: ReduceTime
    latency_us: float
    world_size: int
    cores: int
    threads: int
    busy_cores: float
    """Of each rank, while it communicates."""
    shares_cores: bool
    """The ranks compute on the cores that communication needs: CPUs, one host."""
    beside_us: float = 0.0
    """Additional latency of each bucket during computation."""

    def reduce_us(self, size_bytes: int, world_size: int) -> float:
        """Reducing a bucket on `world_size` ranks."""
        whole_us = self.reduce_s(size_bytes) * 1e6
        latency_us = min(self.latency_us, whole_us) + self.beside_us
        whole_us += self.beside_us
        ours, theirs = self.world_size, world_size
        if ours < 2 or theirs < 2:
            return 0.0 if theirs < 2 else whole_us
        sending = ((theirs - 1) / theirs) / ((ours - 1) / ours)
        return (
            latency_us * (theirs - 1) / (ours - 1) + (whole_us - latency_us) * sending
        ) * self.crowding(theirs, self.busy_cores)

    def crowding(self, world_size: int, busy_cores: float) -> float:
        """How much slower `world_size` ranks are than the measured ones because they share cores.

        `busy_cores` is the number of cores that each of them would keep busy.
        """
        if not self.shares_cores:
            return 1.0
        now, then = (
            max(1.0, ranks * busy_cores / self.cores) for ranks in (self.world_size, world_size)
        )
        return then / now

    def spare(self, world_size: int) -> float:
        """The part of communication for which there is a core free, 0 to 1."""
        if not self.shares_cores:
            return 1.0
        free = self.cores - world_size * self.threads
        return min(1.0, max(0.0, free / (world_size * self.busy_cores)))


def predict(result: StepBenchResult, ground: Ground, world_size: int) -> Prediction:
    """Each point at the measured number of ranks, to check the model, and at `world_size`."""
    points = [point for point in result.points if point.arrivals]
    if not points:
        return Prediction(world_size, refused="nothing was seen of the buckets")
    here = result.world_size
    checked = []
    for point in points:
        others = [other for other in points if other is not point]
        step = step_us(point, calibrated(ground, others, here), here)
        checked.append(PredictedStep(point.batch, point.bucket, step, point.step_us))
    prediction = Prediction(world_size, checked=tuple(checked))
    typical, worst = statistics.median(prediction.errors), max(prediction.errors)
    if typical > _MOST_ERROR:
        return replace(prediction, refused=_far_off(points, typical, worst))
    if len(points) > 1:  # one point cannot both set the latency and check it
        ground = calibrated(ground, points, here)
    within = _within(worst, ground, here, world_size)
    return replace(
        prediction,
        steps=tuple(
            PredictedStep(p.batch, p.bucket, step_us(p, ground, world_size)) for p in points
        ),
        within=within,
        assumes=tuple(_assumptions(ground, world_size, within)),
    )


def _within(worst: float, ground: Ground, here: int, world_size: int) -> float:
    """The error to expect of steps at `world_size`; at another number of ranks at least
    `_MOST_ERROR`, since a few points may fit well by chance."""
    if world_size == here:
        return worst
    return max(worst, _MOST_ERROR) * max(1.0, ground.crowding(world_size, ground.threads))


def _far_off(points: Sequence[StepPoint], typical: float, worst: float) -> str:
    """Why a model with such errors is not used; the measurements themselves may be imprecise."""
    halves = [(p.exposed_interval_us[1] - p.exposed_interval_us[0]) / 2 / p.step_us for p in points]
    vague = statistics.median(halves)
    budget = (
        f", and what communication adds to these is known to ±{vague:.0%} of the step only: a "
        "larger --budget may help"
    )
    return (
        f"the model is off by {typical:.0%} at half of the points that were measured and by "
        f"{worst:.0%} at the worst{budget if vague > _MOST_ERROR / 2 else ''}. Off by more than "
        f"{_MOST_ERROR:.0%} it says nothing about other numbers of ranks"
    )


def calibrated(ground: Ground, points: Sequence[StepPoint], world_size: int) -> Ground:
    """`ground` with the latency during computation fitted to `points`: half of them lie above."""

    def off(beside_us: float) -> float:
        tried = replace(ground, beside_us=beside_us)
        return statistics.median(step_us(p, tried, world_size) / p.step_us - 1 for p in points)

    if not points or off(0.0) >= 0:
        return ground
    low, high = 0.0, max(point.step_us for point in points)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if off(middle) < 0 else (low, middle)
    return replace(ground, beside_us=high)


def step_us(point: StepPoint, ground: Ground, world_size: int) -> float:
    """A step of `point` on `world_size` ranks, in microseconds."""
    slower = ground.crowding(world_size, ground.threads)
    sizes = [arrival.size_bytes for arrival in point.arrivals]
    takes = [ground.reduce_us(size, world_size) for size in sizes]
    tail = exposed_us(_ready(point, slower), takes, point.backward_us * slower)
    spare = ground.spare(world_size)
    return point.local_us * slower + spare * tail + (1 - spare) * sum(takes)


def _ready(point: StepPoint, slower: float) -> list[float]:
    """When each bucket is ready in an undisturbed backward."""
    if not point.ready_us:
        return [point.backward_us * slower] * len(point.arrivals)
    # The hooks saw a backward that communication slowed down: only the proportions hold.
    last = max(point.ready_us) or 1.0
    return [point.backward_us * slower * ready / last for ready in point.ready_us]


def exposed_us(ready: Sequence[float], takes: Sequence[float], backward_us: float) -> float:
    """How long after the backward the last bucket is done, if they are reduced one by one."""
    end = 0.0
    for at, duration in zip(ready, takes, strict=True):
        end = max(end, at) + duration
    return max(0.0, end - backward_us)


def _assumptions(ground: Ground, world_size: int, within: float) -> Iterator[str]:
    yield (
        "This is a model, not a measurement: computation as under no_sync, each bucket by the "
        "latency-bandwidth fit, one bucket after the other."
    )
    if ground.beside_us:
        yield (
            f"Beside computation each bucket takes {ground.beside_us / 1e3:.1f} ms more than by "
            "itself: that is taken from the measured steps, and each is checked by the others."
        )
    if ground.shares_cores and ground.spare(world_size) < 1:
        yield (
            f"On {ground.cores} cores communication takes "
            f"{'all' if not ground.spare(world_size) else 'part'} of its time from the "
            "computation: so much of it is not hidden."
        )
    if world_size != ground.world_size:
        yield (
            f"From {ground.world_size} to {world_size} ranks: a ring's latency and bytes, "
            + (
                f"all ranks on these {ground.cores} cores."
                if ground.shares_cores
                else "every rank with a device and links of its own as here."
            )
            + " Nothing was measured at that number of ranks."
        )
    more = ground.crowding(world_size, ground.threads)
    if more > 1:
        yield (
            f"{world_size} ranks on {ground.cores} cores: how they take turns on a core cannot be "
            f"known from {ground.world_size}, so the error is taken to be {more:.3g} times as "
            f"large there, {within:.0%}. To know: %ddp_init --world-size {world_size}, and measure."
        )
