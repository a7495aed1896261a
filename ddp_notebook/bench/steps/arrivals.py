"""When each rank's buckets come to their all_reduce: spans, arrivals, stragglers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.bench.steps.results import BucketArrival, Straggler

Block = Mapping[str, Any]
"""What one rank measured in one block, as `steps_loop` gives it."""

_LATE_SHARE = 0.02
"""A rank that is late by less than this part of a step is not reported."""
_MANY_STEPS = 8
"""With fewer steps no rank is named: a rank can be last three times by chance."""
_ROUND_NOISE = 0.1
"""Ranks with equal work differ by this share of its time from round to round (measured: the
standard deviation of a round's median): caches, clock rates, cores that share units."""
_NORMAL_999 = 3.2905
"""99.9 %, and not 95 %: whoever is named is blamed, and every rank at every point might be."""
_SPREAD = 1.4826
"""Of a normal distribution: its standard deviation over its median absolute deviation."""


def beside(block: Sequence[Block], name: str) -> Iterator[tuple[Any, ...]]:
    """The measurements by step, and of each step by rank."""
    return zip(*(rank[name] for rank in block), strict=True)


@dataclass(frozen=True, slots=True)
class Hooked:
    """The steps with stamps at each bucket. Times in ns, by step and then by rank."""

    steps_ns: list[int]
    forward_ns: list[list[int]]
    began_ns: list[list[int]]
    buckets: list[list[list[list[int]]]]
    """By step, rank and bucket: when it was ready, issued and done, and how long the rank had
    waited for a core from the start of the step until it issued the bucket."""
    forward_waited_ns: list[list[int]]
    """How long the rank waited for a core in the forward."""
    sizes: list[int]
    logged: list[tuple[int, int]]
    rounds: list[int]
    """The round of each step."""
    on_host: bool

    @classmethod
    def of(cls, blocks: Sequence[list[Block]]) -> Hooked:
        steps, forward, began, buckets, waited, logged = [], [], [], [], [], []
        rounds: list[int] = []
        for block in blocks:
            steps += [max(map(sum, each)) for each in beside(block, "hooked")]
            forward += [[parts[0] for parts in each] for each in beside(block, "hooked")]
            began += [list(each) for each in beside(block, "backward_began")]
            buckets += [list(each) for each in beside(block, "buckets")]
            waited += [list(each) for each in beside(block, "forward_waited")]
            rounds += [int(block[0]["round"])] * (len(steps) - len(rounds))
            logged += [(int(all_), int(beside)) for b in block for all_, beside in b["logged"]]
        first = blocks[0][0]
        return cls(
            steps,
            forward,
            began,
            buckets,
            waited,
            list(first["sizes"]),
            logged,
            rounds,
            bool(first["on_host"]),
        )

    def fields(self, step_ns: float) -> dict[str, Any]:
        """A `StepPoint`'s fields about buckets. `step_ns` is the time of a step without a hook."""
        fields: dict[str, Any] = {"hook_step_us": statistics.median(self.steps_ns) / 1e3}
        if self.logged:
            fields["logger_exposed_us"] = statistics.median(a - b for a, b in self.logged) / 1e3
        if not self._whole:
            return fields
        fields["arrivals"] = tuple(self._arrivals())
        own = [self._own(step) for step in self._indexes]
        fields["own_us"] = tuple(statistics.median(each) / 1e3 for each in zip(*own, strict=True))
        fields["straggler"] = straggler(own, self._own_forward(), self.rounds, step_ns)
        last = len(self.sizes) - 1
        fields["skew_us"] = tuple(
            (max(at) - min(at)) / 1e3 for at in (self._issued(s, last) for s in self._indexes)
        )
        if self.on_host:
            # The last rank to arrive waits for no other: its spans are pure communication.
            spans = [
                split_spans(max(ranks, key=lambda buckets: buckets[-1][1]))
                for ranks in self.buckets
            ]
            fields["hook_exposed_us"] = statistics.median(exposed for exposed, _ in spans) / 1e3
            fields["overlapped_us"] = statistics.median(beside for _, beside in spans) / 1e3
            fields["ready_us"] = tuple(self._ready())
        return fields

    @property
    def _whole(self) -> bool:
        """True when each step reduced the same number of buckets on every rank."""
        count = len(self.sizes)
        return count > 0 and all(len(buckets) == count for step in self.buckets for buckets in step)

    @property
    def _indexes(self) -> range:
        return range(len(self.buckets))

    def _issued(self, step: int, bucket: int) -> list[int]:
        """When each rank called all_reduce for a bucket."""
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

    def _own(self, step: int) -> list[int]:
        """By rank, what it did itself from the beginning of its step to its last all_reduce.

        From its own beginning, since all_reduce does not end at the same time on all ranks, and
        without the time in which it waited for a core: a rank is responsible for neither.
        """
        return [
            forward + buckets[-1][1] - began - buckets[-1][3]
            for forward, began, buckets in zip(
                self.forward_ns[step], self.began_ns[step], self.buckets[step], strict=True
            )
        ]

    def _own_forward(self) -> list[list[int]]:
        return [
            [time - waited for time, waited in zip(*ranks, strict=True)]
            for ranks in zip(self.forward_ns, self.forward_waited_ns, strict=True)
        ]


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
    """The spans in order, overlapping ones joined."""
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
    own_ns: Sequence[Sequence[int]],
    forward_ns: Sequence[Sequence[int]],
    rounds: Sequence[int],
    step_ns: float,
) -> Straggler | None:
    """The rank that the others wait for; None if there is none, or too little is known.

    The arguments are, by step: the time of each rank's own work until its last all_reduce, the
    forward's part of it, and the round. all_reduce makes whole steps equally long on all ranks, so
    only a rank's own work tells them apart. Time spent waiting for a core is left out: with more
    ranks than cores it is as long as the computation and hits a different rank each time. A rank is
    named if the 99.9 % interval of its excess over the others is above a fiftieth of the step, and
    if it is slower in every round: a disturbance of one second is not the rank's own.
    """
    if len(own_ns) < _MANY_STEPS or len(own_ns[0]) < 2:
        return None
    late_ranks = []
    for rank in range(len(own_ns[0])):
        margins = [_beyond_others(times, rank) for times in own_ns]
        late = statistics.median(margins)
        low = late - _half_interval(margins, own_ns, rounds)
        if low > _LATE_SHARE * step_ns and _in_every_round(margins, rounds):
            in_forward = statistics.median(_beyond_others(times, rank) for times in forward_ns)
            late_ranks.append(
                Straggler(
                    rank=rank,
                    late_us=late / 1e3,
                    low_us=low / 1e3,
                    where="forward" if in_forward > late / 2 else "backward",
                    share=sum(margin > 0 for margin in margins) / len(margins),
                )
            )
    return max(late_ranks, key=lambda late_rank: late_rank.late_us, default=None)


def _half_interval(
    margins: Sequence[float], own_ns: Sequence[Sequence[int]], rounds: Sequence[int]
) -> float:
    """Half of the 99.9 % interval of a median margin.

    The steps of a round have the same disturbances, so a round counts as one observation.
    """
    middle = statistics.median(margins)
    spread = _SPREAD * statistics.median(abs(margin - middle) for margin in margins)
    typical = statistics.median(statistics.median(times) for times in own_ns)
    noise = max(spread, _ROUND_NOISE * typical)
    return _NORMAL_999 * noise / math.sqrt(len(set(rounds)))


def _in_every_round(margins: Sequence[float], rounds: Sequence[int]) -> bool:
    by_round: dict[int, list[float]] = {}
    for margin, number in zip(margins, rounds, strict=True):
        by_round.setdefault(number, []).append(margin)
    return all(statistics.median(of_round) > 0 for of_round in by_round.values())


def _beyond_others(times_ns: Sequence[int], rank: int) -> float:
    """How much longer a rank took than the others, allowing for one of them being delayed."""
    return times_ns[rank] - statistics.median(t for r, t in enumerate(times_ns) if r != rank)
