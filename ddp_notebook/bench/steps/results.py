"""What `%ddp_bench --model` measured: where the time of a training step goes."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BUCKET = "default"
"""The bucket size of which DDP is told nothing: first a bucket of 1 MiB, then of 25."""


def name_bucket(bucket: str) -> str:
    """A bucket size in a sentence: ``default buckets``, ``5 MiB buckets``."""
    return f"{bucket} buckets" if bucket == DEFAULT_BUCKET else f"{bucket} MiB buckets"


@dataclass(frozen=True, slots=True)
class BucketArrival:
    """One bucket of gradients: how late each rank came to its all_reduce.

    `late_us` has an entry for each rank: the median time after the first rank to come.
    """

    size_bytes: int
    late_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for: it takes longer to the all_reduces, time after time.

    `late_us` is the median of how much longer it takes to the last bucket of a step than the
    others, taken at their median and without waiting for a core; `low_us` the lower end of
    its 99.9 % interval. `where` is the part of the step it is lost in: ``forward`` or
    ``backward``. `share` of the steps it takes longer in.
    """

    rank: int
    late_us: float
    low_us: float
    where: str
    share: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A DDP step at one batch size and one bucket size. Times are medians over steps, in us.

    A step takes as long as on its slowest rank. `local_us` is the same step under no_sync, and
    `forward_us`, `backward_us` and `optimizer_us` are its parts. `exposed_us` is the step minus
    the local step: what communication adds to it, with its 95 % interval; this is the truth
    that the others are held against. `overlapped_us` is communication that ran beside the
    backward, by a hook's stamps. `hook_exposed_us` and `logger_exposed_us` say what such stamps,
    and DDP's own logger, take for exposed; None where they cannot tell. `hook_step_us` is the
    step with the hook in it. `alone_us` is the step of one rank while the others rest.
    """

    batch: int
    """Samples per rank."""
    bucket: str
    """Size of a bucket as it is asked for: MiB, or ``default``."""
    steps: int
    """How many were timed."""
    step_us: float
    local_us: float
    forward_us: float
    backward_us: float
    optimizer_us: float
    exposed_us: float
    exposed_interval_us: tuple[float, float]
    alone_us: float
    world_size: int
    overlapped_us: float | None = None
    hook_exposed_us: float | None = None
    hook_step_us: float | None = None
    logger_exposed_us: float | None = None
    ready_us: tuple[float, ...] = ()
    """For each bucket, when its gradients are ready: after the backward began, with the hook."""
    arrivals: tuple[BucketArrival, ...] = ()
    own_us: tuple[float, ...] = ()
    """For each rank, what it takes itself to its last all_reduce, without waiting for a core."""
    straggler: Straggler | None = None
    skew_us: tuple[float, ...] = ()
    """For each step with the hook: from the first rank at the last bucket to the last one."""
    times_us: tuple[float, ...] = ()
    """For each step, its time on the slowest rank."""

    @property
    def parts_us(self) -> float:
        """Forward, backward, exposed communication and optimizer together."""
        return self.forward_us + self.backward_us + self.exposed_us + self.optimizer_us

    @property
    def samples_per_s(self) -> float:
        """Samples that all ranks together process in a second."""
        return self.world_size * self.batch / self.step_us * 1e6

    @property
    def efficiency(self) -> float:
        """Samples per second of all ranks, divided by as many times those of one rank alone."""
        return self.alone_us / self.step_us

    @property
    def exposed_share(self) -> float:
        """The part of the step that is exposed communication, 0 to 1."""
        return min(1.0, max(0.0, self.exposed_us / self.step_us))


@dataclass(frozen=True, slots=True)
class ReducePoint:
    """Reducing all gradients in all_reduces of `size_bytes` each, as a DDP step does.

    `each_us` is the time of one: copied in, reduced, copied out, several under way at once.
    `total_us` is for all gradients.
    """

    size_bytes: int
    each_us: float
    total_us: float
    busy_cores: float = 1.0
    """CPU cores that a rank keeps busy meanwhile, with all its threads."""
    scaled: bool = False
    """True when only some of them were timed, and `total_us` is worked out from those."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """What the model says of one point. `measured_us` is None where nothing was measured."""

    batch: int
    bucket: str
    step_us: float
    measured_us: float | None = None

    @property
    def error(self) -> float | None:
        """How far off it is, as a share of what was measured; more than 0: too long."""
        return None if self.measured_us is None else self.step_us / self.measured_us - 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steps as a model works them out, not as they were measured.

    `checked` are at the world size that was measured, each by what the other points say; `steps`
    are at `world_size`. `assumes` says what the model takes for granted. With `refused` there are
    no steps, and it says why.
    """

    world_size: int
    checked: tuple[PredictedStep, ...] = ()
    steps: tuple[PredictedStep, ...] = ()
    within: float = 0.0
    """How far off `steps` may be, as a share of them: the worst of `checked`, a fifth at least
    where nothing was measured, and more where ranks share cores that they did not share."""
    assumes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def errors(self) -> tuple[float, ...]:
        """How far off the model is at each measured point, without sign."""
        return tuple(abs(each.error) for each in self.checked if each.error is not None)


@dataclass(frozen=True, slots=True)
class StepBenchResult:
    """What `%ddp_bench --model` measured, by bucket size and then batch size.

    `problem` says what ended it early; empty when nothing did. `break_even` is the batch size
    from which all ranks together process more samples per second than a single rank, None
    when that is at none of those measured; 0 when it is at all of them.
    """

    model: str
    parameters: int
    gradient_bytes: int
    inputs: str
    """What the model was fed with, and what its loss was, in words."""
    backend: str
    device: str
    world_size: int
    cores: int
    threads: int
    """Of each rank, within an operation of torch."""
    points: tuple[StepPoint, ...] = ()
    reduces: tuple[ReducePoint, ...] = ()
    break_even: float | None = None
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    others_cpu: float | None = None
    """CPU cores that processes other than the ranks kept busy meanwhile; None where unknown."""

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes per rank, smallest first."""
        return tuple(sorted({point.batch for point in self.points}))

    @property
    def buckets(self) -> tuple[str, ...]:
        """The bucket sizes as they were asked for, smallest first, the default last."""
        return tuple(dict.fromkeys(point.bucket for point in self.points))

    @property
    def main_bucket(self) -> str:
        """The bucket size that is shown where one must do: the default, where it was measured."""
        return DEFAULT_BUCKET if DEFAULT_BUCKET in self.buckets else self.buckets[0]

    @property
    def main_points(self) -> tuple[StepPoint, ...]:
        """The points of that bucket size, smallest batch first."""
        return self.of_bucket(self.main_bucket) if self.points else ()

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for; None for none.

        Named at a point at least, and the slowest at more than half of them: what it loses may
        be too little to be seen beside a large batch.
        """
        seen = [point.own_us for point in self.points if point.own_us]
        slowest = [own.index(max(own)) for own in seen]
        return max(
            (
                late
                for point in self.points
                if (late := point.straggler) and slowest.count(late.rank) * 2 > len(seen)
            ),
            key=lambda late: late.late_us,
            default=None,
        )

    def of_bucket(self, bucket: str) -> tuple[StepPoint, ...]:
        """The points of one bucket size, smallest batch first."""
        return tuple(sorted((p for p in self.points if p.bucket == bucket), key=lambda p: p.batch))
