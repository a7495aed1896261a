"""The rule for loaders that give every rank the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.data.samplers import divided_among
from ddp_notebook.model import (
    Category,
    Finding,
    LoaderFacts,
    in_brackets,
    name_ranks,
)

_PLAIN = ("SequentialSampler", "RandomSampler")


def same_batches(context: Context) -> Iterator[Finding]:
    """Without a sampler every rank has seen the same batches: equal hashes prove it."""
    facts, size = context.facts, divided_among(context)
    for key in dict.fromkeys(loader.key for one in facts.values() for loader in one.loaders):
        of: dict[int, LoaderFacts] = {
            rank: loader
            for rank in sorted(facts)
            for loader in facts[rank].loaders
            if loader.key == key
        }
        inputs = {loader.inputs for loader in of.values()}
        if len(of) < 2 or len(of) != size or len(inputs) != 1:
            continue
        seen = inputs.pop()
        if "" in seen or len(set(seen)) < 2:  # one batch alone may be meant to be the same
            continue
        yield _same_batches(of, len(seen))


def _same_batches(of: Mapping[int, LoaderFacts], count: int) -> Finding:
    each = of[min(of)]
    why, remedy = (
        f"the DataLoader has a {each.sampler} and no DistributedSampler",
        "Give the DataLoader sampler=DistributedSampler(dataset), and no shuffle=.",
    )
    if each.sampler not in _PLAIN:
        why, remedy = (
            f"the DataLoader's {each.sampler} draws the same samples on each of them",
            "Have it draw others on each rank: seed its generator with seed + rank, or let it take "
            "every world-size-th of its samples, from dist.get_rank() on.",
        )
    if each.stream:
        why, remedy = (
            f"{each.stream}, an IterableDataset, is not divided among the ranks",
            f"Have {each.stream}.__iter__ yield a part for each rank: every world-size-th sample, "
            "from dist.get_rank() on (and of these a part for each worker).",
        )
    length = (f"the data set has {each.length} samples",) if each.length else ()
    return Finding(
        Category.SAMPLER_MISUSE,
        tuple(of),
        f"every rank trains on the same batches: {why}{in_brackets(each.place)}",
        remedy,
        evidence=(
            f"the first {count} inputs are the same, byte for byte, on {name_ranks(of)}",
            *length,
        ),
    )
