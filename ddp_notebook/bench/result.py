"""The result of a benchmark of collectives: points, curves, conditions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddp_notebook.bench.plan import Op, op_named
from ddp_notebook.model import counted

Interval = tuple[float, float]
"""The ends of a 95 % interval, lower one first. An end may be infinite."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Sizes from `from_bytes` on take ``latency_s + size * s_per_byte`` seconds."""

    from_bytes: int
    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The time of a message of any size, as one straight line, or two, each for its sizes.

    `latency_s` is the time of the smallest message: the start of the first line.
    `bandwidth_bytes_per_s` is the limit for large messages: by the slope of the last line.
    `half_bandwidth_bytes` is the smallest size that gets half of that bandwidth. Made by
    `ddp_notebook.bench.fit.fit`.
    """

    regimes: tuple[Regime, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    half_bandwidth_bytes: float
    from_bytes: int
    """The smallest size it was fitted to."""
    to_bytes: int
    """The largest."""
    median_error: float
    """The median over sizes of the relative error."""

    def predict(self, size_bytes: float) -> float:
        """Return the seconds that a message of `size_bytes` takes, by the model.

        Outside `from_bytes` to `to_bytes` nothing was measured: there it is an extrapolation.
        """
        regime = self.regimes[0]
        for later in self.regimes[1:]:
            if size_bytes >= later.from_bytes:
                regime = later
        return regime.latency_s + size_bytes * regime.s_per_byte


class Trust(StrEnum):
    """How reliable the numbers are."""

    GOOD = "good"
    """They are right within their intervals."""
    FAIR = "fair"
    """Compare them within this run only; not with another machine or another day."""
    NOISY = "too noisy to say"


@dataclass(frozen=True, slots=True)
class Samples:
    """All times of one size, in nanoseconds: a row for each rank.

    Column i is the same collective on all ranks. `rounds` has the number of columns of each round.
    """

    times_ns: tuple[tuple[int, ...], ...]
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One tensor size. Times are those of the slowest rank in each iteration, in microseconds.

    `latency_us` is the median over iterations; the median of a second run lies in
    `latency_interval_us` 95 times of 100. `algbw_gb_per_s` is size over that time,
    `busbw_gb_per_s` the same times the operation's factor: nccl-tests' definitions, GB = 1e9
    bytes. `wrong` counts the elements of results that are not what the operation must give.
    """

    size_bytes: int
    count: int
    """Elements."""
    iterations: int
    rounds: int
    latency_us: float
    latency_interval_us: Interval
    mean_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int
    rank_us: tuple[float, ...]
    """Each rank's own median, in the order of the curve's ranks."""
    issue_us: tuple[float, ...]
    """How long each rank took to issue its part, lower quartile: large for a rank that is always
    late, and not for one that sometimes waited for a core."""
    skew_us: float
    """The median difference between the fastest and the slowest rank of an iteration."""
    precise: bool
    """The interval was as narrow as the plan asks for when the budget ended."""
    samples: Samples | None = None
    """None if the result was read from a file without them."""

    @property
    def spread(self) -> float:
        """Half of the interval's width, as a share of the median."""
        low, high = self.latency_interval_us
        return (high - low) / 2 / self.latency_us if self.latency_us else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One operation over all sizes, smallest first."""

    op: str
    dtype: str
    mode: str
    """blocking: each is waited for before the next; pipelined: several run at a time."""
    ranks: tuple[int, ...]
    points: tuple[BenchPoint, ...] = ()
    fit: Fit | None = None
    no_fit: str = ""
    """Why there is no fit; empty if there is one, or nothing to fit."""
    straggler: int | None = None
    """The rank that issues its part late."""
    straggler_late_us: float = 0.0

    @property
    def operation(self) -> Op:
        """The description of its operation."""
        return op_named(self.op)

    @property
    def world_size(self) -> int:
        """The number of ranks that took part."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The curve on one line: ``all_reduce of float32, 4 ranks, pipelined``."""
        what = f"{self.op} of {self.dtype}" if self.operation.sized else self.op
        parts = [what, counted(self.world_size, "rank")]
        if self.mode != "blocking":
            parts.append(self.mode)
        return ", ".join(parts)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the properties that must agree for two curves to be compared."""
        return self.op, self.dtype, self.mode, self.world_size


@dataclass(frozen=True, slots=True)
class Conditions:
    """The other load of the machine during the measurement."""

    cores: int = 0
    """CPU cores that the ranks of one host share; 0 if not known."""
    ranks_per_host: int = 0
    others_cpu: float | None = None
    """Mean number of cores kept busy by processes other than the ranks; None if not known."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The measurements of `%ddp_bench`, and their conditions."""

    backend: str
    device: str
    world_size: int = 0
    curves: tuple[Curve, ...] = ()
    trust: Trust = Trust.FAIR
    reasons: tuple[str, ...] = ()
    """Why it is not trusted more."""
    notes: tuple[str, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    links: str = ""
    """The links between the ranks' GPUs, in a clause; empty on CPUs, and where they are unknown."""
    limit_gb_per_s: float = 0.0
    """The most that a GPU can send by them; 0 where it is not known."""
    copy_gb_per_s: float = 0.0
    """How fast each rank copied memory while all of them did; 0 where it was not measured."""
    bucket_bytes: tuple[int, ...] = ()
    """The sizes of the buckets of the ranks' own DDP models, smallest first."""
    ended: str = ""
    """Why it ended early; empty if it did not."""
    started: str = ""
    """When, in ISO 8601 with the offset from UTC."""
    plan: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> tuple[BenchPoint, ...]:
        """The points of the first curve; without `--ops` and the like it is the only one."""
        return self.curves[0].points if self.curves else ()

    @property
    def all_points(self) -> tuple[BenchPoint, ...]:
        """The points of all curves."""
        return tuple(point for curve in self.curves for point in curve.points)


def duration(seconds: float) -> str:
    """Return a time to three digits: ``280 µs``, ``1.2 ms``, ``3 s``."""
    for unit, worth in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= worth * 0.9995:
            return f"{float(f'{seconds / worth:.3g}'):g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"
