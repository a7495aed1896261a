"""The ledger of a training step: what the ranks saw of each parameter, compared, as rows.

It states facts, and no finding: who averages by hand, or lets replicas drift apart on purpose, sees
just that. How the gradient that was used comes of the ranks' own is told by a few values of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

from ddp_notebook.model import (
    LAST_STEP,
    LEDGER_COLUMNS,
    Ledger,
    LedgerRow,
    RankLedger,
    SteppedParameter,
    by_value,
    counted,
    name_ranks,
    said_by,
)

_TOLERANCE = 2e-3
"""Relative: half precision, or another order of adding, changes less."""
_UNLIKE = "neither the ranks' own nor their mean"

_By = Mapping[int, SteppedParameter]
_Fact = tuple[str, int]
"""What a column says, and how much that is worth a look."""


def ledger(of: Mapping[int, RankLedger], asked: int = LAST_STEP) -> Ledger:
    """Compare the ranks' records of one training step, asked for by its number."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, SteppedParameter]] = {}
    for rank, each in of.items():
        for parameter in each.parameters:
            found.setdefault((parameter.name, parameter.shape), {})[rank] = parameter
    # Large ones first: factors that are found in many values are tried where there are few.
    factors: list[float] = []
    largest = sorted(found, key=lambda key: -math.prod(key[1]))
    facts_of = {key: _facts(found[key], factors) for key in largest}
    alike: dict[tuple[_Fact, ...], list[str]] = {}
    for key in found:
        alike.setdefault(facts_of[key], []).append(key[0])
    rows = []
    for told in sorted(alike, key=_weight, reverse=True):
        texts = (text for text, _ in told)
        facts = dict(zip(LEDGER_COLUMNS, texts, strict=True))
        rows.append(LedgerRow(tuple(alike[told]), facts, _weight(told) > 1))
    newest = max((each.steps for by in found.values() for each in by.values()), default=0)
    which = f"{f'Step {asked}' if asked <= newest else 'The last step'} of each optimizer"
    none = f" (there is no step {asked})" if newest < asked < LAST_STEP else ""
    looks = sum(len(row.parameters) for row in rows if row.marked)
    notes = by_value({rank: each.notes for rank, each in of.items()})
    return Ledger(
        f"{which if newest else 'No optimizer made a step'}{none} on {name_ranks(of)}: "
        f"{counted(len(found), 'parameter')}, {looks or 'none'} worth a look",
        tuple(rows),
        tuple(f"{name_ranks(ranks)}: {note}" for ranks, each in notes for note in each),
    )


def _weight(told: tuple[_Fact, ...]) -> int:
    return max(weight for _, weight in told)


def _facts(by: _By, factors: list[float]) -> tuple[_Fact, ...]:
    """What each column says of one parameter."""
    held = {
        rank: f"{each.optimizer}, step {each.steps}, lr {each.lr:g}" if each.steps else "none"
        for rank, each in by.items()
    }
    changed = {
        rank: "no" if each.before == each.after else "yes"
        for rank, each in by.items()
        if each.before is None or each.before.numel  # not of an empty shard
    }
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
    """One text for all ranks, or who has which."""
    return said_by(texts) if len(set(texts.values())) > 1 else next(iter(texts.values()), "")


def _own(by: _By) -> _Fact:
    """What each rank's own backwards brought."""
    lack = [rank for rank, each in by.items() if each.own is None]
    if len(lack) == len(by):
        return "none", 3 * any(each.steps for each in by.values())
    first = next(each for each in by.values() if each.own is not None)
    if first.steps and first.earlier:
        return f"includes {counted(first.earlier, 'backward')} of earlier steps", 2
    many = f", {first.backwards} backwards" if first.backwards > 1 else ""
    if lack:
        return f"none on {name_ranks(lack)}{many}", 1
    equal = len(by) > len({each.own for each in by.values()}) == 1
    return f"{'equal on all ranks' if equal else 'one per rank'}{many}", int(equal)


def _across(by: _By) -> _Fact:
    """Whether it has the same values on all ranks afterwards."""
    groups = by_value({rank: each.after for rank, each in by.items()})
    if any(each.sharded for each in by.values()):
        return "sharded", 0
    if len(groups) == 1:
        return "same" if len(by) > 1 else f"on {name_ranks(by)} alone", 0
    apart = f": {' | '.join(name_ranks(ranks) for ranks, _ in groups)}"
    return f"differs{apart if len(groups) < len(by) else ''}", 5


# -- how the gradient that was used comes of the ranks' own ------------------------------


def _used(by: _By, factors: list[float]) -> _Fact:
    digests = {rank: each.used_digest for rank, each in by.items()}
    if not any(digests.values()):
        return "none", 3 * any(each.own and each.steps for each in by.values())
    if bad := [rank for rank, each in digests.items() if each is not None and not each.finite]:
        return f"NaN or infinite on {name_ranks(bad)}", 5
    if len({each.steps for each in by.values()}) > 1:
        return "ranks are at different steps", 5
    told = {rank: text for rank in by if (text := _origin(rank, by, factors))}
    said, same = _said(told), len(set(digests.values())) == 1
    if any(each.sharded for each in by.values()):
        # Shards differ as they should, but not in how they come of the ranks' own.
        same = len(set(told.values())) < 2 and "not averaged" not in said
    return said or "not read", 2 * said.startswith(("sum", _UNLIKE)) if same else 5


def _origin(rank: int, by: _By, factors: list[float]) -> str:
    """How one rank's gradient comes of all ranks' own; empty without a value of it."""
    each = by[rank]
    if each.used is None:
        return "none"
    places = [place for place, value in enumerate(each.used) if value is not None]
    target = [each.used[place] or 0.0 for place in places]
    # A rank that did not use the parameter brings zeros; a part of it is on some ranks alone.
    columns: dict[int, list[float]] = {}
    for other in by if not each.group else by.keys() & each.group:
        values = [(own[place] if (own := by[other].own) else 0.0) for place in places]
        if None not in values:
            columns[other] = [value or 0.0 for value in values]
    if not places or rank not in columns:
        return ""
    if not any(target):
        return "zeros"
    count = len(columns)
    mean = [sum(values) / count for values in zip(*columns.values(), strict=True)]
    equal = len(set(map(tuple, columns.values()))) == 1 < count
    if not equal and (factor := _factor(target, columns[rank], factors, 1 / count)) is not None:
        return f"own gradient{_times(factor)}{', not averaged' if count > 1 else ''}"
    if (factor := _factor(target, mean, factors, count)) is None:
        return _UNLIKE
    if equal:
        return f"own gradient{_times(factor)}, equal on all ranks"
    summed = abs(factor - count) <= _TOLERANCE
    return f"sum of {count} ranks" if summed else f"mean of {count} ranks{_times(factor)}"


def _factor(
    target: Sequence[float], values: Sequence[float], known: list[float], usual: float = 1
) -> float | None:
    """Return the factor that makes `target` of `values`; None where none does.

    One that is not `known` is remembered there.
    """
    square = sum(map(mul, values, values))
    best = sum(map(mul, target, values)) / square if square else 0.0
    for factor in (1, usual, *known, best):
        # Of a few values some factor makes nearly anything of anything.
        if factor is best and len(target) < 4:
            return None
        if math.dist(target, [factor * v for v in values]) <= _TOLERANCE * math.hypot(*target):
            if factor is best:
                known.append(best)
            return factor
    return None


def _times(factor: float) -> str:
    return "" if abs(factor - 1) <= _TOLERANCE else f" x {factor:.3g}"
