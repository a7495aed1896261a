"""What the stamps of a communication hook tell: spans, arrivals, stragglers. Pure, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model.stepbench import BucketArrival, Straggler

Block = Mapping[str, Any]
"""What one rank measured in one block, as `steps_loop` gives it."""

_LATE_SHARE = 0.02
"""A rank that is late by less than this part of a step is not worth a word."""
_MANY_STEPS = 8
"""With fewer no rank is named: what comes last three times may do so by chance."""


def beside(block: Sequence[Block], name: str) -> Iterator[tuple[Any, ...]]:
    """Step by step, what each rank has of it."""
    return zip(*(each[name] for each in block), strict=True)


@dataclass(frozen=True, slots=True)
class Hooked:
    """The steps with stamps at each bucket. Times in ns, by step and then by rank."""

    steps_ns: list[int]
    forward_ns: list[list[int]]
    began_ns: list[list[int]]
    buckets: list[list[list[list[int]]]]
    """By step, rank and bucket: ready, issued, done."""
    sizes: list[int]
    logged: list[tuple[int, int]]
    rounds: list[int]
    """Of each step, the round it was taken in."""
    on_host: bool

    @classmethod
    def of(cls, blocks: Sequence[list[Block]]) -> Hooked:
        steps, forward, began, buckets, logged = [], [], [], [], []
        rounds: list[int] = []
        for block in blocks:
            steps += [max(map(sum, each)) for each in beside(block, "hooked")]
            forward += [[parts[0] for parts in each] for each in beside(block, "hooked")]
            began += [list(each) for each in beside(block, "backward_began")]
            buckets += [list(each) for each in beside(block, "buckets")]
            rounds += [int(block[0]["round"])] * (len(steps) - len(rounds))
            logged += [(int(all_), int(beside)) for b in block for all_, beside in b["logged"]]
        first = blocks[0][0]
        return cls(
            steps,
            forward,
            began,
            buckets,
            list(first["sizes"]),
            logged,
            rounds,
            bool(first["on_host"]),
        )

    def fields(self, step_ns: float) -> dict[str, Any]:
        """What a `StepPoint` says of them. `step_ns` is the step without a hook."""
        found: dict[str, Any] = {"hook_step_us": statistics.median(self.steps_ns) / 1e3}
        if self.logged:
            found["logger_exposed_us"] = statistics.median(a - b for a, b in self.logged) / 1e3
        if not self._whole:
            return found
        found["arrivals"] = tuple(self._arrivals())
        found["straggler"] = self._straggler(step_ns)
        last = len(self.sizes) - 1
        found["skew_us"] = tuple(
            (max(at) - min(at)) / 1e3 for at in (self._issued(s, last) for s in self._indexes)
        )
        if self.on_host:
            # The rank that comes last waits for nobody: its spans are communication alone.
            spans = [
                split_spans(max(ranks, key=lambda buckets: buckets[-1][1]))
                for ranks in self.buckets
            ]
            found["hook_exposed_us"] = statistics.median(exposed for exposed, _ in spans) / 1e3
            found["overlapped_us"] = statistics.median(beside for _, beside in spans) / 1e3
            found["ready_us"] = tuple(self._ready())
        return found

    @property
    def _whole(self) -> bool:
        """True when each step reduced the same number of buckets on every rank."""
        count = len(self.sizes)
        return count > 0 and all(len(each) == count for step in self.buckets for each in step)

    @property
    def _indexes(self) -> range:
        return range(len(self.buckets))

    def _issued(self, step: int, bucket: int) -> list[int]:
        """When each rank came to the all_reduce of a bucket."""
        return [buckets[bucket][1] for buckets in self.buckets[step]]

    def _arrivals(self) -> Iterator[BucketArrival]:
        for number, size in enumerate(self.sizes):
            late = [
                [at - min(issued) for at in issued]
                for issued in (self._issued(step, number) for step in self._indexes)
            ]
            yield BucketArrival(
                size, tuple(statistics.median(each) / 1e3 for each in zip(*late, strict=True))
            )

    def _ready(self) -> Iterator[float]:
        for number in range(len(self.sizes)):
            yield (
                statistics.median(
                    statistics.fmean(
                        buckets[number][0] - began
                        for buckets, began in zip(ranks, begans, strict=True)
                    )
                    for ranks, begans in zip(self.buckets, self.began_ns, strict=True)
                )
                / 1e3
            )

    def _straggler(self, step_ns: float) -> Straggler | None:
        last = len(self.sizes) - 1
        # Since its own step began: all_reduce does not end at once on all ranks, and who began late
        # for that is not to blame.
        at_last = [
            [
                at - began + forward
                for at, began, forward in zip(
                    self._issued(step, last),
                    self.began_ns[step],
                    self.forward_ns[step],
                    strict=True,
                )
            ]
            for step in self._indexes
        ]
        return straggler(at_last, self.forward_ns, self.rounds, step_ns)


def split_spans(buckets: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Communication of one step on one rank, in ns: after the last gradient, and before it.

    Each bucket is ready, issued and done; buckets overlap, so it is the union of their spans.
    """
    last_ready = max(bucket[0] for bucket in buckets)
    after = before = 0
    for start, end in _union((bucket[0], bucket[2]) for bucket in buckets):
        after += max(0, end - max(start, last_ready))
        before += max(0, min(end, last_ready) - start)
    return after, before


