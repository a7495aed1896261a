"""What a benchmark of training steps will run: blocks, batches, buckets, memory.

A *block* is some steps of one kind, back to back. The kinds are compared with each other, so each
round has all of them, in another order: then a short disturbance hits all kinds equally.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.bench.steps.results import DEFAULT_BUCKET
from ddp_notebook.model import format_bytes

_MOST_MB = 2**20
_LEAST_REDUCE_BYTES = 4096
_MOST_REDUCES = 16
"""The most all_reduces in flight: the time of more of a small size is extrapolated, and the rest of
the budget is for the steps."""


def parse_batches(text: str) -> tuple[int, ...]:
    """The batch sizes in a list ``8,16,32``, smallest first. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(
            f"{text!r} is not a list of batch sizes: samples per rank, each 1 or more, "
            "such as 8,16,32."
        )
    return tuple(sorted({int(word) for word in words}))


def parse_buckets(text: str) -> tuple[str, ...]:
    """The bucket sizes in a list ``1,5,25,default``, in its order. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or any(_megabytes(word) is None for word in words if word != DEFAULT_BUCKET):
        raise ValueError(
            f"{text!r} is not a list of bucket sizes: MiB, more than 0, or {DEFAULT_BUCKET}, "
            "such as 1,5,25,default."
        )
    return tuple(dict.fromkeys(words))


def _megabytes(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0 < value < _MOST_MB else None


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps of one kind.

    `kind` is ``plain`` (a DDP step, and the same under no_sync), ``hooked`` (a DDP step whose
    buckets are stamped), ``alone`` (rank 0 by itself) or ``reduce`` (all_reduces of `size_bytes`).
    """

    kind: str
    number: int
    """The number of the block, from 0, the same on all ranks."""
    round: int
    batch: int = 0
    bucket: str = ""
    size_bytes: int = 0


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
    batches: tuple[int, ...] = (8, 32, 128)
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
        for name in ("rounds", "min_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps is {self.max_steps}: it must be at least min_steps.")

    def bucket_mb(self, bucket: str) -> float | None:
        """The size of a bucket in MiB; None for DDP's default."""
        return None if bucket == DEFAULT_BUCKET else float(bucket)

    def schedule(
        self, batches: Sequence[int], reduce_sizes: Sequence[int], world_size: int
    ) -> tuple[Block, ...]:
        """All blocks in the order in which they run. `batches` are the possible batch sizes."""
        order = random.Random(self.seed)  # noqa: S311 - shuffles, keeps no secret
        kinds = [
            {"round": number, **block}
            for number in range(self.rounds)
            for block in self._round(order, batches, reduce_sizes, world_size, first=not number)
        ]
        return tuple(Block(number=number, **block) for number, block in enumerate(kinds))

    def _round(
        self,
        order: random.Random,
        batches: Sequence[int],
        reduce_sizes: Sequence[int],
        world_size: int,
        *,
        first: bool,
    ) -> Iterator[dict[str, Any]]:
        groups: list[list[dict[str, Any]]] = [
            # One DDP object per group of blocks: making one takes longer than a short step.
            [
                {"kind": kind, "batch": batch, "bucket": bucket}
                for batch in order.sample(batches, k=len(batches))
            ]
            for bucket in self.buckets
            for kind in (("plain", "hooked") if world_size > 1 else ("plain",))
        ]
        groups += [[{"kind": "alone", "batch": batch}] for batch in batches]
        groups += [[{"kind": "reduce", "size_bytes": size}] for size in reduce_sizes]
        shuffled = order.sample(groups, k=len(groups))
        if first:  # the most important results come first and survive an interrupt
            shuffled.sort(key=lambda group: group[0]["kind"] != "plain")
        for group in shuffled:
            yield from group

    def steps(self, each_ns: float, left_ns: float, blocks_left: int, kinds: int = 1) -> int:
        """How many steps of `each_ns` to time in a block of `kinds` kinds.

        `left_ns` of the budget are left for this and the other `blocks_left`.
        """
        share_ns = left_ns / max(blocks_left, 1) / kinds
        return max(self.min_steps, min(int(share_ns / max(each_ns, 1.0)) - 2, self.max_steps))


def reduce_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """Sizes in bytes in which to reduce all gradients, smallest first: from 1 K parameters up."""
    sizes = []
    size = _LEAST_REDUCE_BYTES
    while size < gradient_bytes * 0.7:
        sizes.append(size)
        size *= 4
    return (*sizes, gradient_bytes)


def reduces_at_once(size_bytes: int, gradient_bytes: int) -> int:
    """How many all_reduces of `size_bytes` are timed together."""
    return max(1, min(round(gradient_bytes / size_bytes), _MOST_REDUCES))


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
        """Bytes of a step with `batch` samples."""
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
