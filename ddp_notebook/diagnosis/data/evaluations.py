"""Rules about evaluations: other statistics, results never joined or joined wrongly, padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.data.reported import is_reported
from ddp_notebook.diagnosis.source_code.divisions import is_divisor
from ddp_notebook.diagnosis.source_code.means import (
    averages_every_row,
    curved_mean,
    is_mean_of_ratios,
    is_over_parts,
)
from ddp_notebook.diagnosis.training.by_hand import models_without_ddp, trained_together
from ddp_notebook.diagnosis.training.replicas import Model, evaluated_models
from ddp_notebook.model import (
    Category,
    Collective,
    CopyFacts,
    EvaluationFacts,
    Finding,
    Part,
    Ranks,
    RunFacts,
    at_place,
    counted,
    in_brackets,
    name_ranks,
)

_UNEVEN = 1.25
"""One rank has so many times as many samples as another one."""
_FEWEST_BACKWARDS, _FEWEST_USES, _FEWEST_SAME = 2, 2, 2
_ALIKE = 1e-4
"""Of the size of the values: a smaller difference is rounding."""
_SILENT = ("barrier", "monitored_barrier")
_OF_SHARDS = ("all_gather_into_tensor", "reduce_scatter_tensor")

_Of = Mapping[int, EvaluationFacts]


def other_statistics(context: Context) -> Iterator[Finding]:
    """Every rank evaluates, each with running statistics of its own batches."""
    together = trained_together(context)
    known = {model.first.key for model in together}
    for model in [*together, *(m for m in _averaged(context) if m.first.key not in known)]:
        if not model.whole or any(replica.broadcast_buffers for replica in model.of.values()):
            continue
        differing = [of for of in _together(model) if _evaluated_apart(of)]
        if not differing:
            continue
        first, with_ddp = differing[0], bool(model.first.parameters)
        why = "with broadcast_buffers=False" if with_ddp else "nothing sends buffers:"
        leave = "leave broadcast_buffers=True, " if with_ddp else ""
        yield Finding(
            Category.BUFFER_SYNC,
            tuple(model.of),
            f"{why} the running statistics of {model.title} are those of "
            f"each rank's own batches: every rank evaluates another model{_at(first)}",
            f"Use SyncBatchNorm, {leave}or all_reduce running_mean and "
            "running_var before each evaluation.",
            evidence=(
                f"running statistics differ between {name_ranks(model.of)} at the begin of "
                f"{counted(len(differing), 'evaluation')}",
            ),
        )


def unjoined_results(context: Context) -> Iterator[Finding]:
    """Ranks evaluate on parts, exchange nothing afterwards, and one alone says what came of it."""
    for model in trained_together(context):
        if not model.whole or not all(replica.steps for replica in model.of.values()):
            continue
        evaluations = _together(model)
        wrong = [
            of
            for of in evaluations
            if _of_parts(of) and len(_who_wrote(of)) == 1 and _is_reported(context, of)
        ]
        if not wrong or _exchanged(context, model, evaluations[0]):
            continue
        (rank,) = _who_wrote(wrong[0])
        yield Finding(
            Category.METRIC_MISAGGREGATION,
            tuple(model.of),
            f"every rank evaluates {model.title} on other samples, no result is exchanged, and "
            f"rank {rank} alone reports: its own part is taken for the whole{_at(wrong[0])}",
            "all_reduce what each rank has counted (right, and how many), and divide afterwards.",
            evidence=(
                f"the inputs of {counted(len(wrong), 'evaluation')} differ between "
                f"{name_ranks(model.of)}",
                f"only rank {rank} printed after them",
                "no collective of the user's after the first of them",
            ),
        )


def padded_counts(context: Context) -> Iterator[Finding]:
    """Samples that a DistributedSampler gives twice are counted twice in what ranks divide by.

    That they are counted is no mistake by itself: for the throughput, say, they are to be.
    """
    for model in _evaluated_together(context):
        padded = [(of, each) for of in _together(model) if (each := _padded(of)) is not None]
        if not padded or not model.whole:
            continue
        of, (length, got) = padded[0]
        if not any(_is_of_result(context, evaluation) for evaluation in of.values()):
            continue
        twice = got * len(of) - length
        yield Finding(
            Category.EVAL_PADDING,
            tuple(model.of),
            f"DistributedSampler gives every rank {got} samples, {got * len(of)} in all, of a data "
            f"set of {length}: {twice} of them are counted twice in the evaluation of "
            f"{model.title}{_at(of)}",
            "Leave the samples out that come twice before you count (those whose index is at or "
            "past len(dataset) in the order of the sampler), or split the data set without "
            "padding: Subset(dataset, range(rank, len(dataset), world_size)).",
            evidence=(
                f"each rank {_joins(of)} of {got}{_at_end(of)}, in {len(padded)} evaluations, and "
                "divides by what comes of it",
                f"{length} samples in the data set, {len(of)} ranks, drop_last=False",
            ),
        )


def unweighted_means(context: Context) -> Iterator[Finding]:
    """Each rank divides by what it has counted, and the mean of the ranks' results is taken.

    Ranks with fewer samples count as much as those with more.
    """
    for model in _evaluated_together(context):
        wrong = [
            of
            for of in _together(model)
            if _uneven(of)
            and any(_averaged_after(context, evaluation) for evaluation in of.values())
        ]
        if not wrong or not model.whole:
            continue
        counts = {rank: evaluation.samples for rank, evaluation in wrong[0].items()}
        yield Finding(
            Category.METRIC_MISAGGREGATION,
            tuple(model.of),
            f"each rank divides its result of {model.title} by the number of its own samples, and "
            f"the ranks' results are averaged, though they have {_range(counts)} samples: those "
            f"of the rank with fewer count more{_at(wrong[0])}",
            "all_reduce the sum and the number of samples, and divide after that.",
            evidence=tuple(f"rank {rank}: {n} samples" for rank, n in counts.items()),
        )


def means_of_scores(context: Context) -> Iterator[Finding]:
    """Each rank has a score of its own counts, such as F1, and the ranks' scores are averaged."""
    for model in _evaluated_together(context):
        wrong = [
            of
            for of in _together(model)
            if _have_other_inputs(of)
            and not _uneven(of)
            and any(_averaged_after(context, each, by_counts=True) for each in of.values())
        ]
        if not wrong or not model.whole:
            continue
        yield Finding(
            Category.METRIC_MISAGGREGATION,
            tuple(model.of),
            f"each rank divides by a sum of its own counts in the evaluation of {model.title}, and "
            "the ranks' results are averaged: that is not the score of all samples together"
            f"{_at(wrong[0])}",
            "all_reduce the counts (of true and false positives, of false negatives), and compute "
            "the score of their sums.",
            evidence=(
                f"the inputs of {counted(len(wrong), 'evaluation')} differ between "
                f"{name_ranks(model.of)}",
            ),
        )


