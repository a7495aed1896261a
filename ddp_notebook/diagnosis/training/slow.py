"""Slow ranks: those that take longer than the others in one part of their steps.

A reduction of gradients makes whole steps equally long on all ranks, so only what a rank does
itself tells, without its waiting in collectives and without its waiting for a core: where ranks
are more than cores that is as much as the computation, and falls now on one, now on another.
A disturbance for a while is not a rank's doing: it must be late all the time, in one part.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import Remark, StepPart, StepTimes, by_value, in_brackets, name_ranks

KIND = "slow-rank"
FEWEST_STEPS = 24
"""With fewer steps no rank is called slow: three times last may be chance."""
_LEAST_SHARE, _LEAST_US = 0.06, 500.0
"""The share of a rank's own work in a step, and the time, below which no rank is called
slow: one rank may print a line."""
_FEW_BLOCKS, _LOWEST_BLOCKS = 5, 3
_CORE = "core"
_PARTS: tuple[str, ...] = (*StepPart, _CORE)
_SURE = 4.0
"""Standard errors."""


def slow_ranks(times: Mapping[int, StepTimes]) -> tuple[Remark, ...]:
    """A finding for ranks that are slow; none if no rank is, or too little is known."""
    # Ranks of one host alone: a machine that is slower on the whole is no rank's doing, and clocks
    # and cores of two hosts cannot be compared.
    together = by_value({rank: (of.host, of.key) for rank, of in times.items() if of.key})
    remarks = []
    for ranks, _ in together:
        steps = _side_by_side({rank: times[rank] for rank in ranks})
        if steps is None:
            continue
        for rank in steps.ranks:
            late = [found for part in _PARTS if (found := _late(steps, rank, part)) is not None]
            if late:
                worst = max(late, key=lambda each: each.late_us * each.share)
                remarks.append(_remark(worst, steps, times[rank]))
    return tuple(remarks)


@dataclass(frozen=True)
class _Steps:
    """The same steps of ranks that train together; each list has a value for each step."""

    ranks: tuple[int, ...]
    bound: tuple[int, ...]
    """The ranks that may use other cores than the others."""
    step_us: float
    own_us: float
    """A rank's own work in a step; with more ranks than cores, only a part of it."""
    more_waiting: Mapping[int, Sequence[float]]
    """For how much longer than the others a rank waited in collectives."""
    parts: Mapping[str, Mapping[int, Sequence[float]]]
    """By part of the step, how much longer each rank took than the others, in us."""

    def awaited(self, rank: int) -> list[float]:
        """By step, for how long the others waited that this rank did not wait, in us."""
        return [-each for each in self.more_waiting[rank]]


@dataclass(frozen=True)
class _Late:
    """A rank is late by so much, in one part of so many of its steps."""

    rank: int
    part: str
    late_us: float
    share: float


