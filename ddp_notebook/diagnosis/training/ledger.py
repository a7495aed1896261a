"""The ledger of a training step: what the ranks saw of each parameter, compared, as rows.

It states facts, and no finding: who averages by hand, or lets replicas drift apart on purpose, sees
just that. How the gradients that optimizers used come of the ranks' own is fitted to a few values
of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ddp_notebook.model import (
    LAST_STEP,
    Ledger,
    LedgerRow,
    RankLedger,
    Reading,
    SteppedParameter,
    by_value,
    counted,
    name_ranks,
    said_by,
)

_TOLERANCE = 2e-3
"""Relative: within it is what half precision, or another order of adding, changes."""
_ENOUGH_VALUES = 4
"""With fewer of them, some factor makes nearly anything of anything."""
_MOST_WEIGHTS = 8

By = Mapping[int, SteppedParameter]
Values = Sequence[float]
T = TypeVar("T")


class _Fact(NamedTuple):
    """What a column says, and how much it is worth a look."""

    text: str
    weight: int = 0


def ledger(of: Mapping[int, RankLedger], asked: int = LAST_STEP) -> Ledger:
    """Compare the ranks' records of one training step, asked for by its number."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, SteppedParameter]] = {}
    for rank, each in of.items():
        for parameter in each.parameters:
            found.setdefault((parameter.name, parameter.shape), {})[rank] = parameter
    idle = {name: None for (name, _), by in found.items() if all(map(_is_idle, by.values()))}
    # A rank that has it and does nothing with it, as in a pipeline, is none of those compared.
    trained = {
        key: {rank: e for rank, e in by.items() if e.within or not _is_idle(e)}
        for key, by in found.items()
        if key[0] not in idle
    }
    wrapped = any(each.within for by in trained.values() for each in by.values())
    # Large ones first: the factor of one with many values is tried on those that have few.
    mixes, facts = _Mixes(), {}
    for key in sorted(trained, key=lambda key: -math.prod(key[1])):
        facts[key] = _facts(trained[key], mixes, wrapped=wrapped)
    alike: dict[tuple[_Fact, ...], list[str]] = {}
    for key in trained:
        alike.setdefault(facts[key], []).append(key[0])
    rows = []
    for told, names in alike.items():
        within, own, used, held_by, changed, after = (fact.text for fact in told)
        weight = max(fact.weight for fact in told)
        rows.append(LedgerRow(tuple(names), within, own, used, held_by, changed, after, weight))
    notes = [
        f"{name_ranks(ranks)}: {'; '.join(said)}"
        for ranks, said in by_value({rank: each.notes for rank, each in of.items()})
        if said
    ]
    # A model none of whose parameters is trained is a copy, a teacher, or an earlier cell's.
    models = {name.partition(".")[0] for name, _ in trained}
    if beside := [name for name in idle if name.partition(".")[0] in models]:
        few = ", ".join(beside[:3]) + ", ..." * (len(beside) > 3)
        left = counted(len(beside), "parameter")
        notes.append(f"left out, without a gradient or an optimizer: {left} ({few})")
    return Ledger(
        _title(trained.values(), tuple(of), asked),
        tuple(sorted(rows, key=lambda row: -row.weight)),
        tuple(notes),
    )


def _is_idle(parameter: SteppedParameter) -> bool:
    return parameter.own is None and parameter.used is None and not parameter.optimizer


def _title(trained: Iterable[By], ranks: Sequence[int], asked: int) -> str:
    newest = max((each.steps for by in trained for each in by.values()), default=0)
    if not newest:
        return f"No training step was seen on {name_ranks(ranks)}"
    if asked == newest:
        return f"Training step {asked} on {name_ranks(ranks)}"
    none = f" (there was no step {asked})" if asked != LAST_STEP else ""
    return f"The last training step on {name_ranks(ranks)}, number {newest}{none}"


def _facts(by: By, mixes: _Mixes, *, wrapped: bool) -> tuple[_Fact, ...]:
    """What each column says of one parameter."""
    within = {rank: each.within for rank, each in by.items()}
    outside = wrapped and not all(within.values())
    return (
        _Fact(_said({rank: kind or "-" for rank, kind in within.items()}), int(outside)),
        _own(by),
        mixes.used(by),
        _optimizer(by),
        _changed(by),
        _after(by),
    )


def _said(texts: Mapping[int, str]) -> str:
    """One text for all ranks, or who has which."""
    return next(iter(texts.values())) if len(set(texts.values())) == 1 else said_by(texts)


