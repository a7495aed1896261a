"""Benchmarks of training steps: what to run, what was measured, and how far to trust it.

A *block* is some steps of one kind, back to back. The kinds are compared with each other, so each
round has all of them, in another order: then a short disturbance hits all kinds equally.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from ddp_notebook.bench.result import Trust
from ddp_notebook.bench.trust import from_load, worst_first
from ddp_notebook.model import format_bytes

DEFAULT_BUCKET = "default"
"""DDP's own bucket sizes: first a bucket of 1 MiB, then of 25 MiB."""
PERFECT = 1.05
"""A higher efficiency is impossible: then the step of the single rank was disturbed."""


# -- what to run -------------------------------------------------------------------------


def parse_batches(text: str) -> tuple[int, ...]:
    """Return the batch sizes in a list ``8,16,32``, smallest first. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(
            f"{text!r} is not a list of batch sizes: samples per rank, each 1 or more, "
            "such as 8,16,32."
        )
    return tuple(sorted({int(word) for word in words}))


def parse_buckets(text: str) -> tuple[str, ...]:
    """Return the bucket sizes in a list ``1,5,25,default``, in its order. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    numbers = [word for word in words if word != DEFAULT_BUCKET]
    form = re.compile(r"[0-9]{1,6}(\.[0-9]*)?|\.[0-9]+")
    if not words or not all(form.fullmatch(word) and float(word) for word in numbers):
        raise ValueError(
            f"{text!r} is not a list of bucket sizes: MiB, more than 0, or {DEFAULT_BUCKET}, "
            "such as 1,5,25,default."
        )
    return tuple(dict.fromkeys(words))


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps of one kind.

    `kind` is ``plain`` (a DDP step, and the same under no_sync), ``hooked`` (a DDP step whose
    buckets are stamped) or ``alone`` (rank 0 by itself).
    """

    kind: str
    number: int
    """The number of the block, from 0, the same on all ranks."""
    round: int
    batch: int
    bucket: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One run. Every rank gets the same plan, and does the same in the same order."""

    model: str = "cnn"
    """A variable of the ranks (a module, a DDP module, a function that makes one), or the name
    of a model that ships."""
    loss: str = ""
    """A variable of the ranks: a function of output and target. Empty: a loss that needs none."""
    data: str = ""
    """A variable of the ranks with samples. Empty: random samples of the right shape."""
    batches: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Samples per rank, smallest first."""
    buckets: tuple[str, ...] = (DEFAULT_BUCKET,)
    budget_s: float = 30.0
    """How long the whole run should take, in seconds. At least one round is run."""
    rounds: int = 3
    min_steps: int = 4
    """Timed steps of each kind in a block, however short the budget."""
    max_steps: int = 40
    seed: int = 0
    """Decides the order, the same on all ranks."""

    def __post_init__(self) -> None:
        """Raises ValueError, with a message for the user, when this cannot be run."""
        if not self.batches or not self.buckets:
            raise ValueError("There must be a batch size and a bucket size.")
        if not 0 < self.budget_s < float("inf"):
            raise ValueError(f"The budget is {self.budget_s:g} s: it must be more than 0.")

    def bucket_mb(self, bucket: str) -> float | None:
        """Return the size of a bucket in MiB; None for DDP's default."""
        return None if bucket == DEFAULT_BUCKET else float(bucket)

    def schedule(self, world_size: int) -> tuple[Block, ...]:
        """Return all blocks in the order in which they run."""
        order = random.Random(self.seed)  # noqa: S311 - shuffles, keeps no secret
        blocks: list[Block] = []
        for number in range(self.rounds):
            # Each group has one DDP object: making one takes longer than a short step.
            groups = [
                [(kind, batch, bucket) for batch in order.sample(self.batches, k=len(self.batches))]
                for bucket in self.buckets
                for kind in (("plain", "hooked") if world_size > 1 else ("plain",))
            ]
            groups += [[("alone", batch, "")] for batch in self.batches]
            groups = order.sample(groups, k=len(groups))
            if not number:  # the most important results come first and survive an interrupt
                groups.sort(key=lambda group: group[0][0] != "plain")
            for kind, batch, bucket in chain.from_iterable(groups):
                blocks.append(Block(kind, len(blocks), number, batch, bucket))
        return tuple(blocks)

    def left_s(self, spent_s: float, done: float) -> float | None:
        """Return the seconds left: the rest of the budget, or less; None when that is spent.

        A small model has all its steps before the budget ends. `done` is more than 0.
        """
        left_s = min(self.budget_s - spent_s, spent_s * (1 - done) / done)
        return left_s if left_s > 0 else None

    def steps(self, each_ns: float, left_ns: float, blocks_left: int, kinds: int = 1) -> int:
        """Return how many steps of `each_ns` to time in a block of `kinds` kinds.

        `left_ns` of the budget are left for this and the other `blocks_left`.
        """
        share_ns = left_ns / max(blocks_left, 1) / kinds
        return max(self.min_steps, min(int(share_ns / max(each_ns, 1.0)) - 2, self.max_steps))


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a rank needs and may use, in bytes.

    `fixed_bytes` for any batch size: the copy of the model, its gradients, DDP's buckets.
    `sample_bytes` for each sample: its input and what the forward keeps for the backward.
    """

    available_bytes: int
    fixed_bytes: int
    sample_bytes: float

    def needs(self, batch: int) -> int:
        """Return the bytes of a step with `batch` samples."""
        return int(self.fixed_bytes + self.sample_bytes * batch)

    def refusal(self, batches: Sequence[int]) -> str:
        """Why the largest of `batches` does not fit, and which one would; empty if all fit."""
        batch = max(batches)
        if self.needs(batch) <= self.available_bytes:
            return ""
        room = self.available_bytes - self.fixed_bytes
        fits = int(room / self.sample_bytes) if self.sample_bytes else 0
        reason = (
            f"A batch of {batch:,} needs about {format_bytes(self.needs(batch))} on each rank, "
            f"and {format_bytes(self.available_bytes)} are free for one."
        )
        return f"{reason} A batch of {fits:,} fits." if fits > 0 else f"{reason} No batch fits."


# -- what was measured -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A DDP step at one batch size and one bucket size. Times are medians over steps, in us.

    The time of a step is that of its slowest rank. `local_us` is the same step under no_sync, and
    `forward_us`, `backward_us` and `optimizer_us` are its parts. `exposed_us` is the step minus the
    local step: what communication adds to it, with its 95 % interval. `overlapped_us` is
    communication during the backward, by a hook's timestamps; None without them. `alone_us` is
    the step of one rank while the others are idle.
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
        return self._share(self.exposed_us)

    @property
    def share_interval(self) -> tuple[float, float]:
        """The 95 % interval of that part, within 0 to 1."""
        low, high = self.exposed_interval_us
        return self._share(low), self._share(high)

    @property
    def unsure(self) -> bool:
        """Return whether the exposed communication may be none: its interval includes 0."""
        return self.exposed_interval_us[0] <= 0

    def _share(self, part_us: float) -> float:
        return min(1.0, max(0.0, part_us / self.step_us))


@dataclass(frozen=True, slots=True)
class StepBenchResult:
    """The measurements of `%ddp_bench --model`, by bucket size and then batch size.

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
    break_even: float | None = None
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
    def main_points(self) -> tuple[StepPoint, ...]:
        """The points of the bucket size to show where only one is shown, smallest batch first.

        It is the default, if that was measured.
        """
        if not self.points:
            return ()
        main = DEFAULT_BUCKET if DEFAULT_BUCKET in self.buckets else self.buckets[0]
        return tuple(point for point in self.points if point.bucket == main)


