"""The rule for gradients that are averaged by hand over ranks which hold other parts of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.training.replicas import some
from ddp_notebook.diagnosis.training.rules import optimizers
from ddp_notebook.model import (
    Category,
    Finding,
    GradientSample,
    OptimizerFacts,
    Place,
    Ranks,
    in_brackets,
    name_ranks,
)

_FEWEST_STEPS = 2
_FEWEST_VALUES = 4
_ROUNDING, _UNLIKE = 1e-4, 1e-2
"""Of the size of the values: a smaller difference is rounding, a larger one is not."""

_Of = Mapping[int, OptimizerFacts]
_Rows = Sequence[Sequence[float]]


def averaged_parts(context: Context) -> Iterator[Finding]:
    """Ranks whose functions sum up their parts of a layer average the gradients of these parts."""
    wrong: dict[Ranks, list[str]] = {}
    for of in optimizers(context.facts).values():
        for ranks in _layers(context):
            if set(ranks) <= set(of) and (names := _mixed({rank: of[rank] for rank in ranks})):
                wrong.setdefault(ranks, names)
    if not wrong:
        return
    ranks = next(iter(wrong))
    yield Finding(
        Category.MESH_MISMATCH,
        tuple(sorted(rank for each in wrong for rank in each)),
        f"the gradients of {some(wrong[ranks])} are averaged over {name_ranks(ranks)}, which hold "
        f"other parts of one layer{in_brackets(_layers(context)[ranks])}: each part is trained by "
        "the gradients of other parts",
        "Average over the data-parallel dimension, whose ranks have the same part and other data: "
        'group=mesh.get_group("dp").',
        evidence=tuple(
            f"{name_ranks(each)}: the same input in every step, other values of {some(names)}, and "
            "one gradient, the mean or the sum of theirs"
            for each, names in wrong.items()
        ),
    )


def _layers(context: Context) -> dict[Ranks, Place | None]:
    """Groups with the same inputs, over which a function of the user's sums partial results."""
    found: dict[Ranks, Place | None] = {}
    for facts in context.facts.values():
        for each in facts.split.sums:
            members = [context.facts.get(rank) for rank in each.ranks]
            split = [one.split for one in members if one is not None]
            inputs = {
                tuple((one.backwards, one.hash) for f in e.forwards for one in f.inputs)
                for e in split
            }
            known = len(inputs) == 1 and all(hash for _, hash in next(iter(inputs)))
            together = len(split) == len(each.ranks) > 1
            agreed = all(any(own.ranks == each.ranks for own in e.sums) for e in split)
            if known and together and agreed and len(next(iter(inputs))) >= _FEWEST_STEPS:
                found.setdefault(each.ranks, each.place)
    return found


def _mixed(of: _Of) -> list[str]:
    """The parameters with other values on each rank that all step with one mean or sum."""
    if len({(each.sampled, len(each.samples)) for each in of.values()}) != 1:
        return []
    first = next(iter(of.values()))
    steps = list(zip(*(each.samples for each in of.values()), strict=True))
    return [
        name
        for at, name in enumerate(first.sampled)
        if len(steps) >= _FEWEST_STEPS and all(_is_mixed(step, at) for step in steps)
    ]


def _is_mixed(samples: Sequence[GradientSample], at: int) -> bool:
    rows = [(each.own, each.used, each.weights) for each in samples]
    if any(len(each) <= at for row in rows for each in row):
        return False
    own, used, weights = ([row[which][at] for row in rows] for which in range(3))
    lengths = {len(values) for row in (own, used, weights) for values in row}
    if len(lengths) != 1 or min(lengths) < _FEWEST_VALUES:
        return False
    total = [math.fsum(values) for values in zip(*own, strict=True)]
    mean = [value / len(own) for value in total]
    joined = any(
        all(_distance(each, whole) <= _ROUNDING for each in used) for whole in (total, mean)
    )
    return joined and _are_unlike(own) and _are_unlike(weights)


def _are_unlike(rows: _Rows) -> bool:
    return all(_distance(rows[0], row) > _UNLIKE for row in rows[1:])


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Between two rows of values, as a part of their size."""
    size = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / size if size else 0.0