def means_of_curved(context: Context) -> Iterator[Finding]:
    """The exp or the root of each rank's own mean is averaged: it is not that of the whole mean."""
    for model in (*_evaluated_together(context), *_trained_alike(context)):
        for of in _together(model):
            paths = (path for each in of.values() for path in each.summed)
            found = ((path, curved_mean(context.sources, path)) for path in paths)
            path, taken = next((each for each in found if each[1] is not None), ((), None))
            if taken is None or not model.whole or not _have_other_inputs(of):
                continue
            curved, mean = taken
            yield Finding(
                Category.METRIC_MISAGGREGATION,
                tuple(model.of),
                f"{curved} of each rank's own part is averaged over the ranks"
                f"{in_brackets(path[-1])}: that is not {curved} of all parts together",
                f"all_reduce the two sums in {mean}, divide one by the other, and take the "
                "function of that.",
                evidence=(
                    f"the inputs of {model.title} differ between {name_ranks(model.of)}{_at(of)}",
                    f"{mean} is of the rank's own sums; {curved} is summed up{at_place(path[-1])} "
                    "and divided by the number of ranks",
                ),
            )
            return


def lone_copies(context: Context) -> Iterator[Finding]:
    """All ranks use a copy of the model, such as an average, which some of them alone update."""
    if any(model.diverged or not model.whole for model in context.models.values()):
        return
    of = {rank: facts.copies for rank, facts in sorted(context.facts.items())}
    rows = list(zip(*of.values(), strict=False))
    if len({tuple(copy.type for copy in copies) for copies in of.values()}) == 1:
        for own in (dict(zip(of, row, strict=True)) for row in rows):
            yield from _updated_by_some(context, own)
            yield from _begun_apart(own)