def named_batches(points: Iterable[StepPoint]) -> str:
    """Return the batch sizes of points: ``batch 8``, ``batches 8, 16 and 32``."""
    *most, last = (f"{batch:,}" for batch in sorted({point.batch for point in points}))
    return f"batches {', '.join(most)} and {last}" if most else f"batch {last}"


# -- from blocks to points ---------------------------------------------------------------

Record = Mapping[str, Any]
"""One rank's measurements of one block, as `rank.bench.steps` gives it."""


def summarise(
    about: StepBenchResult, per_rank: Sequence[Sequence[Record]], *, rounds: int
) -> StepBenchResult:
    """`about` with the points of the blocks that every rank has; there may be none.

    A block that one rank lacks, because it was stopped or died, is left out for all ranks.
    `rounds` are those of the plan: the budget may end before.
    """
    # The time of a step is that of its slowest rank, and without that rank's record it would be
    # too short.
    by_number = [{record["block"]: record for record in records} for records in per_rank]
    numbers = set.intersection(*map(set, by_number)) if by_number else set()
    kinds: dict[str, dict[Any, list[list[Record]]]] = {"plain": {}, "hooked": {}, "alone": {}}
    done: set[int] = set()
    for number in sorted(numbers):
        block = [records[number] for records in by_number]
        done.add(block[0]["round"])
        bucket = block[0].get("bucket", "")
        kinds[block[0]["kind"]].setdefault((bucket, block[0]["batch"]), []).append(block)

    def order(key: tuple[str, int]) -> tuple[float, int]:
        return math.inf if key[0] == DEFAULT_BUCKET else float(key[0]), key[1]

    points = tuple(
        _point(
            key,
            kinds["plain"][key],
            kinds["hooked"].get(key, ()),
            kinds["alone"].get(("", key[1]), ()),
        )
        for key in sorted(kinds["plain"], key=order)
    )
    result = replace(about, world_size=len(per_rank), points=points)
    notes = [*about.notes, *_notes(result)]
    if len(done) < rounds and not about.problem:
        notes.append(
            f"The budget was enough for {len(done)} of {rounds} rounds, so a short disturbance may "
            "have affected a single point. A larger --budget gives the others."
        )
    return replace(result, notes=tuple(notes), break_even=break_even(result.main_points))


