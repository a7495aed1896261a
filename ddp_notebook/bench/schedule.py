"""What to measure next, as rank 0 decides it from the times so far and the time left.

Every size is visited once in each round, in a new random order, so that a short disturbance does
not always hit the same size. A size is done when its interval is narrow enough.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.stats import median_interval

_PASSES = 10
"""The share of the budget that a round should take: many short rounds sample more moments."""


class Item(NamedTuple):
    """One size of one curve, by their indices."""

    curve: int
    size_bytes: int


@dataclass
class Schedule:
    """The visits of one run. `items` are all there is to measure; times are in nanoseconds."""

    plan: Plan
    items: Sequence[Item]
    _slowest: dict[Item, list[list[int]]] = field(default_factory=dict)
    _round: list[Item] = field(default_factory=list)
    _rounds_begun: int = 0

    def __post_init__(self) -> None:
        self._order = random.Random(self.plan.seed)  # noqa: S311 - shuffles, keeps no secret
        self._slowest = {item: [] for item in self.items}

    def next(self, spent_s: float) -> Item | None:
        """What to measure now, `spent_s` after the start; None when all is done."""
        out_of_time = spent_s >= self.plan.budget_s
        while True:
            over = out_of_time and self._rounds_begun > 0
            if not self._round and (over or not self._begin_round()):
                return None
            item = self._round.pop(0)
            if not (out_of_time and self._slowest[item]):
                return item

    def iterations(self, item: Item, warm_ns: list[int]) -> int:
        """How many iterations of `item` to time now; `warm_ns` are the times of its warm-up.

        Estimated by the mean: of times with a long tail the median is too low.
        """
        before = [t for times in self._slowest[item] for t in times]
        each_ns = statistics.fmean(before) if before else max(warm_ns)
        share_ns = self.plan.budget_s * 1e9 / _PASSES / len(self.items)
        affordable = int(share_ns / max(each_ns, 1.0))
        return max(self.plan.min_iterations, min(affordable, self.plan.max_iterations))

    def is_new(self, item: Item) -> bool:
        """True until `item` was measured once."""
        return not self._slowest[item]

    def rounds_of(self, item: Item) -> int:
        """How often `item` was measured."""
        return len(self._slowest[item])

    def took(self, item: Item, slowest_ns: list[int]) -> None:
        """Record the times of the slowest rank in one visit."""
        self._slowest[item].append(slowest_ns)

    def progress(self, spent_s: float) -> float:
        """The share of the run that is done, 0 to 1: by time, or by what is precise already."""
        first = sum(1 for rounds in self._slowest.values() if rounds) / len(self.items)
        by_time = min(spent_s / self.plan.budget_s, 1.0) if self.plan.budget_s else 1.0
        done = sum(self._is_done(item) for item in self.items) / len(self.items)
        return min(first, max(by_time, done))

    def _begin_round(self) -> bool:
        left = [item for item in self.items if not self._is_done(item)]
        if not left or self._rounds_begun >= self.plan.max_rounds:
            return False
        self._round = self._order.sample(left, k=len(left))
        if not self._rounds_begun:
            smallest = min(left, key=lambda item: item.size_bytes)
            self._round.remove(smallest)
            self._round.insert(0, smallest)
        self._rounds_begun += 1
        return True

    def _is_done(self, item: Item) -> bool:
        rounds = self._slowest[item]
        if len(rounds) < self.plan.rounds:
            return False
        low, median, high = median_interval(rounds)
        return (high - low) / 2 <= self.plan.precision * median
