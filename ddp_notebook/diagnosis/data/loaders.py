"""Rules for loaders that give ranks the same batches, all or some, or one of them too often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.data.samplers import divided_among
from ddp_notebook.model import (
    Category,
    Finding,
    LoaderFacts,
    in_brackets,
    name_ranks,
)

_FEWEST, _FEWEST_EPOCHS = 2, 3
_PLAIN = ("SequentialSampler", "RandomSampler")


def same_batches(context: Context) -> Iterator[Finding]:
    """Without a sampler every rank has seen the same batches: equal hashes prove it."""
    for of in _loaders(context):
        inputs = {loader.inputs for loader in of.values()}
        seen = of[min(of)].inputs
        if len(inputs) == 1 and len(set(seen)) >= _FEWEST:  # one alone may be meant to be the same
            yield _same_batches(of, len(seen))


def shared_batches(context: Context) -> Iterator[Finding]:
    """Some batches of a stream come to several ranks: its parts overlap.

    Of a stream's first epoch alone, which draws nothing at random that is as long as a batch.
    """
    for of in _loaders(context):
        each = of[min(of)]
        twice = {
            (one, other): sum(hashed in of[other].inputs for hashed in of[one].inputs)
            for one, other in combinations(of, 2)
        }
        (ranks, most) = max(twice.items(), key=lambda item: item[1])
        distinct = all(len(set(e.inputs)) == len(e.inputs) for e in of.values())
        same = len({e.inputs for e in of.values()}) == 1
        if not each.stream or same or not distinct or most < _FEWEST:
            continue
        yield Finding(
            Category.SAMPLER_MISUSE,
            tuple(of),
            f"the ranks' parts of {each.stream}, an IterableDataset, overlap: some batches come to "
            f"several ranks, and others to none{in_brackets(each.place)}",
            f"Have {each.stream}.__iter__ begin at sample rank * num_workers + worker_id, and take "
            "every (world size * num_workers)-th: each worker of each rank then has others.",
            evidence=(
                f"{most} of the first {len(each.inputs)} inputs of rank {ranks[0]} came to rank "
                f"{ranks[1]} as well, byte for byte",
            ),
        )


def same_of_each_worker(context: Context) -> Iterator[Finding]:
    """Each worker of a loader reads all of a stream: its batches come as often as it has workers.

    The workers take turns: so many batches in a row are equal, and the next ones are others.
    """
    for of in _loaders(context):
        each = of[min(of)]
        workers = each.workers
        if workers < _FEWEST or len({loader.inputs for loader in of.values()}) == 1:
            continue
        turns = {rank: turns for rank, loader in of.items() if (turns := _turns(loader))}
        if len(turns) < len(of):
            continue
        rank, rounds = min(turns), turns[min(turns)]
        yield Finding(
            Category.SAMPLER_MISUSE,
            tuple(of),
            f"every batch comes {workers} times, for each of the {workers} workers of the "
            f"DataLoader reads all of the rank's part of {each.stream}, an IterableDataset"
            f"{in_brackets(each.place)}",
            f"Have {each.stream}.__iter__ ask torch.utils.data.get_worker_info(), and yield a part "
            "for each worker: every num_workers-th sample of the rank's, from the worker's id on.",
            evidence=(
                f"the first {rounds * workers} batches of rank {rank} are {rounds} different ones, "
                f"each {workers} times in a row, byte for byte",
            ),
        )


def same_every_epoch(context: Context) -> Iterator[Finding]:
    """A sampler or stream of the user's own has a set_epoch, and begins every epoch the same.

    At least three times: two passes may belong to one epoch.
    """
    for of in _loaders(context):
        stuck = tuple(rank for rank, loader in of.items() if _is_stuck(loader))
        if stuck:
            each = of[stuck[0]]
            yield Finding(
                Category.SAMPLER_MISUSE,
                stuck,
                f"{each.by_epoch} was iterated {len(each.firsts)} times and began with the same "
                "batch each time: its set_epoch was not called, or was called on another object"
                f"{in_brackets(each.place)}",
                f"Call set_epoch(epoch) of that {each.by_epoch} before each epoch's loop. One that "
                "is a loader's batch_sampler is loader.batch_sampler, not loader.sampler; workers "
                "that persist have copies of their own.",
                evidence=tuple(
                    f"rank {rank}: the first batch of {len(of[rank].firsts)} epochs is the same, "
                    f"byte for byte; of the first {len(of[rank].inputs)} batches "
                    f"{len(set(of[rank].inputs))} differ"
                    for rank in stuck
                ),
            )


def _is_stuck(loader: LoaderFacts) -> bool:
    once = len(set(loader.firsts)) == 1 and "" not in loader.firsts
    varies = len(set(loader.inputs)) >= _FEWEST
    return bool(loader.by_epoch) and len(loader.firsts) >= _FEWEST_EPOCHS and once and varies


def _turns(loader: LoaderFacts) -> int:
    """How often all workers have given the same, and then all another; 0 unless they always did.

    A batch that several forwards get counts once.
    """
    batches = dict(zip(reversed(loader.batches), reversed(loader.inputs), strict=True))
    hashes = [batches[number] for number in sorted(batches)]
    whole = len(hashes) - len(hashes) % loader.workers
    rounds = [set(hashes[i : i + loader.workers]) for i in range(0, whole, loader.workers)]
    alike = all(len(hashed) == 1 for hashed in rounds)
    changing = all(before != after for before, after in pairwise(rounds))
    return len(rounds) if alike and changing and len(rounds) >= _FEWEST else 0


def _loaders(context: Context) -> Iterator[dict[int, LoaderFacts]]:
    """The loaders that all ranks have whose data are to be divided, if all inputs are known."""
    facts, size = context.facts, divided_among(context)
    for key in dict.fromkeys(loader.key for one in facts.values() for loader in one.loaders):
        of = {
            rank: loader
            for rank in sorted(facts)
            for loader in facts[rank].loaders
            if loader.key == key
        }
        if len(of) == size > 1 and not any("" in loader.inputs for loader in of.values()):
            yield of


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
