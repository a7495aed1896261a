"""What a benchmark will run: sizes, rounds and how long it may take."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ddp_notebook.model import format_bytes

FLOAT32_BYTES = 4
"""Bytes of one element: every size is a multiple of it."""

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str | int) -> int:
    """The number of bytes that `text` writes: ``4096``, ``64K``, ``1.5M``, ``64 MiB``.

    K, M and G are powers of 1024. ``64MB`` is refused, since some mean 1000 by it. Raises
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark run. Every rank gets the same plan and so does the same in the same order."""

    min_bytes: int = 4
    """Smallest size."""
    max_bytes: int = 64 * 2**20
    """No size is larger; it is itself a size when `factor` reaches it."""
    factor: int = 4
    """Each size is this many times the one before."""
    budget_s: float = 20.0
    """What the whole run should take, in seconds. The least of everything is run even so."""
    rounds: int = 3
    """How often every size is measured, each time in another order: a disturbance of a
    moment then does not fall on one size alone."""
    warmup: int = 2
    """Untimed iterations at a time before each measurement; repeated until they agree."""
    max_warmup: int = 10
    """When to stop waiting for the warm-up to settle, in iterations."""
    settled: float = 1.25
    """The warm-up has settled when its slowest iteration took at most this times its fastest."""
    min_iterations: int = 3
    """Timed iterations per size and round, however short the budget."""
    max_iterations: int = 200
    """Timed iterations per size and round, however much of the budget is left."""
    seed: int = 0
    """Decides the order of the sizes, on all ranks alike."""

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
        if self.min_bytes % FLOAT32_BYTES:
            raise ValueError(
                f"The smallest size is {format_bytes(self.min_bytes)}: it must be a multiple of "
                f"{FLOAT32_BYTES} bytes, one float32."
            )

    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, smallest first."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return tuple(sizes)

    def schedule(self) -> tuple[int, ...]:
        """The sizes in the order they are measured: all of them, shuffled, once per round."""
        order = random.Random(self.seed)  # noqa: S311 - shuffles sizes, keeps no secret
        sizes = self.sizes()
        return tuple(size for _ in range(self.rounds) for size in order.sample(sizes, k=len(sizes)))

    def has_settled(self, times_ns: list[int]) -> bool:
        """True when the last `warmup` of `times_ns` agree, or there were enough of them."""
        last = times_ns[-self.warmup :]
        return len(times_ns) >= self.max_warmup or max(last) <= self.settled * min(last)

    def iterations(self, each_ns: float, left_ns: float, measurements: int) -> int:
        """How often to time something that takes `each_ns`.

        `left_ns` of the budget are left for this and the rest of `measurements`.
        """
        affordable = int(left_ns / measurements / max(each_ns, 1.0))
        return max(self.min_iterations, min(affordable, self.max_iterations))

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, wire: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote. Raises ValueError for anything else."""
        try:
            return cls(**wire)
        except TypeError as error:
            raise ValueError(f"not a benchmark plan: {error}") from None


_LEAST = {
    "min_bytes": FLOAT32_BYTES,
    "factor": 2,
    "budget_s": 0,
    "rounds": 1,
    "warmup": 2,
    "settled": 1,
    "min_iterations": 1,
}
_NOT_BELOW = {
    "max_bytes": "min_bytes",
    "max_warmup": "warmup",
    "max_iterations": "min_iterations",
}