def _side_by_side(times: Mapping[int, StepTimes]) -> _Steps | None:
    """The steps that all ranks have, without the first ones; None for too few, or for one rank."""
    numbers = set.intersection(*({row.number for row in of.rows} for of in times.values()))
    newest = max(FEWEST_STEPS, 60_000 // len(times))
    # Without the first three steps: memory is new, and DDP makes its buckets again.
    common = [number for number in sorted(numbers) if number >= 3][-newest:]
    if len(times) < 2 or len(common) < FEWEST_STEPS:
        return None
    by_number = {rank: {row.number: row for row in of.rows} for rank, of in times.items()}
    rows = {rank: [of[number] for number in common] for rank, of in by_number.items()}
    # Who may use other cores than most; all where each has its own.
    cores = Counter(of.cores for of in times.values())
    usual, alone = cores.most_common(1)[0][0], len(cores) == len(times)
    bound = tuple(rank for rank, of in times.items() if of.cores != usual or alone)
    everyone = [row for of_rank in rows.values() for row in of_rank]
    own = {rank: [(*row.own_us, row.queued_us) for row in of] for rank, of in rows.items()}
    return _Steps(
        tuple(rows),
        bound,
        statistics.median(row.whole_us for row in everyone),
        statistics.median(sum(row.own_us) for row in everyone),
        _beyond_others({rank: [row.waited_us for row in of] for rank, of in rows.items()}),
        {
            part: _beyond_others({rank: [row[at] for row in of] for rank, of in own.items()})
            for at, part in enumerate(_PARTS)
        },
    )


def _beyond_others(values: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """By how much each rank's value is above the median of the others', step by step."""
    beyond: dict[int, list[float]] = {rank: [] for rank in values}
    # Against the others' median and not their mean: with four ranks one that is late as well would
    # hide the first. Sorted once for each step, as a thousand ranks would each sort it again.
    half, odd = divmod(len(values) - 1, 2)
    middle = (half,) if odd else (half - 1, half)
    for step in zip(*values.values(), strict=True):
        in_order = sorted(step)
        for rank, value in zip(values, step, strict=True):
            own = bisect_left(in_order, value)
            others = [in_order[place + (place >= own)] for place in middle]
            beyond[rank].append(value - sum(others) / len(others))
    return beyond


def _late(steps: _Steps, rank: int, part: str) -> _Late | None:
    """Is a rank late in a part, all the time or in some steps?"""
    if part == _CORE and rank not in steps.bound:
        return None  # the scheduler moves it to another core: what it lacks now, others lack then
    margins = steps.parts[part][rank]
    of_us = steps.step_us if part == _CORE else steps.own_us
    floor_us = max(_LEAST_SHARE * of_us, _LEAST_US)
    late = _always(margins, floor_us)
    if late is None and part != _CORE:
        others = [steps.parts[part][other] for other in steps.ranks if other != rank]
        in_order = sorted(margins)
        usual_us = in_order[len(margins) * 4 // 10] - in_order[len(margins) // 10]
        # A late step is late by at least this: 2 ms, and a tenth of a whole step.
        some_us = max(2000.0, 0.1 * steps.step_us, _SURE * usual_us)
        late = _at_times(margins, others, some_us)
    if late is None or not _in_all(steps, rank, part, *late):
        return None
    return _Late(rank, part, *late)


def _always(margins: Sequence[float], floor_us: float) -> tuple[float, float] | None:
    """How late a rank is in nearly every block of steps, and in how many; None where it is not."""
    middle = statistics.median(margins)
    if middle < floor_us:
        return None
    # By blocks, because what disturbs a step disturbs the next ones too: a hundred late steps in a
    # row are one event and no hundred. The spread is that of the blocks' medians.
    # The steps are divided into 12 blocks; a rank must be late in 90 % of them.
    medians = [statistics.median(block) for block in _blocks(margins, 12)]
    center = statistics.median(medians)
    # 1.4826: a normal distribution's standard deviation over its median absolute deviation.
    spread = 1.4826 * statistics.median(abs(median - center) for median in medians)
    low_us = middle - _SURE * spread / math.sqrt(len(medians))
    held = sum(median > floor_us / 2 for median in medians)
    if low_us <= floor_us / 2 or held < 0.9 * len(medians):
        return None
    return middle, sum(margin > floor_us / 2 for margin in margins) / len(margins)


def _at_times(
    margins: Sequence[float], others: Sequence[Sequence[float]], late_us: float
) -> tuple[float, float] | None:
    """How late a rank is in some of its steps, more often than any other; and in how many.

    It must be so too without the blocks in which it is late most often: something may have held
    it up there for a while.
    """
    # A rank that reads a file in each fourth step is late in a quarter of them, and its median says
    # nothing. Chance makes others late too: this one must be so three times as often as any.
    share = _late_steps(margins, late_us) / len(margins)
    # A rank that is late in fewer than 12 % of its steps is not called slow.
    if share < 0.12:  # so with nearly all of a thousand ranks, and what follows is dear
        return None
    blocks = [_late_steps(block, late_us) for block in _blocks(margins, _FEW_BLOCKS)]
    lowest = sorted(range(len(blocks)), key=blocks.__getitem__)[:_LOWEST_BLOCKS]
    count = sum(blocks[at] for at in lowest)
    size = len(margins) * len(lowest) / len(blocks)
    of_others = max(
        sum(_late_steps(of_other[at], late_us) for at in lowest)
        for of_other in (_blocks(other, _FEW_BLOCKS) for other in others)
    )
    chance = max(of_others, 1)
    least = max(size * share / 2, 3 * of_others, chance + _SURE * math.sqrt(chance))
    if count < least:
        return None
    return statistics.median(margin for margin in margins if margin > late_us), share


def _late_steps(margins: Sequence[float], late_us: float) -> int:
    return sum(margin > late_us for margin in margins)


def _in_all(steps: _Steps, rank: int, part: str, late_us: float, share: float) -> bool:
    """Return whether what a rank takes longer in one part it takes longer in all.

    One that waits in a part where waiting looks like work waits less in another.
    """
    # Waiting for a lock, or for a device, looks like work to the marks: then less is waited for in
    # the collective that follows, and the sum over all parts is that of the others.
    own = [steps.parts[each][rank] for each in (*StepPart, *([_CORE] if part == _CORE else []))]
    total = [sum(step) for step in zip(*own, strict=True)]
    if part == _CORE and statistics.median(steps.awaited(rank)) < late_us / 2:
        return False
    return _late_steps(total, late_us / 2) > len(total) * share / 2


def _blocks(values: Sequence[float], most: int) -> list[Sequence[float]]:
    """The values in blocks that follow each other: what disturbs a step disturbs the next."""
    count = min(most, len(values) // 6)
    return [values[len(values) * b // count : len(values) * (b + 1) // count] for b in range(count)]


# -- words ---------------------------------------------------------------------------------


def _remark(late: _Late, steps: _Steps, times: StepTimes) -> Remark:
    awaited = steps.awaited(late.rank)
    waits = [each for each in awaited if each > late.late_us / 4]
    text = catalogue.words(
        "remarks.slow-rank.text",
        ranks=(late.rank,),
        late=_ms(late.late_us),
        step=_ms(steps.step_us).replace(" ", "-"),
        where=_where(late.part, times),
        share=f"{late.share:.0%}" if late.share < _ALL else "",
        waited=f"{len(waits) / len(awaited):.0%}" if waits else "",
        count=len(awaited),
        wait=_ms(statistics.median(waits)) if waits else "",
    )
    evidence = []
    for part in _PARTS:
        more_us = statistics.median(steps.parts[part][late.rank])
        if abs(more_us) >= _LEAST_US / 5 or part == late.part:
            sign = "longer" if more_us >= 0 else "shorter"
            evidence.append(
                f"{_NAMES[part]}: {_ms(abs(more_us))} {sign} than on the other ranks (median)"
            )
    evidence.append(f"{len(awaited)} steps of {name_ranks(steps.ranks)} were compared")
    return Remark(KIND, (late.rank,), text, tuple(evidence))


def _where(part: str, times: StepTimes) -> str:
    """Return what a rank does in a part of a step, and on which line."""
    if part == _CORE:
        cores = ", ".join(map(str, times.cores))
        return f"while other processes use its cores ({cores})"
    first = _BEGINS.get(StepPart(part), StepPart(part))
    return f"{_NAMES[part]}{in_brackets(times.places.get(first))}"


_ALL = 0.95
"""A rank that is slow in so many of its steps is slow in each."""
_NAMES = {
    StepPart.DATA: "in its DataLoader",
    StepPart.LOOP: "in your code after the optimizer's step",
    StepPart.FORWARD: "in the forward",
    StepPart.LOSS: "in your code after the forward",
    StepPart.BACKWARD: "in the backward",
    StepPart.AFTER: "in your code after the backward",
    StepPart.OPTIMIZER: "in the optimizer's step",
    _CORE: "ready to run, without a core",
}
_BEGINS = {
    StepPart.LOOP: StepPart.OPTIMIZER,
    StepPart.LOSS: StepPart.FORWARD,
    StepPart.AFTER: StepPart.BACKWARD,
}
"""The part after whose line a stretch of the user's code begins."""


def _ms(time_us: float) -> str:
    digits = 0 if time_us >= 10_000 else 1 if time_us >= 1000 else 2
    return f"{time_us / 1000:.{digits}f} ms"
