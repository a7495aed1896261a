"""Rules for models that are split over ranks, and end well: what must be the same on those ranks.

Ranks that hold parts of one model compute with each other's parts. So they must get the same
samples, have the same of what is not split, and come to the same loss.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.diagnosis.training.replicas import differ, some
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    Part,
    Place,
    Ranks,
    RunFacts,
    agree,
    in_brackets,
    name_ranks,
)
from ddp_notebook.model.parallel.split import Copy, Input

_FEWEST_INPUTS, _FEWEST_LOSSES = 2, 3
_APART = 1e-5
"""Losses that differ by less, of their size, are the same: rounding makes some millionths."""
_ELSEWISE = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single", "send", "recv"),
    }
)
"""With these ranks share a batch, a sequence or experts: each may have a loss of its own."""
_EXCHANGES = ("all_to_all", "scatter")
"""What experts need; gloo scatters in place of an all-to-all with gradients."""
_SUMS = ("all_reduce", "all_reduce_coalesced", "reduce")

_Facts = Mapping[int, RunFacts]


# -- inputs ------------------------------------------------------------------------------


def other_inputs(context: Context) -> Iterator[Finding]:
    """Ranks that hold parts of one model train it on other samples each."""
    for ranks in _claimed(context.facts):
        of = {rank: context.facts[rank] for rank in ranks}
        inputs = _unlike_inputs(of)
        if inputs and _untrue(of, ranks):
            yield _fed_apart(of, inputs, "DTensor was told that a tensor is the same there")
    for ranks in summed(context):
        of = {rank: context.facts[rank] for rank in ranks}
        inputs = _unlike_inputs(of)
        if inputs and _parted_at(of) is not None:
            yield _fed_apart(of, inputs, "they add up their parts of layers")


def _fed_apart(of: _Facts, inputs: Mapping[int, Hashable], why: str) -> Finding:
    place = next((e.place for facts in of.values() for e in facts.split.forwards if e.place), None)
    at = in_brackets(place)
    return Finding(
        Category.REPLICA_INPUT_MISMATCH,
        outvoted(inputs),
        "ranks that hold parts of one model get other samples each: what they compute together "
        f"belongs to no sample{at}",
        "Feed every rank of a tensor-parallel group the same samples: "
        "DistributedSampler(data, num_replicas=<size of dp>, rank=<the rank's place in dp>), and "
        "the same seed, in place of those of the global rank.",
        evidence=(
            f"{name_ranks(of)}: {why}, and the model's inputs differ in "
            f"{_count(of)} of the first training steps",
        ),
    )


def _count(of: _Facts) -> int:
    return sum(1 for _ in _steps_with_other_inputs(of))


def _unlike_inputs(of: _Facts) -> dict[int, Hashable]:
    """The inputs by rank, if they differ in all steps that can be compared."""
    found = list(_steps_with_other_inputs(of))
    if len(found) < _FEWEST_INPUTS:
        return {}
    return {rank: tuple(step[rank] for step in found) for rank in of}


def _steps_with_other_inputs(of: _Facts) -> Iterator[dict[int, tuple[str, ...]]]:
    """The steps in which not all got the same; with as many inputs on each, all of them read."""
    for step in sorted({e.backwards for e in _inputs_of(next(iter(of.values())))}):
        got = {
            rank: tuple(e.hash for e in _inputs_of(facts) if e.backwards == step)
            for rank, facts in of.items()
        }
        counts = {len(each) for each in got.values()}
        known = all("" not in each for each in got.values())
        if len(counts) == 1 and known and len(set(got.values())) > 1:
            yield got


def _inputs_of(facts: RunFacts) -> tuple[Input, ...]:
    return facts.split.forwards[0].inputs if facts.split.forwards else ()


def _claimed(facts: _Facts) -> list[Ranks]:
    """The groups of ranks, all known, on which DTensor was told that a tensor is the same."""
    found = {claim.ranks for run in facts.values() for claim in run.split.claims}
    return sorted(ranks for ranks in found if set(ranks) <= set(facts))


def _untrue(of: _Facts, ranks: Ranks) -> bool:
    """True when a tensor that was said to be the same on these ranks is not."""
    steps = {e.backwards for facts in of.values() for e in facts.split.claims}
    return any(_is_untrue(of, ranks, step) for step in steps)


def _is_untrue(of: _Facts, ranks: Ranks, step: int) -> bool:
    rows = [
        [e for e in facts.split.claims if e.backwards == step and e.ranks == ranks]
        for facts in of.values()
    ]
    if len({len(row) for row in rows}) != 1:
        return False
    return any(
        len({e.place for e in claims}) == 1
        and any(differ(claims[0].tensor, e.tensor) for e in claims[1:])
        for claims in zip(*rows, strict=True)
    )


# -- what all have -----------------------------------------------------------------------


def summed_shards(context: Context) -> Iterator[Finding]:
    """Gradients of a sharded parameter were added up over ranks that have other parts of it."""
    of = {rank: run.split.shard_sums for rank, run in sorted(context.facts.items())}
    ranks = tuple(rank for rank, sums in of.items() if sums)
    if not ranks:
        return
    first = of[ranks[0]][0]
    over = f" along {first.dimension!r}" if first.dimension else ""
    yield Finding(
        Category.MESH_MISMATCH,
        ranks,
        f"all_reduce adds up gradients of ranks that hold other parts of {first.name}, which is "
        f"sharded{over}: each part gets the gradients of other parts"
        f"{f' ({first.place})' if first.place else ''}",
        "Reduce gradients over the data-parallel dimension, whose ranks have the same part: "
        'group=mesh.get_group("dp").',
        evidence=by_ranks(
            {
                rank: f"all_reduce over {name_ranks(of[rank][0].ranks)} of the gradients of "
                f"{some(tuple(dict.fromkeys(e.name for e in of[rank])))}"
                for rank in ranks
            }
        ),
    )


def beside_shards(context: Context) -> Iterator[Finding]:
    """FSDP2 shards a model and leaves some parameters out, whose gradients nothing averages.

    What began with other values on each rank may be meant to be its own.
    """
    for ranks, copies in _apart_by_ranks(context, of_data=True).items():
        names = tuple(name for name, of in copies.items() if not _differ(of, "begin"))
        if names:
            first = copies[names[0]]
            yield Finding(
                Category.PARAMS_OUTSIDE_DDP,
                ranks,
                f"{some(names)} of a model that fully_shard shards {agree(names, 'is', 'are')} in "
                "none of its units (ignored_params, or added later): no gradient of "
                f"{agree(names, 'it', 'them')} is averaged, and every rank has its own values by "
                "now",
                "Let fully_shard have every trained parameter, or all_reduce the gradients of the "
                "others yourself before optimizer.step(): dist.all_reduce(p.grad); p.grad /= "
                "world_size.",
                evidence=(
                    f"the same on {name_ranks(ranks)} before the first step",
                    *(
                        f"rank {rank}: {names[0]} has norm {copy.end.norm} later"
                        for rank, copy in first.items()
                    ),
                ),
            )


def unlike_copies(context: Context) -> Iterator[Finding]:
    """A parameter that is not split differs between the ranks that all have it."""
    for ranks, copies in _apart_by_ranks(context).items():
        yield _unlike(ranks, copies)


def _apart_by_ranks(
    context: Context, *, of_data: bool = False
) -> dict[Ranks, dict[str, dict[int, Copy]]]:
    """What differs and is not split, by the ranks that have it, by name and by rank.

    On ranks that share the data by FSDP2 if `of_data`, otherwise on others.
    """
    by_row: dict[tuple[Ranks, str], dict[int, Copy]] = {}
    for rank, facts in sorted(context.facts.items()):
        for copy in facts.split.copies:
            by_row.setdefault((copy.ranks, copy.name), {})[rank] = copy
    wrong: dict[Ranks, dict[str, dict[int, Copy]]] = {}
    for (ranks, name), of in by_row.items():
        if (ranks in {context.facts[rank].split.data_ranks for rank in of}) is not of_data:
            continue
        if set(of) == set(ranks) and _differ(of, "end") and _may_be_alike(context, of):
            wrong.setdefault(ranks, {})[name] = of
    return wrong


def _may_be_alike(context: Context, of: Mapping[int, Copy]) -> bool:
    """False where only the plan says so, and ranks may have experts of their own."""
    declared = all(copy.declared for copy in of.values())
    return declared or not any(
        record.operation.startswith(_EXCHANGES)
        for records in context.collectives.of.values()
        for record in records
    )


def _differ(of: Mapping[int, Copy], when: str) -> bool:
    first, *others = (getattr(copy, when) for copy in of.values())
    return any(differ(first, other) for other in others)


def _unlike(ranks: Ranks, copies: Mapping[str, Mapping[int, Copy]]) -> Finding:
    names = tuple(copies)
    from_begin = [name for name, of in copies.items() if _differ(of, "begin")]
    first, one = copies[(from_begin or names)[0]], len(names) == 1
    along = first[ranks[0]].dimension
    over = f"the ranks of {along!r}" if along else "ranks that hold parts of one model"
    values = {rank: (e.end.hash, e.end.norm, e.end.sample) for rank, e in first.items()}
    if from_begin:
        why = f"{some(from_begin)} of each rank began with values of its own"
        remedy = (
            "Make the model from the same seed on every rank (torch.manual_seed(seed)), or "
            "broadcast what is not sharded from one rank, before the first step."
        )
    else:
        why = "they began with the same values, and got different gradients on each rank"
        remedy = (
            "Give these ranks the same samples and the same random numbers, and sum the gradients "
            "of what each computes on a part of (all_reduce over this dimension)."
        )
    return Finding(
        Category.REPLICA_DIVERGENCE,
        outvoted(values),
        f"{some(names)} must be the same on {over}, which all have {'it' if one else 'them'}, but "
        f"{'differs' if one else 'differ'}: {why}",
        remedy,
        evidence=(
            f"not the same on {name_ranks(ranks)}: {some(names)}",
            *(
                f"rank {rank}: {names[0]} has norm {copy.begin.norm} at first, {copy.end.norm} "
                "later"
                for rank, copy in copies[names[0]].items()
            ),
        ),
    )


def other_draws(context: Context) -> Iterator[Finding]:
    """Ranks with parts of one model drop other values of what all of them have, and drift apart.

    What is split may be dropped otherwise on each rank: then nothing drifts.
    """
    for ranks, copies in _apart_by_ranks(context).items():
        of = {rank: context.facts[rank] for rank in ranks}
        began = not any(_differ(copy, "begin") for copy in copies.values())
        if not began or not _same_inputs(of) or not _drops_otherwise(of):
            continue
        place = next(e.place for facts in of.values() for e in facts.split.forwards)
        yield Finding(
            Category.RNG_MISMATCH,
            ranks,
            "ranks that hold parts of one model get the same samples, and their dropout draws "
            f"other random numbers on each{in_brackets(place)}: what they compute together is of "
            "no one model, and what all of them have drifts apart",
            "Give ranks of one tensor-parallel group one seed where a layer works on what all of "
            "them have: torch.manual_seed(seed + <the rank's place in dp>), the same within tp.",
            evidence=(
                f"torch's generator was not the same on {name_ranks(ranks)} before the first "
                f"{len(_inputs_of(of[ranks[0]]))} training forwards",
                "the model's inputs were the same there, and it has dropout",
            ),
        )


def _drops_otherwise(of: _Facts) -> bool:
    """True where all have dropout, and another state of random numbers before each forward."""
    drops = all(facts.split.forwards and facts.split.forwards[0].drops for facts in of.values())
    return drops and _other_numbers(_states(of))


def _draws_otherwise(of: _Facts) -> bool:
    """True where training draws random numbers, other ones on each rank."""
    states = _states(of)
    return _other_numbers(states) and all(len(set(row)) > 1 for row in states)


def _states(of: _Facts) -> list[list[str]]:
    return [[e.random for e in _inputs_of(facts)] for facts in of.values()]


def _other_numbers(states: list[list[str]]) -> bool:
    return all("" not in row and len(set(row)) > 1 for row in zip(*states, strict=True))


# -- split by hand -----------------------------------------------------------------------


def parted_losses(context: Context) -> Iterator[Finding]:
    """Ranks that add up their parts of a model by hand get the same samples, and other losses."""
    for ranks in summed(context):
        of = {rank: context.facts[rank] for rank in ranks}
        step = _parted_at(of)
        if step is None or not _same_inputs(of):
            continue
        sums = [partial_sum for facts in of.values() for partial_sum in facts.split.sums]
        forward = next((e.place for e in sums if not e.backward), None)
        backward = next((e.place for e in sums if e.backward), None)
        yield _parted(of, step, (forward, backward))


def _parted(of: _Facts, step: int, places: tuple[Place | None, Place | None]) -> Finding:
    first = f"the same at first, other ones from step {step + 1} on" if step else "from step 1 on"
    sums = zip(("forward", "backward"), places, strict=True)
    why = _why_parted(step, *places)
    if not step and places[0] is not None and _draws_otherwise(of):
        why += ", or random numbers (dropout) for what all have are not the same"
    return Finding(
        Category.REPLICA_DIVERGENCE,
        tuple(of),
        "ranks that hold parts of one model get the same samples and come to other losses "
        f"({first}): {why}",
        "Each layer that is split needs two sums over its group: of the outputs in forward, of the "
        "gradients of its input in backward. What is not split must begin with the same values on "
        "every rank.",
        evidence=(
            *(
                f"rank {rank}: losses {', '.join(f'{e:.6g}' for e in facts.split.losses[:4])}"
                for rank, facts in of.items()
            ),
            *(f"sums in {what} at {place}" for what, place in sums if place is not None),
        ),
    )


def _why_parted(step: int, forward: Place | None, backward: Place | None) -> str:
    if step:
        what = "what all ranks have gets the gradient of one rank's part"
        return what if backward else f"no backward adds up the gradients of their parts, so {what}"
    if forward is None:
        return "no forward adds up their parts"
    return "an output is not added up, or a parameter that all have began with other values"


def _same_inputs(of: _Facts) -> bool:
    got = {tuple((e.backwards, e.hash) for e in _inputs_of(facts)) for facts in of.values()}
    inputs = next(iter(got))
    return len(got) == 1 and len(inputs) >= _FEWEST_INPUTS and all(hash for _, hash in inputs)


def _parted_at(of: _Facts) -> int | None:
    """The first step in which the losses of these ranks differ; None if none does."""
    rows = [facts.split.losses for facts in of.values()]
    if len({len(row) for row in rows}) != 1 or len(rows[0]) < _FEWEST_LOSSES:
        return None
    for step, losses in enumerate(zip(*rows, strict=True)):
        if max(losses) - min(losses) > _APART * max(map(abs, losses)):
            return step
    return None


def summed(context: Context) -> list[Ranks]:
    """Groups over which a function of the user's sums partial results, and nothing else."""
    facts = context.facts
    found = {partial_sum.ranks for one in facts.values() for partial_sum in one.split.sums}
    return sorted(
        ranks
        for ranks in found
        if len(ranks) > 1
        and set(ranks) <= set(facts)
        and all(any(e.ranks == ranks for e in facts[rank].split.sums) for rank in ranks)
        and not _shares_batches(context, ranks)
    )


def _shares_batches(context: Context, ranks: Ranks) -> bool:
    """True where these ranks also average gradients, or have parts of a batch or a sequence."""
    collectives = context.collectives
    optimizers = [optimizer for rank in ranks for optimizer in context.facts[rank].optimizers]
    sizes = {
        numel for optimizer in optimizers for numel in (*optimizer.numels, sum(optimizer.numels))
    }
    return any(
        collectives.groups.get(record.group, ranks) == ranks and _is_of_batch(record, sizes)
        for rank in ranks
        for record in collectives.of.get(rank, ())
    )


def _is_of_batch(record: Collective, sizes: Container[int]) -> bool:
    """True of a collective by which ranks with samples of their own know of each other."""
    if record.part is not None:
        return record.part is Part.BACKWARD
    averages = record.operation in _SUMS and (record.numel in sizes or record.tensors > 1)
    in_function = bool(record.path) and record.path[-1].function in ("forward", "backward")
    return record.operation in _ELSEWISE or (averages and record.numel > 1 and not in_function)