def _union(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans with those that touch made one, in order."""
    current: tuple[int, int] | None = None
    for start, end in sorted(spans):
        if current is None or start > current[1]:
            if current is not None:
                yield current
            current = start, end
        else:
            current = current[0], max(current[1], end)
    if current is not None:
        yield current


def straggler(
    arrived_ns: Sequence[Sequence[int]],
    began_ns: Sequence[Sequence[int]],
    rounds: Sequence[int],
    step_ns: float,
) -> Straggler | None:
    """The rank for which the others wait; None when there is none, or too little is known.

    By step, how long each rank took to come to the last all_reduce and to begin its backward, and
    in which round that was. All_reduce makes whole steps equally long on all ranks, so only this
    tells. A rank is named when the 95 % interval of its median time beyond the
    others' is above 0, the median is more than a fiftieth of the step, and it is so in
    every round: what another process takes from one rank for a second is not the rank's doing.
    """
    if len(arrived_ns) < _MANY_STEPS or len(arrived_ns[0]) < 2:
        return None
    found = []
    for rank in range(len(arrived_ns[0])):
        margins = [_beyond_others(at, rank) for at in arrived_ns]
        low, late = low_of_median(margins), statistics.median(margins)
        if low > 0 and late > _LATE_SHARE * step_ns and _in_every_round(margins, rounds):
            by_then = statistics.median(_beyond_others(at, rank) for at in began_ns)
            found.append(
                Straggler(
                    rank=rank,
                    late_us=late / 1e3,
                    low_us=low / 1e3,
                    where="forward" if by_then > late / 2 else "backward",
                    share=sum(margin > 0 for margin in margins) / len(margins),
                )
            )
    return max(found, key=lambda each: each.late_us, default=None)


def _in_every_round(margins: Sequence[float], rounds: Sequence[int]) -> bool:
    by_round: dict[int, list[float]] = {}
    for margin, number in zip(margins, rounds, strict=True):
        by_round.setdefault(number, []).append(margin)
    return all(statistics.median(each) > 0 for each in by_round.values())


def _beyond_others(at_ns: Sequence[int], rank: int) -> float:
    """How much longer a rank took than the others, of whom one may be held up for a moment."""
    return at_ns[rank] - statistics.median(at for r, at in enumerate(at_ns) if r != rank)


def low_of_median(values: Sequence[float]) -> float:
    """The lower end of the 95 % interval of the median, from the order of the values alone."""
    ordered, count = sorted(values), len(values)
    below, place = 0.0, 0
    while place < count:
        below += math.comb(count, place) / 2**count
        if below > 0.025:
            break
        place += 1
    return ordered[max(0, place - 1)]
