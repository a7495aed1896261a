"""The ledger of a training step: the ranks' records of each parameter, compared, as rows.

It states facts and makes no finding: users who average by hand, or let replicas drift apart on
purpose, see just that. A few values of each gradient show how the one that was used relates to the
ranks' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import mul
from typing import Any

from ddp_notebook import model

_TOLERANCE = 2e-3
"""Relative: half precision, or another order of adding, changes less."""
_UNLIKE = "neither the ranks' own nor their mean"

_By = Mapping[int, model.SteppedParameter]
_Fact = tuple[str, int]
"""The text of a column, and how much it is worth a look."""


def ledger(of: Mapping[int, model.RankLedger], asked: int = model.LAST_STEP) -> model.Ledger:
    """Compare the ranks' records of one training step, asked for by its number."""
    found: dict[tuple[Any, ...], dict[int, model.SteppedParameter]] = {}
    for rank, each in of.items():
        for parameter in each.parameters:
            # Ranks that DDP does not join, as those of other stages, are not compared.
            key = parameter.name, parameter.shape, parameter.group
            found.setdefault(key, {})[rank] = parameter
    # Large ones first: factors that are found in many values are tried where there are few.
    factors: list[float] = []
    largest = sorted(found, key=lambda key: -math.prod(key[1]))
    facts = {key: _facts(found[key], factors) for key in largest}
    alike: dict[tuple[_Fact, ...], list[str]] = {}
    for key in found:
        alike.setdefault(facts[key], []).append(key[0])
    rows = []
    for told in sorted(alike, key=_weight, reverse=True):
        said = dict(zip(model.LEDGER_COLUMNS, [text for text, _ in told], strict=True))
        rows.append(model.LedgerRow(tuple(dict.fromkeys(alike[told])), said, _weight(told) > 1))
    notes = model.by_value({rank: each.notes for rank, each in of.items()})
    said_too = tuple(f"{model.name_ranks(ranks)}: {note}" for ranks, each in notes for note in each)
    title = f"{_step(found.values(), asked)} on {model.name_ranks(of)}: {_counted(rows)}"
    return model.Ledger(title, tuple(rows), said_too)


def _step(found: Iterable[_By], asked: int) -> str:
    newest = max((each.steps for by in found for each in by.values()), default=0)
    if not newest:
        return "No optimizer made a step"
    none = f" (there is no step {asked})" if asked < model.LAST_STEP else ""
    last = f"The last step of each optimizer{none}"
    return f"Step {asked} of each optimizer" if asked <= newest else last


def _counted(rows: Iterable[model.LedgerRow]) -> str:
    count = sum(len(row.parameters) for row in rows)
    looks = sum(len(row.parameters) for row in rows if row.marked)
    return f"{model.counted(count, 'parameter')}, {looks or 'none'} worth a look"


def _weight(told: tuple[_Fact, ...]) -> int:
    return max(weight for _, weight in told)


def _facts(by: _By, factors: list[float]) -> tuple[_Fact, ...]:
    """Return the text and the weight of each column for one parameter."""
    held, changed = {}, {}
    for rank, each in by.items():
        lr = "" if each.lr is None else f", lr {each.lr:g}"
        held[rank] = f"{each.optimizer}, step {each.steps}{lr}" if each.steps else "none"
        # That a shard is empty, or was not read, is no change.
        if each.before is not None and each.before.numel:
            changed[rank] = ("yes", "no")[each.before == each.after]
    lost = "none" in held.values() and any(each.own for each in by.values())
    return (
        (_said({rank: each.within or "-" for rank, each in by.items()}), 0),
        _own(by),
        _used(by, factors),
        (_said(held), 4 if len(set(held.values())) > 1 else 3 * lost),
        (_said(changed), 0),
        _across(by),
    )


def _said(texts: Mapping[int, str]) -> str:
    """Return one text for all ranks, or the text of each."""
    return model.said_by(texts) if len(set(texts.values())) > 1 else next(iter(texts.values()), "")


def _own(by: _By) -> _Fact:
    """Describe what each rank's own backwards brought."""
    lack = [rank for rank, each in by.items() if each.own is None]
    first = next((each for each in by.values() if each.own is not None), None)
    if first is None:
        return "none", 3 * any(each.steps for each in by.values())
    if first.steps and first.earlier:
        return f"includes {model.counted(first.earlier, 'backward')} of earlier steps", 2
    many = f", {first.backwards} backwards" * (first.backwards > 1)
    if lack:
        return f"none on {model.name_ranks(lack)}{many}", 1
    own = {each.own for each in by.values() if each.own is not None}
    equal = len(by) > len(own) == 1 == sum(map(any, own))
    return f"{('one per rank', 'equal on all ranks')[equal]}{many}", int(equal)