def _begun_apart(own: Mapping[int, CopyFacts]) -> Iterator[Finding]:
    """The copies differ, less each time by one factor: averages that began with other values."""
    (first, mine), *others = own.items()
    if not _are_used_together(own):
        return
    apart = [(rank, _shrinking(mine, theirs)) for rank, theirs in others]
    if not apart or not all(factor for _, factor in apart):
        return
    at = in_brackets(mine.place)
    yield Finding(
        Category.REPLICA_DIVERGENCE,
        tuple(own),
        f"every rank uses a copy of the model, {mine.type}{at}, that began with values of its own, "
        "and averages the same weights into it: the copies are not the same, though the model is",
        "Copy the model after DistributedDataParallel has sent rank 0's values to all: "
        "copy.deepcopy(ddp.module), or seed every rank the same before the model is made.",
        evidence=tuple(
            f"rank {rank}: the difference from rank {first}'s copy is {factor:.3g} times what it "
            f"was, from {mine.values[0][0]} to {mine.values[-1][0]} backwards"
            for rank, factor in apart
        ),
    )


def _shrinking(one: CopyFacts, other: CopyFacts) -> float:
    """The factor by which all differences of two copies shrank; 0 unless it is one factor."""
    before, after = _differences(one, other, 0), _differences(one, other, -1)
    if len(one.values) < _FEWEST_USES or not before or len(after) != len(before):
        return 0.0
    largest = max(range(len(before)), key=lambda i: abs(before[i]))
    factor = after[largest] / before[largest] if before[largest] else 0.0
    size = max(map(abs, one.values[-1][1]), default=0.0)
    rounding = [abs(b - factor * a) for a, b in zip(before, after, strict=True)]
    clear = abs(after[largest]) > 10 * _ALIKE * size >= 10 * max(rounding)
    return factor if clear and 0 < factor < 1 - _ALIKE else 0.0


def _differences(one: CopyFacts, other: CopyFacts, at: int) -> list[float]:
    """Of the values of two copies at one of their uses."""
    return [a - b for a, b in zip(one.values[at][1], other.values[at][1], strict=False)]


def _updated_by_some(context: Context, own: Mapping[int, CopyFacts]) -> Iterator[Finding]:
    updated = {rank: _is_updated(context.facts[rank], copy) for rank, copy in own.items()}
    if set(updated.values()) == {True, False} and _are_used_together(own):
        moved = tuple(rank for rank, is_updated in updated.items() if is_updated)
        left = tuple(rank for rank in own if rank not in moved)
        yield _of_lone_copy(own[left[0]], moved, left)


def _of_lone_copy(copy: CopyFacts, moved: Ranks, left: Ranks) -> Finding:
    at = f" ({copy.place})" if copy.place is not None else ""
    return Finding(
        Category.REPLICA_DIVERGENCE,
        moved if len(moved) <= len(left) else left,
        f"every rank uses a copy of the model, {copy.type}{at}, and {name_ranks(moved)} alone "
        f"updated it: that of {name_ranks(left)} still has its first values",
        "Update the copy on every rank (the averaged weights are the same on all), or send it to "
        "the others before they use it: dist.broadcast(p.data, src) for each parameter.",
        evidence=(
            f"{name_ranks(left)}: its first values still, after {copy.values[-1][0]} backwards",
            f"{name_ranks(moved)}: other values by then; the model itself is the same on all ranks",
        ),
    )


def _is_updated(facts: RunFacts, copy: CopyFacts) -> bool | None:
    """Whether the copy's values have changed since they were copied; None if that is not known."""
    backwards, values = copy.values[-1]
    first = {replica.begins for replica in facts.replicas if replica.type == copy.type}
    begun, begins = copy.values[0]
    if backwards < _FEWEST_BACKWARDS or not values:
        return None
    if begun < backwards:
        return values != begins
    return values not in first if first and () not in first else None


def _are_used_together(own: Mapping[int, CopyFacts]) -> bool:
    moments = {tuple(backwards for backwards, _ in copy.values) for copy in own.values()}
    return len(moments) == 1


def _evaluated_together(context: Context) -> list[Model]:
    """The models that all ranks have, and trained as one or did not train."""
    return [*trained_together(context), *evaluated_models(context.facts)]


def _trained_alike(context: Context) -> Iterator[Model]:
    """The models that each rank trained for itself, to the same values: not a fold of its own."""
    for model in models_without_ddp(context):
        if model.first.matrices and len({each.matrices for each in model.of.values()}) == 1:
            yield model


def _averaged(context: Context) -> list[Model]:
    """The models without DDP that ranks give the same parameters before they evaluate them.

    Whether they average gradients, or parameters after some steps each. Only where all ranks sum
    up the results of their evaluations.
    """
    return [
        model
        for model in models_without_ddp(context)
        if sum(map(_have_same_weights, _together(model))) >= _FEWEST_SAME
    ]


def _have_same_weights(of: _Of) -> bool:
    weights = {evaluation.weights for evaluation in of.values()}
    return len(weights) == 1 and "" not in weights and all(each.summed for each in of.values())