def _point(
    key: tuple[str, int],
    plain: Sequence[Sequence[Record]],
    hooked: Sequence[Sequence[Record]],
    alone: Sequence[Sequence[Record]],
) -> StepPoint:
    import numpy as np  # late: it is loaded only where something was measured

    bucket, batch = key
    sync_ns = [sum(parts) for block in plain for parts in _slowest(block, "sync")]
    local = [parts for block in plain for parts in _slowest(block, "local")]
    local_ns = [sum(parts) for parts in local]
    # A model that calls collectives itself cannot step on one rank alone: then the step under
    # no_sync, which is computation without DDP's part, stands for it.
    alone_ns = [sum(parts) for block in alone for parts in block[0]["alone"]]
    # A rank that comes early to an all_reduce waits for the others: what is communication alone is
    # seen on the one that comes last, so on the one with the least.
    overlapped_ns = [min(step) for block in hooked for step in _beside(block, "overlapped")]
    step, still = statistics.median(sync_ns), statistics.median(local_ns)
    forward, backward, optimizer = middle_parts(local)
    # The interval of the difference of the medians, by bootstrap. The seed is of the data, so that
    # a run that is saved and read again has the same.
    draw = np.random.default_rng(len(sync_ns))
    medians = [np.median(draw.choice(t, (400, len(t))), axis=1) for t in (sync_ns, local_ns)]
    low, high = np.quantile(medians[0] - medians[1], (0.025, 0.975)) / 1e3
    return StepPoint(
        batch=batch,
        bucket=bucket,
        steps=len(sync_ns),
        step_us=step / 1e3,
        local_us=still / 1e3,
        forward_us=forward / 1e3,
        backward_us=backward / 1e3,
        optimizer_us=optimizer / 1e3,
        exposed_us=(step - still) / 1e3,
        exposed_interval_us=(float(low), float(high)),
        alone_us=(statistics.median(alone_ns) if alone_ns else still) / 1e3,
        world_size=len(plain[0]),
        overlapped_us=statistics.median(overlapped_ns) / 1e3 if overlapped_ns else None,
        times_us=tuple(time / 1e3 for time in sync_ns),
    )


