"""Rules about DistributedSampler: wrong shards, other orders, seeds or epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import outvoted
from ddp_notebook.diagnosis.source_code.shares import divided_before
from ddp_notebook.diagnosis.source_code.singled_out import strayed
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.diagnosis.training.by_hand import trained_together
from ddp_notebook.model import (
    Category,
    Finding,
    SamplerFacts,
    in_brackets,
)

_Samplers = Mapping[int, SamplerFacts]


def sampler_misuse(context: Context) -> Iterator[Finding]:
    """The first mistake of each sampler; later ones may follow from it."""
    facts = context.facts
    size = divided_among(context)
    for key in dict.fromkeys(sampler.key for one in facts.values() for sampler in one.samplers):
        of = {
            rank: sampler
            for rank in sorted(facts)
            for sampler in facts[rank].samplers
            if sampler.key == key
        }
        rules = (
            _wrong_shards(of, size),
            _parts_of_parts(context.sources, of, size),
            _other_orders(of, size),
            _other_seeds(context.sources, of),
            _same_epoch(of),
        )
        yield from [finding for rule in rules for finding in rule][:1]


def divided_among(context: Context) -> int:
    """The number of ranks among which the data are to be divided; 0 if unknown."""
    facts = context.facts
    sizes = {
        replica.group_size for model in trained_together(context) for replica in model.of.values()
    }
    sizes = sizes or {len(one.split.data_ranks) for one in facts.values()}
    return sizes.pop() if len(sizes) == 1 else 0


def _wrong_shards(of: _Samplers, size: int) -> Iterator[Finding]:
    if not size or size != len(of):
        return
    wrong = tuple(rank for rank, sampler in of.items() if sampler.num_replicas != size)
    if wrong:
        each = of[wrong[0]]
        yield Finding(
            Category.SAMPLER_MISUSE,
            wrong,
            f"its DistributedSampler divides the data by num_replicas={each.num_replicas}, "
            f"and {size} ranks train{in_brackets(each.place)}",
            f"Leave num_replicas and rank out, or give num_replicas={size}.",
            evidence=_lines(of, lambda e: f"num_replicas={e.num_replicas}, rank={e.rank}"),
        )
        return
    shards = {rank: sampler.rank for rank, sampler in of.items()}
    if len(set(shards.values())) < len(shards):
        own = {rank: place for place, rank in enumerate(sorted(of))}
        same = tuple(rank for rank in of if shards[rank] != own[rank])
        yield Finding(
            Category.SAMPLER_MISUSE,
            same,
            "its DistributedSampler takes the shard of another rank: both train on the same "
            f"samples, and others are never seen{in_brackets(of[same[0]].place)}",
            "Leave rank= out of DistributedSampler, or give dist.get_rank().",
            evidence=_lines(of, lambda e: f"shard {e.rank} of {e.num_replicas}"),
        )


def _parts_of_parts(sources: Sources, of: _Samplers, size: int) -> Iterator[Finding]:
    """Each rank's data set is a part already, and its sampler takes a part of that."""
    places = {sampler.place.file for sampler in of.values() if sampler.place is not None}
    divided = {(e.num_replicas, e.length) for e in of.values()}
    if size < 2 or len(of) != size or len(divided) != 1 or (each := divided.pop())[0] != size:
        return
    part = divided_before(sources, places)
    if part:
        length = each[1]
        yield Finding(
            Category.SAMPLER_MISUSE,
            tuple(of),
            f"the data are divided twice: each rank's data set is a part already ({part}), and "
            f"DistributedSampler gives it one of {size} parts of that: an epoch has about 1 in "
            f"{size} of the samples{in_brackets(of[min(of)].place)}",
            "Divide once: give DistributedSampler the whole data set, or leave the sampler out and "
            "shuffle the rank's own part.",
            evidence=(
                f"on every rank the sampler divides a data set of {length}: {length // size} "
                "samples for each rank",
            ),
        )


