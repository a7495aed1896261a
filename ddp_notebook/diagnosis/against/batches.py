"""Whether one rank got the same samples as all ranks together, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddp_notebook.model.against.trail import TrainingStep


def other_samples(ranks: Sequence[TrainingStep], one: TrainingStep) -> str:
    """Why the samples of one rank are not those of `ranks` together; "" where they are.

    They may come in any order; how often each came counts.
    """
    together = Counter(sample for step in ranks for sample in step.samples)
    alone = Counter(one.samples)
    if together == alone:
        return ""
    common, all_of_them = (together & alone).total(), together.total()
    why = (
        f"the model got {all_of_them} samples on {len(ranks)} ranks together and {alone.total()} "
        f"on one rank, and {common} of them are the same"
    )
    if len(together) < all_of_them:
        repeated = sum(1 for count in together.values() if count > 1)
        why += f" ({repeated} came more than once on the {len(ranks)} ranks)"
    return why


def alike_on_all(ranks: Sequence[TrainingStep]) -> bool:
    """True when each rank got the samples that the first one got."""
    first = Counter(ranks[0].samples)
    return all(Counter(step.samples) == first for step in ranks[1:])


def uneven(ranks: Sequence[TrainingStep]) -> str:
    """How many samples each rank had, where these numbers differ; "" where they do not."""
    counts = [len(step.samples) for step in ranks]
    if len(set(counts)) < 2:
        return ""
    return ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
