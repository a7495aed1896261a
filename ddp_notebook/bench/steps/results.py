"""What `%ddp_bench --model` measured: where the time of a training step goes."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BUCKET = "default"
"""DDP's own bucket sizes: first a bucket of 1 MiB, then of 25 MiB."""


def name_bucket(bucket: str) -> str:
    """A bucket size in a sentence: ``default buckets``, ``5 MiB buckets``."""
    return f"{bucket} buckets" if bucket == DEFAULT_BUCKET else f"{bucket} MiB buckets"


@dataclass(frozen=True, slots=True)
class BucketArrival:
    """One bucket of gradients: how late each rank called its all_reduce.

    `late_us` has an entry for each rank: the median time after the first rank's call.
    """

    size_bytes: int
    late_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for: it reaches its all_reduces later, in most steps.

    `late_us` is the median of how much longer than the others' median it takes to the last bucket
    of a step, without waiting for a core; `low_us` is the lower end of its 99.9 % interval.
    `where` is the part of the step in which the time is lost: ``forward`` or ``backward``. `share`
    is the share of steps in which it takes longer.
    """

    rank: int
    late_us: float
    low_us: float
    where: str
    share: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A DDP step at one batch size and one bucket size. Times are medians over steps, in us.

    The time of a step is that of its slowest rank. `local_us` is the same step under no_sync, and
    `forward_us`, `backward_us` and `optimizer_us` are its parts. `exposed_us` is the step minus the
    local step: what communication adds to it, with its 95 % interval; it is the reference for the
    other estimates. `overlapped_us` is communication during the backward, by a hook's timestamps.
    `hook_exposed_us` and `logger_exposed_us` are the exposed communication by these timestamps and
    by DDP's own logger; None if they have none. `hook_step_us` is the step with the hook.
    `alone_us` is the step of one rank while the others are idle.
    """

    batch: int
    """Samples per rank."""
    bucket: str
    """The requested bucket size: MiB, or ``default``."""
    steps: int
    """The number of timed steps."""
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
    """When each bucket's gradients are ready, from the start of the backward, with the hook."""
    arrivals: tuple[BucketArrival, ...] = ()
    own_us: tuple[float, ...] = ()
    """The time of each rank's own work until its last all_reduce, without waiting for a core."""
    straggler: Straggler | None = None
    skew_us: tuple[float, ...] = ()
    """For each step with the hook: from the first rank at the last bucket to the last one."""
    times_us: tuple[float, ...] = ()
    """For each step, its time on the slowest rank."""

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

    `each_us` is the time of one: copied in, reduced, copied out, several in flight at a time.
    `total_us` is the time for all gradients.
    """

    size_bytes: int
    each_us: float
    total_us: float
    busy_cores: float = 1.0
    """CPU cores that a rank, with all its threads, keeps busy during it."""
    scaled: bool = False
    """True if only some of them were timed, and `total_us` is extrapolated."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The model's prediction for one point. `measured_us` is None if nothing was measured."""

    batch: int
    bucket: str
    step_us: float
    measured_us: float | None = None

    @property
    def error(self) -> float | None:
        """The relative error; positive if the prediction is too long."""
        return None if self.measured_us is None else self.step_us / self.measured_us - 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steps predicted by a model.

    `checked` are at the measured world size, each predicted from the other points; `steps` are at
    `world_size`. `assumes` states the model's assumptions. If `refused` is not empty, it says why
    there are no steps.
    """

    world_size: int
    checked: tuple[PredictedStep, ...] = ()
    steps: tuple[PredictedStep, ...] = ()
    within: float = 0.0
    """The relative error to expect of `steps`: the worst of `checked`; at least a fifth where
    nothing was measured, and more if ranks share cores that they did not share before."""
    assumes: tuple[str, ...] = ()
    refused: str = ""

    @property
    def errors(self) -> tuple[float, ...]:
        """The absolute relative error at each measured point."""
        return tuple(abs(step.error) for step in self.checked if step.error is not None)


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
    """The model's input and loss, in words."""
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
    """CPU cores kept busy by processes other than the ranks; None if not known."""

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes per rank, smallest first."""
        return tuple(sorted({point.batch for point in self.points}))

    @property
    def buckets(self) -> tuple[str, ...]:
        """The requested bucket sizes, smallest first, the default last."""
        return tuple(dict.fromkeys(point.bucket for point in self.points))

    @property
    def main_bucket(self) -> str:
        """The bucket size to show where only one is shown: the default, if it was measured."""
        return DEFAULT_BUCKET if DEFAULT_BUCKET in self.buckets else self.buckets[0]

    @property
    def main_points(self) -> tuple[StepPoint, ...]:
        """The points of that bucket size, smallest batch first."""
        return self.of_bucket(self.main_bucket) if self.points else ()

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for; None for none.

        It is the straggler of at least one point and the slowest at more than half of the points:
        beside a large batch its delay may be too small to be seen.
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