def _own(by: By) -> _Fact:
    """What each rank's own backwards brought."""
    have = {rank: each.own for rank, each in by.items() if each.own is not None}
    if not have:
        return _Fact("none", 3 if any(each.steps for each in by.values()) else 1)
    first = by[next(iter(have))]
    many = f", {first.backwards} backwards" if first.backwards > 1 else ""
    stale = max(each.earlier for each in by.values())
    if stale and first.steps:
        return _Fact(f"with {counted(stale, 'backward')} of earlier steps", 2)
    if len(have) < len(by):
        lack = [rank for rank in by if rank not in have]
        return _Fact(f"none on {name_ranks(lack)}{many}", 1)
    if len(by) > 1 and len(set(have.values())) == 1:
        return _Fact(f"equal on all ranks{many}", 1)
    return _Fact(f"one per rank{many}")


def _optimizer(by: By) -> _Fact:
    """Which optimizer has it, and which step that made."""
    rates = {each.lr for each in by.values() if each.steps}
    texts = {}
    for rank, each in by.items():
        made = f", step {each.steps}" if each.steps else ", no step"
        tells = each.lr is not None and (len(rates) > 1 or not each.lr)
        rate = f", lr {each.lr:g}" if tells else ""
        texts[rank] = f"{each.optimizer}{made}{rate}" if each.optimizer else "none"
    text = _said(texts)
    if len(set(texts.values())) > 1:
        return _Fact(text, 4)
    return _Fact(text, 3 if text == "none" else 0)


def _changed(by: By) -> _Fact:
    """Whether the step changed it."""
    seen = {
        rank: not each.before.equals(each.after)
        for rank, each in by.items()
        if each.before is not None and each.after is not None and each.before.size
    }
    if not seen or not any(each.steps for each in by.values()):
        return _Fact("yes" if any(seen.values()) else "no" if seen else "")
    # A shard may have no gradient but zeros; a tiny one is lost in rounding.
    unlike = any(
        each.read.size * (1 if each.lr is None else each.lr) > 1e-6 * each.before.size
        for rank, each in by.items()
        if each.read is not None and each.before is not None and not seen.get(rank, True)
    )
    return _Fact(_said({r: "yes" if each else "no" for r, each in seen.items()}), 2 * unlike)


def _after(by: By) -> _Fact:
    """Whether it has the same values on all ranks afterwards."""
    if any(each.sharded for each in by.values()):
        return _Fact("sharded")
    alike = _alike({rank: each.after for rank, each in by.items() if each.after is not None})
    if len(by) == 1:
        return _Fact(f"on {name_ranks(by)} alone")
    if len(alike) < 2:
        return _Fact("same" if alike else "")
    apart = f": {' | '.join(map(name_ranks, alike))}" if len(alike) < len(by) else ""
    return _Fact(f"differs{apart}", 5)


