"""Rules for parts of a layer that ranks have by hand: their gradients mixed, or all the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.least_squares import distance
from ddp_notebook.diagnosis.training.replicas import differing, some
from ddp_notebook.diagnosis.training.rules import optimizers
from ddp_notebook.model import (
    Category,
    Finding,
    GradientSample,
    OptimizerFacts,
    PartialSum,
    Place,
    Ranks,
    RunFacts,
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
    found = {layer: names for layer in _layers(context) if (names := layer.names(_Step.is_mixed))}
    if not found:
        return
    first, names = next(iter(found.items()))
    yield Finding(
        Category.MESH_MISMATCH,
        tuple(sorted(rank for layer in found for rank in layer.ranks)),
        f"the gradients of {some(names)} are averaged over {name_ranks(first.ranks)}, which hold "
        f"other parts of one layer{in_brackets(first.place)}: each part is trained by the "
        "gradients of other parts",
        "Average over the data-parallel dimension, whose ranks have the same part and other data: "
        'group=mesh.get_group("dp").',
        evidence=tuple(
            f"{name_ranks(layer.ranks)}: the same input in every step, other values of "
            f"{some(names)}, and one gradient, the mean or the sum of theirs"
            for layer, names in found.items()
        ),
    )


def equal_parts(context: Context) -> Iterator[Finding]:
    """Ranks sum up their parts of a layer, and all have the same parts: drawn by one seed.

    No optimizer of theirs has other parts: these could be what they sum up.
    """
    layers = _layers(context)
    unlike = {layer.ranks for layer in layers if not layer.has_equal_parts}
    wrong = {layer.ranks: layer for layer in layers if layer.ranks not in unlike}
    if not wrong:
        return
    first = next(iter(wrong.values()))
    ranks = tuple(sorted(rank for each in wrong for rank in each))
    yield Finding(
        Category.RNG_MISMATCH,
        ranks,
        f"{name_ranks(first.ranks)} add up what each computes with its part of a layer"
        f"{in_brackets(first.place)}, and all have the same part: they train one part "
        f"{len(first.ranks)} times, not {len(first.ranks)} parts",
        "Draw the parts by another seed on each of these ranks, and what all of them have by one "
        "seed; or draw the whole weight by one seed, and take each rank's slice of it.",
        evidence=(
            f"all parameters began with the same values on {name_ranks(first.ranks)}",
            "they get the same inputs, and the gradients of "
            f"{some(next(iter(first.of.values())).sampled)} are the same before anything is "
            "exchanged",
        ),
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    """An optimizer of ranks that get the same inputs and sum up what each has of a layer."""

    ranks: Ranks
    place: Place | None
    of: _Of

    @property
    def has_equal_parts(self) -> bool:
        """True where nothing is a part: all began with the same values and get one gradient."""
        begins = {rank: optimizer.begins for rank, optimizer in self.of.items()}
        drawn = any(len(set(digest.sample)) > 2 for digest in next(iter(begins.values())))
        sampled = next(iter(self.of.values())).sampled
        same = sampled and self.names(_Step.is_the_same) == list(sampled)
        return bool(same and drawn and not differing(begins))

    def names(self, is_so: Callable[[_Step], bool]) -> list[str]:
        """The parameters of which something is so in all steps that were seen."""
        steps = list(zip(*(each.samples for each in self.of.values()), strict=False))
        if len({each.sampled for each in self.of.values()}) != 1 or len(steps) < _FEWEST_STEPS:
            return []
        sampled = next(iter(self.of.values())).sampled
        return [
            name
            for at, name in enumerate(sampled)
            if all(is_so(_Step(samples, at)) for samples in steps)
        ]


@dataclass(frozen=True)
class _Step:
    """One step of one parameter, on all ranks."""

    samples: Sequence[GradientSample]
    at: int

    def rows(self, which: str) -> _Rows:
        """Values of `own`, `used` or `weights` on each rank; too few count as none."""
        rows: list[_Rows] = [getattr(each, which) for each in self.samples]
        found = [row[self.at] if self.at < len(row) else () for row in rows]
        same = len({len(values) for values in found}) == 1
        return found if same and len(found[0]) >= _FEWEST_VALUES else []

    def is_the_same(self) -> bool:
        """The rank's own gradients of it are, up to rounding, those of the other ranks."""
        own = [each.own[self.at] for each in self.samples if self.at < len(each.own)]
        return len(own) == len(self.samples) and not any(
            distance(own[0], row) > _ROUNDING for row in own[1:]
        )

    def is_mixed(self) -> bool:
        """Ranks with other values and gradients of it step with one mean, or sum, of these."""
        own, used, weights = map(self.rows, ("own", "used", "weights"))
        if not (own and used and weights and _are_unlike(own) and _are_unlike(weights)):
            return False
        total = [math.fsum(values) for values in zip(*own, strict=True)]
        mean = [value / len(own) for value in total]
        return any(all(distance(e, whole) <= _ROUNDING for e in used) for whole in (total, mean))


def _layers(context: Context) -> list[_Layer]:
    sums = {e.ranks: e for one in context.facts.values() for e in one.split.sums}
    return [
        _Layer(ranks, each.place, {rank: of[rank] for rank in ranks})
        for ranks, each in sums.items()
        if _is_shared(context.facts, each)
        for of in optimizers(context.facts).values()
        if set(ranks) <= set(of)
    ]


def _is_shared(facts: Mapping[int, RunFacts], each: PartialSum) -> bool:
    """True of a sum in which all its ranks take part, and for which all got the same inputs."""
    if len(each.ranks) < 2 or not set(each.ranks) <= set(facts):
        return False
    split = [facts[rank].split for rank in each.ranks]
    agreed = all(any(own.ranks == each.ranks for own in e.sums) for e in split)
    inputs = {tuple((i.backwards, i.hash) for f in e.forwards for i in f.inputs) for e in split}
    first = next(iter(inputs))
    known = len(first) >= _FEWEST_STEPS and all(hash for _, hash in first)
    return agreed and known and len(inputs) == 1


def _are_unlike(rows: _Rows) -> bool:
    return all(distance(rows[0], row) > _UNLIKE for row in rows[1:])