def _beside(block: Sequence[Record], name: str) -> Iterator[tuple[Any, ...]]:
    """Return the measurements by step, and of each step by rank."""
    return zip(*(rank[name] for rank in block), strict=True)


def _slowest(block: Sequence[Record], kind: str) -> list[Sequence[int]]:
    """Return the parts of each step on its slowest rank."""
    return [max(step, key=sum) for step in _beside(block, kind)]


def middle_parts(steps: Sequence[Sequence[int]]) -> list[float]:
    """Return the parts of a typical step: their means over the middle fifth of the steps.

    Medians of the parts do not add up to the median of the whole; the sum of these means is close.
    """
    # Whole steps are chosen, by their sums, so that the parts of one step stay together.
    ordered = sorted(steps, key=sum)
    outside = 2 * len(ordered) // 5
    middle = ordered[outside : len(ordered) - outside]
    return [statistics.fmean(parts) for parts in zip(*middle, strict=True)]


def break_even(points: Sequence[StepPoint]) -> float | None:
    """The batch size from which all ranks together are faster than one rank; None if at none.

    0 if they are at every batch size. Between two batch sizes it is interpolated linearly over the
    logarithm of the batch size.
    """
    gains = [(p.batch, p.efficiency * p.world_size - 1) for p in points]
    if not gains or points[0].world_size < 2 or gains[-1][1] < 0:
        return None
    # From the largest batch down: by noise the gain may cross 0 more than once, and from the last
    # crossing on all ranks stay ahead.
    for (low, below), (high, above) in reversed(list(pairwise(gains))):
        if below < 0:
            part = below / (below - above)
            return float(low * (high / low) ** part)
    return 0.0 if gains[0][1] >= 0 else None


def _notes(result: StepBenchResult) -> Iterator[str]:
    """Yield what the reader should know about the numbers."""
    ranks, cores, threads = result.world_size, result.cores, result.threads
    if ranks == 1:
        yield "One rank sends nothing: there is no communication to measure."
        return
    if result.device == "cpu" and cores < ranks * threads:
        yield (
            f"{ranks} ranks of {threads} threads share {cores} cores: they take turns, while "
            "a single rank has all the cores. Efficiency here shows how crowded the machine is, "
            "not how DDP scales."
        )
    elif result.device == "cpu" and cores < ranks * (threads + 1):
        yield (
            f"{ranks} ranks compute on all {cores} cores, so none is free for communication: "
            "overlapping it slows the backward down and hides little."
        )


# -- how far to trust it -----------------------------------------------------------------


def judge(result: StepBenchResult) -> tuple[Trust, tuple[str, ...]]:
    """Return the badge, and every reason why it is not better, worst first."""
    judged = [*from_load(result.world_size, result.cores, result.others_cpu)]
    points = result.points
    impossible = [p for p in points if p.world_size > 1 and p.efficiency > PERFECT]
    if impossible:
        reason = (
            f"at {named_batches(impossible)} a step of one rank alone took longer than "
            "one of all ranks, which is impossible: something else slowed it down, so no "
            "efficiency is given"
        )
        judged.append((Trust.NOISY, reason))
    few = [p for p in points if len(p.times_us) < 8]
    if few:
        reason = (
            f"at {named_batches(few)} fewer than 8 steps were timed before "
            "the budget ended. A larger --budget helps"
        )
        judged.append((Trust.FAIR, reason))
    spread = _spread([p for p in points if p not in few])
    if spread > 0.15:
        reason = (
            f"equal steps take unequally long: half of them are further than ±{spread:.0%} from "
            "their median"
        )
        judged.append((Trust.NOISY if spread > 0.3 else Trust.FAIR, reason))
    return worst_first(judged)


def _spread(points: Sequence[StepPoint]) -> float:
    """Half of the range of the middle half of the steps, as a share of their median."""
    quarters = [statistics.quantiles(p.times_us, n=4) for p in points]
    spreads = [(high - low) / 2 / middle for low, middle, high in quarters if middle > 0]
    return statistics.median(spreads) if spreads else 0.0