def _alike(read: Mapping[int, Reading]) -> list[list[int]]:
    """The ranks whose readings are equal, together."""
    groups: list[list[int]] = []
    for rank, each in read.items():
        group = next((group for group in groups if read[group[0]].equals(each)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return groups


# -- how the gradient that was used comes of the ranks' own ------------------------------

_MEAN, _OWN, _EQUAL, _OTHER = "mean", "own", "equal", "other"


class _Mix(NamedTuple):
    """`kind` of a mix of so many `ranks`' gradients, times `factor`; any other is `text` alone."""

    kind: str
    factor: float = 1.0
    ranks: int = 1
    text: str = ""

    def is_like(self, other: _Mix) -> bool:
        same = (self.kind, self.ranks, self.text) == (other.kind, other.ranks, other.text)
        return same and abs(self.factor - other.factor) <= _TOLERANCE * abs(other.factor)

    def fact(self, whose: str = "each rank's") -> _Fact:
        """It in words."""
        if self.kind == _OTHER:
            return _Fact(self.text, 2)
        if self.kind == _EQUAL:
            return _Fact("the ranks' own, equal on all")
        times = "" if _is_near(self.factor, 1) else f" x {self.factor:.3g}"
        if self.kind == _OWN:  # where all have the same, it is their mean
            own = f"{whose} own{times}"
            return _Fact(f"{own}, not averaged", 5) if self.ranks > 1 else _Fact(f"its own{times}")
        if self.ranks > 1 and _is_near(self.factor, self.ranks):
            return _Fact(f"sum of {self.ranks} ranks", 2)
        return _Fact(f"mean of {self.ranks} ranks{times}")


class _Mixes:
    """Fits mixes; the factors that were found in many values are tried where there are few."""

    def __init__(self) -> None:
        self._factors: list[float] = []

    def used(self, by: By) -> _Fact:
        """How the gradients that the optimizers used come of the ranks' own."""
        used = {rank: each.used for rank, each in by.items() if each.used is not None}
        read = {rank: each.read for rank, each in by.items() if each.read is not None}
        if not read:
            lost = any(each.own is not None and each.steps for each in by.values())
            return _Fact("none", 3 * lost)
        if bad := [rank for rank, each in read.items() if not math.isfinite(each.total)]:
            return _Fact(f"NaN or infinite on {name_ranks(bad)}", 5)
        if not any(each.size for each in read.values()):
            own = any(any(each.own or ()) for each in by.values())
            return _Fact("zeros", 2 if own else 1)
        if len({each.steps for each in by.values()}) > 1:
            return _Fact("ranks are at different steps", 5)
        kept = [rank for rank, each in by.items() if each.unreduced]
        if kept:
            return _Fact(f"a part is not reduced on {name_ranks(kept)}", 5)
        mixes = {rank: mix for rank in used if (mix := self._mix(rank, by)) is not None}
        sharded = any(each.sharded for each in by.values())
        apart = len(by) > 1 and (len(read) < len(by) or (not sharded and len(_alike(read)) > 1))
        first = next(iter(mixes.values()), _Mix(_OTHER, text="unlike any mix of the ranks' own"))
        if all(mix.is_like(first) for mix in mixes.values()) and len(read) == len(by):
            text, weight = first.fact()
            return _Fact(text, 5 if apart else weight)
        texts = {rank: mix.fact("its").text for rank, mix in mixes.items()}
        texts |= {rank: "none" for rank in by if rank not in read}
        return _Fact(_said(dict(sorted(texts.items()))), 5)

    def _mix(self, rank: int, by: By) -> _Mix | None:
        """One rank's; None where it has none of the values that were sampled."""
        each = by[rank]
        places = [i for i, value in enumerate(each.used or ()) if value is not None]
        among = [r for r in by if not each.group or r in each.group]
        # A rank that did not use the parameter brings zeros; a part of a tensor is on some ranks.
        own = {r: _at(by[r].own, places) for r in among}
        columns = {r: values for r, values in own.items() if values is not None}
        target = _at(each.used, places)
        if not places or target is None:
            return None
        if not any(by[r].own is not None for r in among):
            return _Mix(_OTHER, text="of no backward that was seen")
        count = len(columns)
        mean = [sum(values) / count for values in zip(*columns.values(), strict=True)]
        alone = columns.get(rank)
        if alone == mean and count > 1 and _fits(target, alone):
            return _Mix(_EQUAL)
        if count > 1 and (factor := self._factor(target, mean, (1, count))) is not None:
            return _Mix(_MEAN, factor, count)
        if alone and (factor := self._factor(target, alone, (1, 1 / count))) is not None:
            return _Mix(_OWN, factor, count)
        for other, values in columns.items():
            if _fits(target, values):
                return _Mix(_OTHER, text=f"rank {other}'s")
        return _Mix(_OTHER, text=_weighted(target, columns) or "unlike any mix of the ranks' own")

    def _factor(self, target: Values, of: Values, usual: Values) -> float | None:
        """The factor that makes `target` of `of`; None if there is none, or too few values."""
        square = math.fsum(value * value for value in of)
        if not square:
            return None
        best = math.fsum(a * b for a, b in zip(target, of, strict=True)) / square
        for factor in (*usual, *self._factors):
            if _fits(target, [factor * value for value in of]):
                return float(factor)
        if len(of) < _ENOUGH_VALUES or not _fits(target, [best * value for value in of]):
            return None
        self._factors.append(best)
        return best


def _at(sample: Sequence[float | None] | None, places: Sequence[int]) -> list[float] | None:
    """The values at these places; zeros without a sample, None where one is missing."""
    if sample is None:
        return [0.0] * len(places)
    values = [value for i in places if i < len(sample) and (value := sample[i]) is not None]
    return values if len(values) == len(places) else None


def _is_near(number: float, other: float) -> bool:
    return abs(number - other) <= _TOLERANCE * abs(other)


def _fits(target: Values, made: Values) -> bool:
    """Return whether `made` is `target`, but for rounding."""
    off = math.dist(target, made)
    return off <= _TOLERANCE * math.hypot(*target)


def _weighted(target: Values, columns: Mapping[int, Values]) -> str:
    """Return a weighted sum of the ranks' gradients that is `target`, in words; empty for none."""
    if not 1 < len(columns) <= min(_MOST_WEIGHTS, len(target) // 2):
        return ""
    # The normal equations of least squares, solved by elimination.
    vectors = list(columns.values())
    rows = [
        [math.fsum(a * b for a, b in zip(one, other, strict=True)) for other in (*vectors, target)]
        for one in vectors
    ]
    for at, row in enumerate(rows):
        if abs(row[at]) < 1e-12 * max(map(abs, row)):
            return ""
        for other in rows:
            if other is not row:
                times = other[at] / row[at]
                other[:] = [a - times * b for a, b in zip(other, row, strict=True)]
    weights = [row[-1] / row[at] for at, row in enumerate(rows)]
    made = [
        math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
        for values in zip(*vectors, strict=True)
    ]
    if not _fits(target, made):
        return ""
    return " + ".join(
        f"{weight:.3g} x rank {rank}'s"
        for rank, weight in zip(columns, weights, strict=True)
        if abs(weight) > _TOLERANCE
    )
