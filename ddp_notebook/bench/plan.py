"""What a benchmark will run: operations, sizes, and how long it may take."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from fractions import Fraction

from ddp_notebook.bench.ops import OP_NAMES, Op, op_named
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

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str | int) -> int:
    """The number of bytes in `text`: ``4096``, ``64K``, ``1.5M``, ``64 MiB``.

    K, M and G are powers of 1024. ``64MB`` is refused, since it may mean powers of 1000. Raises
    ValueError, with a message for the user, for anything that is not a whole number of bytes.
    """
    match = _BYTES.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a number of bytes: write 4096, 64K, 16M or 1G (1K is 1024 bytes)."
        )
    count = Fraction(match[1]) * _FACTORS[(match[2] or "").upper()]
    if count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes: write {round(count)}.")
    return count.numerator


def parse_seconds(text: str | float) -> float:
    """The number of seconds in `text`: ``30``, ``30s``, ``2m``. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([sm]?)", str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time: write 30s or 2m.")
    return float(match[1]) * (60 if match[2] == "m" else 1)


def parse_names(text: str, allowed: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names in a list ``a,b``, each once. Raises ValueError if one is not `allowed`."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        which = f"{wrong[0]!r} is no {what}" if wrong else f"no {what} is named"
        raise ValueError(f"{which}: there are {', '.join(allowed)}.")
    return names


@dataclass(frozen=True, slots=True)
class CurvePlan:
    """One operation, measured over all sizes by the first `world_size` of the ranks."""

    op: str
    dtype: str
    mode: str
    world_size: int
    tuned: bool = False

    @property
    def operation(self) -> Op:
        """The description of its operation."""
        return op_named(self.op)

    def sizes(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes in bytes that this operation can have, smallest first; 0 for no tensor.

        If every rank has an equal share of the tensor, sizes are rounded down to a multiple of
        that, and sizes below it are left out.
        """
        if not self.operation.sized:
            return (0,)
        least = DTYPE_BYTES[self.dtype] * (self.world_size if self.operation.shared else 1)
        return tuple(dict.fromkeys(size // least * least for size in wanted if size >= least))

    def memory_bytes(self, size_bytes: int) -> int:
        """The memory one rank needs for `size_bytes`: its tensors and the backend's copy."""
        in_flight = IN_FLIGHT if self.mode == "pipelined" else 1
        return size_bytes * (self.operation.buffers * in_flight + 1)


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
    tune: bool = False
    """Measure everything twice: with gloo's loop thread as it is, and as a batch job."""
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
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {least}.")
        for name, low in _NOT_BELOW.items():
            if getattr(self, name) < getattr(self, low):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, less than {low}, {getattr(self, low)}."
                )
        if not math.isfinite(self.budget_s):
            raise ValueError("budget_s must be a number of seconds, such as 30.")
        for names, allowed, what in (
            (self.ops, OP_NAMES, "operation"),
            (self.dtypes, tuple(DTYPE_BYTES), "dtype"),
            (self.modes, MODES, "mode"),
        ):
            parse_names(",".join(names), allowed, what)
        for dtype in self.dtypes:
            if self.min_bytes % DTYPE_BYTES[dtype]:
                raise ValueError(
                    f"The smallest size is {format_bytes(self.min_bytes)}: it must be a multiple "
                    f"of {DTYPE_BYTES[dtype]} bytes, one {dtype}."
                )

    def curves(self, world_size: int) -> tuple[CurvePlan, ...]:
        """The curves of `world_size` ranks; the barrier once, whatever the dtypes."""
        plans = []
        tunings = (False, True) if self.tune else (False,)
        sizes = self.world_sizes or (world_size,)
        for parts in itertools.product(self.ops, self.dtypes, self.modes, sizes, tunings):
            curve = CurvePlan(*parts)
            if not curve.operation.sized:
                curve = dataclasses.replace(curve, dtype=self.dtypes[0], mode="blocking")
            plans.append(curve)
        return tuple(dict.fromkeys(plans))

    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, smallest first."""
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
        per_byte = self.memory_bytes(world_size, 1)
        fits = memory_bytes // per_byte
        return 1 << (fits.bit_length() - 1) if fits else 0

    def has_settled(self, times_ns: list[int]) -> bool:
        """True when the last `warmup` of `times_ns` agree, or there were enough of them."""
        last = times_ns[-self.warmup :]
        return len(times_ns) >= self.max_warmup or max(last) <= self.settled * min(last)


_LEAST = {
    "min_bytes": 1,
    "factor": 2,
    "budget_s": 0,
    "rounds": 1,
    "warmup": 2,
    "settled": 1,
    "min_iterations": 1,
}
_NOT_BELOW = {
    "max_bytes": "min_bytes",
    "max_rounds": "rounds",
    "max_warmup": "warmup",
    "max_iterations": "min_iterations",
}
