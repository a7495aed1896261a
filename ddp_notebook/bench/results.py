"""What a benchmark of collectives measured: points, curves, conditions, changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddp_notebook.bench.ops import Op, op_named

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
    """The time of a message of any size, as one straight line, or two that take turns.

    `latency_s` is what even the smallest message takes: the first line's start.
    `bandwidth_bytes_per_s` is what the largest come near to: the slope of the last line.
    `half_bandwidth_bytes` is the smallest size that gets half of that bandwidth. Each has its
    95 % interval beside it. Made by `ddp_notebook.bench.fit.fit`.
    """

    regimes: tuple[Regime, ...]
    latency_s: float
    latency_interval_s: Interval
    bandwidth_bytes_per_s: float
    bandwidth_interval_bytes_per_s: Interval
    half_bandwidth_bytes: float
    half_bandwidth_interval_bytes: Interval
    from_bytes: int
    """The smallest size it was fitted to."""
    to_bytes: int
    """The largest."""
    median_error: float
    """Half of the sizes it was fitted to are off by at most this share of their time."""
    max_error: float
    """None of them is off by more."""

    def predict(self, size_bytes: float) -> float:
        """Seconds that a message of `size_bytes` takes, by the model.

        Beyond `from_bytes` and `to_bytes` nothing was measured: there it is a guess.
        """
        regime = self.regimes[0]
        for later in self.regimes[1:]:
            if size_bytes >= later.from_bytes:
                regime = later
        return regime.latency_s + size_bytes * regime.s_per_byte


class Trust(StrEnum):
    """How far the numbers can be believed."""

    GOOD = "good"
    """They hold within their intervals."""
    FAIR = "fair"
    """Compare them with each other, from this run; not with another machine or another day."""
    NOISY = "too noisy to say"


@dataclass(frozen=True, slots=True)
class Samples:
    """Every time that was taken of one size, in nanoseconds: a row for each rank.

    Column i is the same collective on all ranks. `rounds` is how many columns each round gave.
    """

    times_ns: tuple[tuple[int, ...], ...]
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One tensor size. Times are of the slowest rank in each iteration, in microseconds.

    `latency_us` is the median over iterations, `latency_interval_us` where that of another such run
    lies, 95 times of 100.
    `algbw_gb_per_s` is size over that time, `busbw_gb_per_s` the same times the operation's
    factor: nccl-tests' definitions, GB = 1e9 bytes. `wrong` counts elements of results that
    were not what the operation must give.
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
    """How long each rank took to bring its part, lower quartile: long on one that is always late,
    and not on one that had to wait for a core now and then."""
    skew_us: float
    """Between the fastest and the slowest rank of an iteration, median."""
    precise: bool
    """The interval was within what the plan asked for when the budget ended."""
    samples: Samples | None = None
    """None in a result that was read from a file without them."""

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
    """blocking: each waited for before the next; pipelined: several under way at a time."""
    ranks: tuple[int, ...]
    tuned: bool = False
    """Gloo's loop thread ran as a batch job."""
    points: tuple[BenchPoint, ...] = ()
    fit: Fit | None = None
    no_fit: str = ""
    """Why there is none; empty when there is one, or nothing to fit."""
    straggler: int | None = None
    """The rank that brings its part late."""
    straggler_late_us: float = 0.0

    @property
    def operation(self) -> Op:
        """What is known of its operation."""
        return op_named(self.op)

    @property
    def world_size(self) -> int:
        """The number of ranks that took part."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """It on one line: ``all_reduce of float32, 4 ranks, pipelined``."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        parts = [f"{self.op} of {self.dtype}" if self.operation.sized else self.op, ranks]
        if self.mode != "blocking":
            parts.append(self.mode)
        if self.tuned:
            parts.append("SCHED_BATCH")
        return ", ".join(parts)

    @property
    def key(self) -> tuple[str, str, str, int, bool]:
        """What must agree for two curves to be compared."""
        return self.op, self.dtype, self.mode, self.world_size, self.tuned


LOOPBACK_TCP = "loopback TCP"
"""The floor that a plain socket between two ranks of a host is."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What the machine itself can do, measured or looked up in the same run.

    `what` names it, `source` where the number is from. Either may be 0: not known.
    """

    what: str
    latency_us: float
    bandwidth_gb_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Conditions:
    """What else was going on while it was measured."""

    cores: int = 0
    """CPU cores the ranks of one host share; 0 when that is not known."""
    ranks_per_host: int = 0
    others_cpu: float | None = None
    """Cores that processes other than the ranks kept busy, on average; None: not known."""
    loop_cpu: float | None = None
    """Cores that one rank's gloo loop threads kept busy at small sizes; None: there were none."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """What `%ddp_bench` measured, and under which conditions."""

    backend: str
    device: str
    world_size: int
    curves: tuple[Curve, ...]
    trust: Trust = Trust.FAIR
    reasons: tuple[str, ...] = ()
    """Why it is not trusted more."""
    notes: tuple[str, ...] = ()
    floors: tuple[Floor, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    ended: str = ""
    """Why it ended before its time; empty when it did not."""
    buckets_bytes: tuple[int, ...] = ()
    """The sizes of the buckets of the user's own model, where one is known."""
    started: str = ""
    """When, in ISO 8601 with the offset from UTC."""
    plan: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> tuple[BenchPoint, ...]:
        """The points of the first curve: all there are, unless more than one was asked for."""
        return self.curves[0].points if self.curves else ()


class Change(StrEnum):
    """How a size, or a whole curve, compares with the baseline."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "no difference that the intervals allow to state"
    UNDECIDED = "too noisy to say"
    """There is a difference, and it may be the machine's: one of the runs is not to be trusted."""


@dataclass(frozen=True, slots=True)
class PointChange:
    """One size against the baseline; `ratio` is this run's median over the baseline's."""

    size_bytes: int
    ratio: float
    change: Change


@dataclass(frozen=True, slots=True)
class CurveChange:
    """One curve against the baseline's; `ratio` is the median over the sizes that changed,
    or over all when none did."""

    curve: Curve
    baseline: Curve
    change: Change
    ratio: float
    points: tuple[PointChange, ...]
    together: tuple[float, float] | None = None
    """The 99.9 % interval of the ratio over all sizes together, where that decided."""
