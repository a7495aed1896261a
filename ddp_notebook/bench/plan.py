"""The plan of a benchmark of collectives: the operations, their sizes, and in which order.

A plan is a list of curves, one for each combination of operation, dtype, mode and world size. Each
curve has a point for each size. Rank 0 asks the `Schedule` what to measure next, by the times so
far and the time that is left.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from ddp_notebook.bench.intervals import median_interval
from ddp_notebook.model import format_bytes

DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
"""Bytes of one element, by torch's name."""
MODES = ("blocking", "pipelined")
IN_FLIGHT = 4
"""Collectives in flight at a time in pipelined mode, each on a tensor of its own."""


# -- the operations ----------------------------------------------------------------------


class Side(Enum):
    """The share of a size's elements that one side of an operation has on a rank."""

    NOTHING = "nothing"
    SHARE = "one part of as many equal ones as there are ranks"
    WHOLE = "whole"

    def elements(self, count: int, world_size: int) -> int:
        """Return the number of elements of this side's tensor, for a size of `count` elements."""
        return {Side.NOTHING: 0, Side.SHARE: count // world_size, Side.WHOLE: count}[self]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. As in nccl-tests, a size is that of the larger side.

    To add one: a line in `OPS`, and its expected result in `rank.bench.operations`.
    """

    name: str
    method: str
    """Of torch.distributed."""
    bus_factor: Callable[[int], float]
    """The ratio of bus bandwidth to algorithm bandwidth, by world size: what each rank must at
    least send, in units of the size. From nccl-tests, doc/PERFORMANCE.md ("Bandwidth"). 0 if
    nothing is sent."""
    sends: Side = Side.WHOLE
    receives: Side = Side.NOTHING
    """NOTHING: the operation works in place."""
    shared: bool = False
    """Every rank has an equal share: the number of elements is a multiple of the world size."""
    root: int | None = None
    """The rank that has the tensor, if only one does."""
    reduces: bool = False
    nccl_name: str = ""
    """The name in nccl-tests, if it differs."""

    @property
    def sized(self) -> bool:
        """False if there is no tensor: then the only size is 0."""
        return self.sends is not Side.NOTHING

    @property
    def in_place(self) -> bool:
        """True if there is no separate tensor for the result."""
        return self.receives is Side.NOTHING


def _to_others(world_size: int) -> float:
    return (world_size - 1) / world_size


OPS = (
    Op("all_reduce", "all_reduce", lambda n: 2 * _to_others(n), reduces=True),
    Op("broadcast", "broadcast", lambda n: float(n > 1), root=0),
    Op("all_gather", "all_gather_into_tensor", _to_others, Side.SHARE, Side.WHOLE, shared=True),
    Op(
        "reduce_scatter",
        "reduce_scatter_tensor",
        _to_others,
        receives=Side.SHARE,
        shared=True,
        reduces=True,
    ),
    Op(
        "all_to_all",
        "all_to_all_single",
        _to_others,
        receives=Side.WHOLE,
        shared=True,
        nccl_name="alltoall",
    ),
    Op("barrier", "barrier", lambda _: 0.0, sends=Side.NOTHING),
)
OP_NAMES = tuple(op.name for op in OPS)


def op_named(name: str) -> Op:
    """Return the operation of this name; for one that only another version knows, just the name."""
    return next((op for op in OPS if op.name == name), Op(name, name, lambda _: 0.0))


# -- how options are written -------------------------------------------------------------


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes in `text`: ``4096``, ``64K``, ``1.5M``, ``64 MiB``.

    K, M and G are powers of 1024. ``64MB`` is refused, since it may mean powers of 1000. Raises
    ValueError, with a message for the user, for anything that is not a whole number of bytes.
    """
    form = r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMG])(?:iB)?|B)?"
    match = re.fullmatch(form, str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"{text!r} is not a number of bytes: write 4096, 64K, 16M or 1G (1K is 1024 bytes)."
        )
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[(match[2] or "").upper()]
    count = Fraction(match[1]) * unit
    if count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes: write {round(count)}.")
    return count.numerator