def _other_orders(of: _Samplers, size: int) -> Iterator[Finding]:
    """The data sets have the same data in another order, or are another part of the same data."""
    data = {sampler.data for sampler in of.values()}
    orders = {rank: sampler.order for rank, sampler in of.items()}
    divided = {sampler.num_replicas for sampler in of.values()} == {size} == {max(2, len(of))}
    if not divided or len(data) > 1 or "" in {*data, *orders.values()}:
        return
    first = orders[min(orders)]
    if any(_is_other_order(first, order) for order in orders.values()):
        ranks = outvoted(orders)
        each = of[ranks[0]]
        yield Finding(
            Category.SAMPLER_MISUSE,
            ranks,
            "its data set has the same data as the others' in another order, or another part of "
            "them: DistributedSampler takes each rank's samples from another list, so ranks train "
            f"on the same samples, and others are never seen{in_brackets(each.place)}",
            "Shuffle and split on every rank with the same seed: random_split(..., "
            "generator=torch.Generator().manual_seed(seed)), a random.Random(seed) of its own, "
            "sorted() of a list of files.",
            evidence=_lines(of, lambda e: f"order {e.order} of {e.length} samples"),
        )


def _is_other_order(one: str, other: str) -> bool:
    """True where all lists of a data set are in another order, or another part is taken of them.

    A list of which that alone is so may be drawn at random on purpose, beside the data.
    """
    (mine, *part), (theirs, *other_part) = one.split("|"), other.split("|")
    lists = list(zip(mine.split(), theirs.split(), strict=False))
    return part != other_part or all(a != b for a, b in lists)


def _other_seeds(sources: Sources, of: _Samplers) -> Iterator[Finding]:
    if len(of) < 2 or not all(sampler.shuffle for sampler in of.values()):
        return
    seeds = {rank: sampler.seed for rank, sampler in of.items()}
    if len(set(seeds.values())) > 1:
        counted = len({seed - rank for rank, seed in seeds.items()}) == 1
        ranks = tuple(sorted(of)) if counted else strayed(sources, seeds, ("seed",))
        yield Finding(
            Category.SAMPLER_MISUSE,
            ranks,
            "its DistributedSampler has another seed than the others': the ranks' shards are of "
            f"other orders, and overlap{in_brackets(of[ranks[0]].place)}",
            "Give DistributedSampler the same seed= on every rank.",
            evidence=_lines(of, lambda e: f"seed={e.seed}"),
        )


def _same_epoch(of: _Samplers) -> Iterator[Finding]:
    shuffled = {
        rank: sampler for rank, sampler in of.items() if sampler.shuffle and len(sampler.epochs) > 1
    }
    stuck = tuple(rank for rank, sampler in shuffled.items() if len(set(sampler.epochs)) == 1)
    if stuck:
        each = shuffled[stuck[0]]
        times, never = len(each.epochs), not any(shuffled[rank].epochs_set for rank in stuck)
        why = "set_epoch is never called" if never else f"every epoch is epoch {each.epochs[0]}"
        yield Finding(
            Category.SAMPLER_MISUSE,
            stuck,
            f"DistributedSampler was iterated {times} times in the same order: {why}"
            f"{in_brackets(each.place)}",
            "Call sampler.set_epoch(epoch) before each epoch's loop.",
            evidence=_lines(shuffled, lambda e: f"epochs {', '.join(map(str, e.epochs[:8]))}"),
        )
        return
    epochs = {rank: sampler.epochs for rank, sampler in shuffled.items()}
    if len({len(epoch) for epoch in epochs.values()}) == 1 and len(set(epochs.values())) > 1:
        ranks = outvoted(epochs)
        yield Finding(
            Category.SAMPLER_MISUSE,
            ranks,
            "set_epoch is given other numbers than on the other ranks: their shards are of other "
            f"orders, and overlap{in_brackets(of[ranks[0]].place)}",
            "Call sampler.set_epoch(epoch) with the same epoch on every rank.",
            evidence=_lines(shuffled, lambda e: f"epochs {', '.join(map(str, e.epochs[:8]))}"),
        )


def _lines(of: _Samplers, text: Callable[[SamplerFacts], str]) -> tuple[str, ...]:
    return tuple(f"rank {rank}: {text(sampler)}" for rank, sampler in of.items())
