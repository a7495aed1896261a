"""Whether one rank got the same samples as all ranks together, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddp_notebook.model.against.trail import TrainingStep

_NEAR = 1e-5
"""Relative tolerance between samples: a model's input may be another model's output."""


def other_samples(ranks: Sequence[TrainingStep], one: TrainingStep) -> str:
    """Why the samples of one rank are not those of `ranks` together; "" if they are.

    Their order does not matter, their multiplicity does.
    """
    together = sorted(sample for step in ranks for sample in step.samples)
    alone = sorted(one.samples)
    common = _common(together, alone)
    if common == len(together) == len(alone):
        return ""
    why = (
        f"the model got {len(together)} samples on {len(ranks)} ranks together and {len(alone)} "
        f"on one rank, and {common} of them are the same"
    )
    repeated = sum(1 for count in Counter(together).values() if count > 1)
    if repeated:
        why += f" ({repeated} came more than once on the {len(ranks)} ranks)"
    return why


def _common(some: Sequence[float], others: Sequence[float]) -> int:
    """How many values of two sorted lists are equal up to rounding."""
    near = _NEAR * max((abs(value) for value in (*some, *others)), default=0.0)
    a = b = common = 0
    while a < len(some) and b < len(others):
        apart = some[a] - others[b]
        same = abs(apart) <= near
        common += same
        a += same or apart < 0
        b += same or not apart < 0
    return common


def alike_on_all(ranks: Sequence[TrainingStep]) -> bool:
    """True when each rank got the samples that the first one got."""
    first = Counter(ranks[0].samples)
    return all(Counter(step.samples) == first for step in ranks[1:])


def uneven(ranks: Sequence[TrainingStep]) -> str:
    """The number of samples of each rank, if these differ; "" if they do not."""
    counts = [len(step.samples) for step in ranks]
    if len(set(counts)) < 2:
        return ""
    return ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