def parse_seconds(text: str | float) -> float:
    """Return the number of seconds in `text`: ``30``, ``30s``, ``2m``. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([sm]?)", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time: write 30s or 2m.")
    return float(match[1]) * (60 if match[2] == "m" else 1)


def parse_names(text: str, allowed: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the names in a list ``a,b``, each once. Raises ValueError if one is not `allowed`."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        which = f"{wrong[0]!r} is no {what}" if wrong else f"no {what} is named"
        raise ValueError(f"{which}: there are {', '.join(allowed)}.")
    return names


# -- the plan ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurvePlan:
    """One operation, measured over all sizes by the first `world_size` of the ranks."""

    op: str
    dtype: str
    mode: str
    world_size: int

    @property
    def operation(self) -> Op:
        """The description of its operation."""
        return op_named(self.op)

    def sizes(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes in bytes that this operation can have, smallest first; 0 for no tensor.

        If every rank has an equal share of the tensor, sizes are rounded down to a multiple of
        that, and sizes below it are left out.
        """
        if not self.operation.sized:
            return (0,)
        # Rounded down, two sizes may become one, which is to be measured once.
        least = DTYPE_BYTES[self.dtype] * (self.world_size if self.operation.shared else 1)
        return tuple(dict.fromkeys(size // least * least for size in wanted if size >= least))

    def memory_bytes(self, size_bytes: int) -> int:
        """Return the memory one rank needs for `size_bytes`: its tensors and the backend's copy."""
        tensors = 1 if self.operation.in_place else 2
        return size_bytes * (tensors * (IN_FLIGHT if self.mode == "pipelined" else 1) + 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark run. Every rank gets the same plan.

    `ops`, `dtypes`, `modes` and `world_sizes` multiply: each combination is a curve.
    `world_sizes` empty means all the ranks.
    """

    ops: tuple[str, ...] = ("all_reduce",)
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("blocking",)
    world_sizes: tuple[int, ...] = ()
    min_bytes: int = 4
    """Smallest size."""
    max_bytes: int = 64 * 2**20
    """Largest size; it is measured itself if `factor` reaches it."""
    factor: int = 2
    """Each size is this many times the one before."""
    budget_s: float = 15.0
    """When to stop, in seconds. Every size is measured at least once."""
    precision: float = 0.05
    """A size is measured until its 95 % interval (`stats.median_interval`) is within this share of
    its median."""
    rounds: int = 3
    """How often every size is measured at least, each time in another order, so that a short
    disturbance does not always hit the same size."""
    max_rounds: int = 20
    warmup: int = 2
    """Untimed iterations at a time before a size is first measured; repeated until they agree."""
    max_warmup: int = 10
    """The most iterations of warm-up."""
    settled: float = 1.25
    """The warm-up is over when its slowest iteration takes at most this times its fastest."""
    min_iterations: int = 3
    """Timed iterations per size and round, however short the budget."""
    max_iterations: int = 100
    """Timed iterations per size and round, however much of the budget is left."""
    seed: int = 0
    """Decides the order of the sizes."""

    def __post_init__(self) -> None:
        """Raises ValueError, with a message for the user, when this cannot be run."""
        least, most = format_bytes(self.min_bytes), format_bytes(self.max_bytes)
        if self.min_bytes < 1:
            raise ValueError(f"The smallest size is {least}: it must be at least 1 B.")
        if self.max_bytes < self.min_bytes:
            raise ValueError(
                f"The largest size, {most}, is less than the smallest, {least}: give a larger "
                "--max, or a smaller --min."
            )
        if self.factor < 2:
            raise ValueError(f"--step is {self.factor}: it must be at least 2.")
        if not 0 <= self.budget_s < math.inf:
            raise ValueError(
                f"The budget is {self.budget_s:g} s: it must be 0 or more, such as --budget 30s."
            )
        parse_names(",".join(self.ops), OP_NAMES, "operation")
        parse_names(",".join(self.dtypes), tuple(DTYPE_BYTES), "dtype")
        parse_names(",".join(self.modes), MODES, "mode")
        for dtype in self.dtypes:
            if self.min_bytes % DTYPE_BYTES[dtype]:
                raise ValueError(
                    f"The smallest size is {format_bytes(self.min_bytes)}: it must be a multiple "
                    f"of {DTYPE_BYTES[dtype]} bytes, one {dtype}."
                )

    def curves(self, world_size: int) -> tuple[CurvePlan, ...]:
        """Return the curves of `world_size` ranks; the barrier once, whatever the dtypes."""
        plans = []
        sizes = self.world_sizes or (world_size,)
        for parts in itertools.product(self.ops, self.dtypes, self.modes, sizes):
            curve = CurvePlan(*parts)
            if not curve.operation.sized:
                curve = dataclasses.replace(curve, dtype=self.dtypes[0], mode="blocking")
            plans.append(curve)
        return tuple(dict.fromkeys(plans))

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes in bytes, smallest first."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return tuple(sizes)

    def memory_bytes(self, world_size: int, max_bytes: int | None = None) -> int:
        """The most memory one rank needs for sizes up to `max_bytes` (default: the plan's)."""
        largest = self.max_bytes if max_bytes is None else max_bytes
        return max(curve.memory_bytes(largest) for curve in self.curves(world_size))

    def largest_that_fits(self, world_size: int, memory_bytes: int) -> int:
        """The largest power of two that needs at most `memory_bytes` on a rank; 0 if none does."""
        fits = memory_bytes // self.memory_bytes(world_size, 1)
        return 1 << (fits.bit_length() - 1) if fits else 0

    def has_settled(self, times_ns: list[int]) -> bool:
        """Return True when the last `warmup` of `times_ns` agree, or there were enough of them."""
        last = times_ns[-self.warmup :]
        return len(times_ns) >= self.max_warmup or max(last) <= self.settled * min(last)


# -- what is next ------------------------------------------------------------------------


class Item(NamedTuple):
    """One size of one curve, by their indices."""

    curve: int
    size_bytes: int


@dataclass
class Schedule:
    """The visits of one run. `items` are all there is to measure; times are in nanoseconds.

    Every size is visited once in each round, in a new random order, so that a short disturbance
    does not always hit the same size. A size is done when its interval is narrow enough.
    """

    plan: Plan
    items: Sequence[Item]
    times_ns: dict[Item, list[list[int]]] = field(default_factory=dict)
    """Of each, by visit: the times of its slowest rank."""
    _round: list[Item] = field(default_factory=list)
    _rounds_begun: int = 0

    def __post_init__(self) -> None:
        self._order = random.Random(self.plan.seed)  # noqa: S311 - shuffles, keeps no secret
        self.times_ns = {item: [] for item in self.items}

    def next(self, spent_s: float) -> Item | None:
        """Return what to measure now, `spent_s` after the start; None when all is done."""
        # When the time is over the first round still comes to its end: a size that was never
        # measured would leave a gap in its curve. What was measured once is then passed over.
        out_of_time = spent_s >= self.plan.budget_s
        rounds = 1 if out_of_time else self.plan.max_rounds
        while True:
            if not self._round:
                left = [item for item in self.items if not self._is_done(item)]
                if not left or self._rounds_begun >= rounds:
                    return None
                self._round = self._order.sample(left, k=len(left))
                if not self._rounds_begun:  # something should be seen at once
                    smallest = min(left, key=lambda item: item.size_bytes)
                    self._round.remove(smallest)
                    self._round.insert(0, smallest)
                self._rounds_begun += 1
            item = self._round.pop(0)
            if not (out_of_time and self.times_ns[item]):
                return item

    def iterations(self, item: Item, warm_ns: list[int]) -> int:
        """Return how many iterations of `item` to time now; `warm_ns` are the times of its warm-up.

        Estimated by the mean: of times with a long tail the median is too low. A round should take
        a tenth of the budget: many short rounds sample more moments than few long ones.
        """
        # Nothing is known before the first round but the warm-up, of which the slowest counts: too
        # few iterations cost precision, and too many the budget of all other sizes.
        before = [t for times in self.times_ns[item] for t in times]
        each_ns = statistics.fmean(before) if before else max(warm_ns)
        affordable = int(self.plan.budget_s * 1e8 / len(self.items) / max(each_ns, 1.0))
        return max(self.plan.min_iterations, min(affordable, self.plan.max_iterations))

    def progress(self, spent_s: float) -> float:
        """The share of the run that is done, 0 to 1: by time, or by what is precise already."""
        first = sum(1 for rounds in self.times_ns.values() if rounds) / len(self.items)
        by_time = min(spent_s / self.plan.budget_s, 1.0) if self.plan.budget_s else 1.0
        done = sum(self._is_done(item) for item in self.items) / len(self.items)
        return min(first, max(by_time, done))

    def _is_done(self, item: Item) -> bool:
        rounds = self.times_ns[item]
        if len(rounds) < self.plan.rounds:
            return False
        low, median, high = median_interval(rounds)
        return (high - low) / 2 <= self.plan.precision * median