def _averaged_after(context: Context, each: EvaluationFacts, *, by_counts: bool = False) -> bool:
    place, sources = each.place, context.sources
    return place is not None and any(
        is_mean_of_ratios(sources, path, place, by_counts=by_counts)
        for path in each.summed
        if by_counts or not is_over_parts(sources, (*path, place))
    )


def _range(counts: Mapping[int, int]) -> str:
    """The fewest and the most, in words: ``10 to 50``."""
    return f"{min(counts.values())} to {max(counts.values())}"


def _uneven(of: _Of) -> bool:
    counts = [evaluation.samples for evaluation in of.values()]
    return min(counts) > 0 and max(counts) >= _UNEVEN * min(counts)


def _padded(of: _Of) -> tuple[int, int] | None:
    """What all ranks have counted, if they share the whole data set and counted the same."""
    counted = {evaluation.padded for evaluation in of.values()}
    first = next(iter(counted))
    shared = first is not None and first[1] == -(-first[0] // len(of))
    return first if shared and len(counted) == 1 else None


def _is_of_result(context: Context, each: EvaluationFacts) -> bool:
    """True when what counts such samples twice goes into a quotient, or a mean."""
    sources = context.sources
    return is_divisor(sources, each.counted) or (
        not each.counted and averages_every_row(sources, each.gathered)
    )


def _joins(of: _Of) -> str:
    counts = any(evaluation.counted for evaluation in of.values())
    return "sums a count with all_reduce," if counts else "gathers a row for each sample,"


def _at_end(of: _Of) -> str:
    paths = (evaluation.counted or evaluation.gathered for evaluation in of.values())
    return at_place(next((path[-1] for path in paths if path), None))


def _together(model: Model) -> list[dict[int, EvaluationFacts]]:
    """The evaluations that all ranks made after as many backwards; none unless all made as many."""
    of = {rank: replica.evaluations for rank, replica in model.of.items()}
    if len(of) < 2 or len({len(each) for each in of.values()}) != 1:
        return []
    rows = [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=True)]
    return [row for row in rows if len({each.backwards for each in row.values()}) == 1]


def _evaluated_apart(of: _Of) -> bool:
    hashes = {evaluation.statistics for evaluation in of.values()}
    trained = all(evaluation.backwards and not evaluation.training for evaluation in of.values())
    return trained and "" not in hashes and len(hashes) > 1


def _of_parts(of: _Of) -> bool:
    """Each rank evaluated on data of its own."""
    meant = all(evaluation.loader or not evaluation.training for evaluation in of.values())
    return meant and _have_other_inputs(of)


def _have_other_inputs(of: _Of) -> bool:
    inputs = [evaluation.inputs for evaluation in of.values()]
    known = all(each and "" not in each for each in inputs)
    return known and len(set(inputs)) == len(inputs)


def _who_wrote(of: _Of) -> list[int]:
    """The ranks that printed something; none unless that is known of all."""
    if any(evaluation.wrote is None for evaluation in of.values()):
        return []
    return [rank for rank, evaluation in of.items() if evaluation.wrote]


def _is_reported(context: Context, of: _Of) -> bool:
    """True when the code prints a number that this evaluation came to."""
    place = next(
        (evaluation.place for evaluation in of.values() if evaluation.place is not None), None
    )
    tree = context.sources.tree(place) if place is not None else None
    return tree is not None and place is not None and is_reported(tree, place.line)


def _exchanged(context: Context, model: Model, first: _Of) -> bool:
    """True when results may have been joined: by anything but DDP and barriers, or unknown."""
    since = min(evaluation.backwards for evaluation in first.values())
    collectives = context.collectives
    if any(collectives.first.get(rank, 0) for rank in model.of):
        return True
    return any(
        record.part is None and record.operation not in _SILENT and record.backwards >= since
        for rank in model.of
        for record in _without_shards(context, rank)
    )


def _without_shards(context: Context, rank: int) -> Iterator[Collective]:
    """A rank's collectives, without FSDP2's, whose sizes are those of a backward's as well."""
    records, ranks = context.collectives.of.get(rank, ()), context.facts[rank].split.data_ranks
    sizes = {r.numel for r in records if ranks and r.part is Part.BACKWARD}
    sizes |= {numel // len(ranks) for numel in sizes}
    yield from (r for r in records if r.operation not in _OF_SHARDS or r.numel not in sizes)


def _at(of: _Of) -> str:
    place = next(
        (evaluation.place for evaluation in of.values() if evaluation.place is not None), None
    )
    return in_brackets(place)