def _across(by: _By) -> _Fact:
    """Compare its values across ranks after the step."""
    groups = model.by_value({rank: each.after for rank, each in by.items()})
    if any(each.sharded for each in by.values()):
        return "sharded", 0
    if len(groups) == 1:
        return "same" if len(by) > 1 else f"on {model.name_ranks(by)} alone", 0
    apart = f": {' | '.join(model.name_ranks(ranks) for ranks, _ in groups)}"
    return f"differs{apart if len(groups) < len(by) else ''}", 5


# -- how the gradient that was used comes of the ranks' own ------------------------------


def _used(by: _By, factors: list[float]) -> _Fact:
    if unusual := _not_a_mix(by):
        return unusual
    origins = {rank: text for rank in by if (text := _origin(rank, by, factors))}
    said = _said(origins) or "not read"
    # Shards differ as they should, but not in how they come of the ranks' own.
    sharded = any(each.sharded for each in by.values())
    apart = len(set(origins.values() if sharded else [e.used_digest for e in by.values()])) > 1
    # What is split by a plan has partial sums, which the user may average over other ranks.
    split = next(iter(by.values())).within == "DTensor"
    mixed = 2 * (said.startswith(("sum", _UNLIKE)) and not split)
    return said, 5 if apart or "not averaged" in said else mixed


def _not_a_mix(by: _By) -> _Fact | None:
    """Describe gradients whose values need no comparison; None for all others."""
    digests = {rank: each.used_digest for rank, each in by.items()}
    bad = [rank for rank, each in digests.items() if each is not None and not each.finite]
    if not any(digests.values()):
        return "none", 3 * any(each.own and each.steps for each in by.values())
    if bad:
        return f"NaN or infinite on {model.name_ranks(bad)}", 5
    differ = len({each.steps for each in by.values()}) > 1
    return ("ranks are at different steps", 5) if differ else None


def _origin(rank: int, by: _By, factors: list[float]) -> str:
    """Describe how one rank's gradient comes of all ranks' own; empty without a value of it."""
    used, among = by[rank].used, by[rank].group or by
    if used is None:
        return "none"
    places = [place for place, value in enumerate(used) if value is not None]
    own = {other: _at(places, by[other].own) for other in by if other in among}
    columns = {other: values for other, values in own.items() if values}
    target = _at(places, used)
    if not target or rank not in columns:
        return ""
    return _fitted(target, columns, rank, factors) if any(target) else "zeros"


def _at(places: Sequence[int], sample: Sequence[float | None] | None) -> list[float]:
    """Return the values at these places; none if one is missing, as it is on other ranks alone.

    A rank that did not use the parameter, and has no sample, brings zeros.
    """
    values: list[Any] = [0.0 if sample is None else sample[place] for place in places]
    return [] if None in values else values


def _fitted(
    target: Sequence[float], columns: Mapping[int, list[float]], rank: int, factors: list[float]
) -> str:
    """Name what `target` is a multiple of; a factor that is none of `factors` is put there."""
    count, own = len(columns), columns[rank]
    differ = len(set(map(tuple, columns.values()))) > 1
    alone = ", not averaged" if differ else ", equal on all ranks" * (count > 1)
    mixes = [("own gradient", own, alone)]
    if differ:
        mean = [sum(values) / count for values in zip(*columns.values(), strict=True)]
        mixes.insert(0, (f"mean of {count} ranks", mean, ""))
    # Of a few values some factor makes nearly anything of anything. And whole ones come first:
    # where ranks' gradients are multiples of each other, several fit.
    best = [sum(map(mul, target, v)) / max(sum(map(mul, v, v)), 1e-300) for _, v, _ in mixes]
    new = best * (len(target) >= 4)
    for factor, mix in product((1.0, count, 1 / count, *factors, *new), mixes):
        name, values, told = mix
        if math.dist(target, [factor * v for v in values]) <= _TOLERANCE * math.hypot(*target):
            factors += [factor] * (factor in new)
            times = f" x {factor:.3g}" * (abs(factor - 1) > _TOLERANCE)
            summed = values is not own and times == f" x {count}"
            return f"sum of {count} ranks" if summed else f"{name}{times}{told}"
    return _UNLIKE
