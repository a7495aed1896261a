"""Rules about what becomes of gradients between the backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.diagnosis.parallel.split import summed
from ddp_notebook.diagnosis.training.replicas import AVERAGING, Model
from ddp_notebook.diagnosis.training.rules import optimizers
from ddp_notebook.model import Category, Finding, OptimizerFacts, Ranks

_APART = 1e-3
"""Factors that differ by less, of their size, are the same."""
_ROUNDING = 1e-5
_FEWEST_VALUES = 4
"""Values of gradients, not zero, that must be the same on all ranks."""
_FEWEST_STEPS = 2
_FEWEST_LEFTOVERS = 3

_Of = Mapping[int, OptimizerFacts]


def kept_back(context: Context) -> Iterator[Finding]:
    """Steps of a sharded model, while gradients of a backward were not reduced yet."""
    for of in optimizers(context.facts).values():
        ranks = {rank: each for rank, each in of.items() if each.pending_steps}
        if not ranks:
            continue
        each = next(iter(ranks.values()))
        yield Finding(
            Category.NO_SYNC_MISUSE,
            tuple(ranks),
            f"{each.type} steps while the last backward's gradients are not reduced: gradient sync "
            f"is off for it, and they go into a later step{_at(each.pending_place)}",
            "Have set_requires_gradient_sync(True) (and set_requires_all_reduce) for the last "
            "micro-batch before optimizer.step().",
            evidence=by_ranks(
                {r: f"{e.pending_steps} of {e.steps} steps" for r, e in ranks.items()}
            ),
        )


def local_factors(context: Context) -> Iterator[Finding]:
    """Gradients of one model in parts are multiplied by another factor on each rank."""
    by_hand = summed(context)
    for of in optimizers(context.facts).values():
        meshes = {each.mesh for each in of.values() if each.mesh}
        for mesh in sorted(meshes.union(by_hand)):
            group = {rank: e for rank, e in of.items() if rank in mesh}
            own = {each.mesh for each in group.values()}
            if len(group) == len(mesh) > 1 and own == {mesh if mesh in meshes else ()}:
                yield from _multiplied_apart(group)


def _multiplied_apart(of: _Of) -> Iterator[Finding]:
    steps = [i for i in _common_steps(of) if _differ(_factors_at(of, i))]
    if len(steps) >= _FEWEST_STEPS:
        yield _local(of, steps[0], len(steps))


def _local(of: _Of, step: int, steps: int) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.LOCAL_STATISTIC,
        tuple(of),
        f"the gradients of one sharded model are multiplied by another factor on each rank before "
        f"{each.type} steps{_at(each.place)}: a norm was taken of the rank's own shard",
        "Take the norm over all shards: torch.nn.utils.clip_grad_norm_ does; by hand, all_reduce "
        "the sum of squares before the root.",
        evidence=(
            *(f"rank {r}: times {e.factors[step]:g} in step {step + 1}" for r, e in of.items()),
            f"another factor on each rank in {steps} of the first "
            f"{len(_common_steps(of))} steps in which it was one factor",
        ),
    )


def other_beginnings(context: Context) -> Iterator[Finding]:
    """Models that were not alike when training began, whose gradients are averaged by hand.

    All ranks step with the same gradients, which they exchanged; that the parameters differ
    before the first step is then no intention.
    """
    for of in optimizers(context.facts).values():
        plain = not any(each.replicas or each.mesh for each in of.values())
        if not plain or len(of) < 2 or set(of) != set(context.facts):
            continue
        gradients = [each.first_gradients for each in of.values()]
        weights = {rank: each.first_weights for rank, each in of.items()}
        if not _all_close(gradients) or sum(map(bool, gradients[0])) < _FEWEST_VALUES:
            continue
        if _all_close(list(weights.values())) or not _exchanged(context, of):
            continue
        yield _unlike_from_the_start(of, gradients[0], weights)


def _unlike_from_the_start(
    of: _Of, gradients: Sequence[float], weights: Mapping[int, tuple[float, ...]]
) -> Finding:
    each = next(iter(of.values()))
    return Finding(
        Category.REPLICA_DIVERGENCE,
        outvoted(weights),
        f"the parameters differ between the ranks before the first step of {each.type}, though "
        f"its gradients are the same on all: the models were not made alike{_at(each.place)}",
        "Have every rank begin with the same parameters: torch.manual_seed(seed), the same on "
        "all, before the model is made; or dist.broadcast(p.data, src=0) for each.",
        evidence=(
            *by_ranks({r: f"parameters begin with {_few(w)}" for r, w in weights.items()}),
            f"gradients of the first step on all ranks: {_few(gradients)}",
        ),
    )


def scaled_apart(context: Context) -> Iterator[Finding]:
    """Gradients that ranks have averaged by hand, and that a few of them multiply by a factor.

    All ranks began with the same parameters, and most step with the same gradients.
    """
    for of in optimizers(context.facts).values():
        plain = not any(each.replicas or each.mesh for each in of.values())
        if not plain or set(of) != set(context.facts):
            continue
        if not _all_close([each.first_weights for each in of.values()]):
            continue
        gradients = {rank: each.first_gradients for rank, each in of.items()}
        right = max(
            (
                tuple(r for r, g in gradients.items() if _all_close([g, own]))
                for own in gradients.values()
            ),
            key=len,
        )
        others = {r: _ratio(gradients[right[0]], g) for r, g in gradients.items() if r not in right}
        if others and len(others) < len(right) and all(others.values()) and _exchanged(context, of):
            each = next(iter(of.values()))
            yield Finding(
                Category.REPLICA_DIVERGENCE,
                tuple(others),
                "the gradients are those of the other ranks, times a factor: they are clipped or "
                f"scaled there alone, and the parameters drift apart{_at(each.place)}",
                "Do the same with the averaged gradients on every rank: clip on all or on none.",
                evidence=tuple(
                    f"rank {rank}: times {factor:.4g} in the first step"
                    for rank, factor in others.items()
                ),
            )


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """By what `other` is `one` times; 0 where it is no one factor."""
    ratios = [b / a for a, b in zip(one, other, strict=False) if a]
    if len(one) != len(other) or len(ratios) < _FEWEST_VALUES:
        return 0.0
    return ratios[0] if max(ratios) - min(ratios) <= _APART * abs(ratios[0]) else 0.0


def _exchanged(context: Context, of: _Of) -> bool:
    """The ranks sent what has the size of the tensors that these optimizers hold.

    Or nothing is known of what they sent: then the answer is asked for again when it is.
    """
    if not context.collectives.of:
        return True
    sizes = {numel for each in of.values() for numel in (*each.numels, sum(each.numels))} - {1}
    return all(
        any(
            r.part is None and r.operation in AVERAGING and (r.numel in sizes or r.tensors > 1)
            for r in context.collectives.of.get(rank, ())
        )
        for rank in of
    )


def _all_close(rows: Sequence[Sequence[float]]) -> bool:
    first = rows[0]
    return all(
        len(row) == len(first)
        and all(
            abs(a - b) <= _ROUNDING * max(abs(a), abs(b)) for a, b in zip(row, first, strict=True)
        )
        for row in rows
    )


def _few(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:3])


def averaged_twice(context: Context) -> Iterator[Finding]:
    """Gradients that DDP has averaged are divided by the world size once more."""
    for of in optimizers(context.facts).values():
        size, model = len(of), _only_model(context, of)
        if size < 2 or model is None or set(model.of) != set(of) or not model.whole:
            continue
        if any(each.backwards != each.steps or each.hook for each in model.of.values()):
            continue  # micro-batches: their number may be the world size
        steps = _common_steps(of)
        wrong = [i for i in steps if all(_is(f, 1 / size) for f in _factors_at(of, i).values())]
        if len(wrong) < _FEWEST_LEFTOVERS or len(wrong) < len(steps):
            continue
        each = next(iter(of.values()))
        yield Finding(
            Category.LOSS_SCALING,
            tuple(of),
            f"the gradients of {model.title} are divided by the world size, {size}, though "
            f"DistributedDataParallel has averaged them: each step is {size} times too small"
            f"{_at(each.place)}",
            "Leave the division out: DistributedDataParallel averages over the ranks.",
            evidence=(f"times {1 / size:g} between backward and step, in {len(wrong)} steps",),
        )


def _only_model(context: Context, of: _Of) -> Model | None:
    """The one model that these optimizers train on every rank; None where there are several."""
    found = [
        model
        for key, model in context.models.items()
        if all(key in each.replicas for each in of.values())
    ]
    return found[0] if len(found) == 1 else None


def leftovers(context: Context) -> Iterator[Finding]:
    """Gradients of the step before were never cleared."""
    for of in optimizers(context.facts).values():
        ranks = {
            rank: each
            for rank, each in of.items()
            if each.leftover_steps >= max(_FEWEST_LEFTOVERS, each.watched_steps - 1)
        }
        if not ranks:
            continue
        each = next(iter(ranks.values()))
        yield Finding(
            Category.STALE_GRADIENTS,
            tuple(ranks),
            f"the gradients are never cleared between steps of {each.type}: each step uses those "
            f"of all steps before as well{_at(each.place)}",
            "Call optimizer.zero_grad() once for each step, before its first backward.",
            evidence=by_ranks(
                {
                    r: f"{e.leftover_steps} of the first {e.watched_steps} steps added to the "
                    "gradients of the step before"
                    for r, e in ranks.items()
                }
            ),
        )


def _at(place: object) -> str:
    return f" ({place})" if place is not None else ""


def _common_steps(of: _Of) -> Ranks:
    """The steps, from 0, of which all ranks know a factor."""
    steps = min(len(each.factors) for each in of.values())
    return tuple(i for i in range(steps) if all(each.factors[i] for each in of.values()))


def _factors_at(of: _Of, step: int) -> dict[int, float]:
    return {rank: each.factors[step] or 0.0 for rank, each in of.items()}


def _differ(factors: Mapping[int, float]) -> bool:
    low, high = min(factors.values()), max(factors.values())
    return high - low > _APART * max(abs(low), abs(high))


def _is(factor: float, wanted: float) -> bool:
    return abs(factor - wanted) <= _APART * wanted
