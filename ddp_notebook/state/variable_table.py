"""The variables of all ranks as one table: equal values are one cell.

If they differ, it says by how much: from a strict majority, else from the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ddp_notebook.model import (
    Ranks,
    RankVariables,
    Scope,
    TensorFacts,
    Unread,
    Variable,
    VariableCell,
    VariableRow,
    VariableSection,
    VariableTable,
)

_BARS = "▁▂▃▄▅▆▇█"
_MOST_SHOWN = 4
"""A tensor with at most this many values is shown with all of them."""


def fold(
    answers: Iterable[RankVariables],
    unread: Sequence[Unread] = (),
    world_size: int = 0,
    *,
    evaluated: bool = False,
) -> VariableTable:
    """The table of variables by rank; functions come first.

    An `evaluated` expression is about each rank's current frame and no variable of the table;
    numbers of three or more ranks are then also drawn beside their mean.
    """
    scopes: dict[tuple[str, str], dict[int, Scope]] = {}
    for answer in sorted(answers, key=lambda answer: answer.rank):
        for scope in answer.scopes:
            scopes.setdefault((scope.function, scope.file), {})[answer.rank] = scope
    in_order = sorted(scopes.items(), key=lambda item: not item[0][0])
    sections = (_section(*names, of_ranks, evaluated) for names, of_ranks in in_order)
    return VariableTable(tuple(sections), tuple(unread), world_size)


def _section(
    function: str, file: str, scopes: Mapping[int, Scope], evaluated: bool
) -> VariableSection:
    values: dict[str, dict[int, Variable]] = {}
    for rank, scope in scopes.items():
        for variable in scope.variables:
            values.setdefault(variable.name, {})[rank] = variable
    ranks = tuple(scopes)
    if evaluated:
        title = "values where each rank stands"
    elif function:
        title = f"variables of {function} ({file})"
    else:
        title = f"global variables of {file}" if file else "global variables"
    left_out = max(scope.left_out for scope in scopes.values())
    rows = tuple(row(name, of_ranks, ranks, sparks=evaluated) for name, of_ranks in values.items())
    return VariableSection(title, ranks, rows, left_out)


def row(
    name: str, values: Mapping[int, Variable], ranks: Ranks, *, sparks: bool = False
) -> VariableRow:
    """A variable on `ranks`; ranks that are not in `values` do not have it."""
    comparable = _comparable(values)
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_key(comparable.get(rank)), []).append(rank)
    known = {key: members for key, members in groups.items() if not _is_unknown(key, groups)}
    largest = max(known.values(), key=len)
    has_majority = 2 * len(largest) > len(ranks)
    base = largest if has_majority else next(iter(known.values()))
    cells = []
    for key, members in groups.items():
        value = comparable.get(members[0])
        cell = VariableCell(
            tuple(members), _text(members, comparable, full=sparks), absent=value is None
        )
        if key not in known:
            cell = replace(cell, unknown=True)
        elif members is not base:
            other = comparable.get(base[0])
            cell = replace(cell, note=_difference(value, other), odd=has_majority)
        cells.append(cell)
    summary = _summary(comparable, sparks=sparks) if len(known) > 1 else ""
    return VariableRow(name, tuple(cells), summary)


# -- which are equal -----------------------------------------------------------------------


def _comparable(values: Mapping[int, Variable]) -> Mapping[int, Variable]:
    """`values` without the facts that are known of some ranks only."""
    if not all(map(_is_told_apart, values.values())):
        values = {rank: replace(value, digest="") for rank, value in values.items()}
    tensors = [value.tensor for value in values.values() if value.tensor is not None]
    if all(tensor.digest or not tensor.read for tensor in tensors):
        return values
    return {rank: _without_digest(value) for rank, value in values.items()}


def _is_told_apart(value: Variable) -> bool:
    return bool(value.digest or value.tensor) or value.number is not None


def _without_digest(value: Variable) -> Variable:
    """A tensor without its digest: some ranks may have had time to compute it, others not."""
    tensor = value.tensor
    if tensor is None or tensor.read == tensor.size:
        return value
    return replace(value, tensor=replace(tensor, digest=""))


def _key(value: Variable | None) -> object:
    """Equal for values that count as equal. Which GPU a tensor is on is a rank's own."""
    if value is None:
        return None
    if value.tensor is None:
        return value.text, value.digest
    return replace(value.tensor, device=_kind(value.tensor))


def _is_unknown(key: object, groups: Mapping[object, object]) -> bool:
    """Whether a tensor may be equal to another one of its shape of which more values were read."""
    if not isinstance(key, TensorFacts) or key.read == key.size:
        return False
    similar = [other for other in groups if isinstance(other, TensorFacts) and _alike(key, other)]
    return key.read < max(other.read for other in similar)


def _alike(one: TensorFacts, other: TensorFacts) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _kind(tensor: TensorFacts) -> str:
    return tensor.device.partition(":")[0]


# -- in words ------------------------------------------------------------------------------


def _text(members: Sequence[int], values: Mapping[int, Variable], *, full: bool) -> str:
    value = values.get(members[0])
    if value is None:
        return ""
    if value.tensor is None:
        return value.text
    devices = {each.tensor.device for rank in members if (each := values[rank]).tensor}
    device = value.tensor.device if len(devices) == 1 else _kind(value.tensor)
    text = tensor_text(replace(value.tensor, device=device))
    is_shown = value.tensor.size <= _MOST_SHOWN and value.tensor.sample
    digest = value.tensor.digest if full and not is_shown else ""
    return f"{text}, hash {digest}" if digest else text


def tensor_text(tensor: TensorFacts) -> str:
    """A tensor on one line: type, shape, device, and what is known of its values."""
    what = f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}] {tensor.device}"
    if not tensor.read:
        return f"{what}, values not read" if tensor.size else what
    numbers = [number for number in tensor.sample if number is not None]
    if tensor.size <= _MOST_SHOWN and len(numbers) == tensor.size:
        return f"{what}: {', '.join(f'{number:.6g}' for number in numbers)}"
    part = f" of {tensor.read:,} of its values" if tensor.read < tensor.size else ""
    return f"{', '.join((what, *_statistics(tensor)))}{part}"


def _statistics(tensor: TensorFacts) -> Iterator[str]:
    if tensor.mean is not None:
        yield f"mean {tensor.mean:.4g}"
    if tensor.std is not None:
        yield f"std {tensor.std:.4g}"
    if tensor.nans:
        yield f"{tensor.nans:,} NaN"
    if tensor.infinite:
        yield f"{tensor.infinite:,} inf"


def _difference(value: Variable | None, other: Variable | None) -> str:
    """How far a value is from the other; empty if the two texts say enough."""
    if value is None or other is None:
        return ""
    if value.tensor is not None and other.tensor is not None:
        return _tensor_difference(value.tensor, other.tensor)
    if value.number is not None and other.number is not None:
        return f"difference {abs(value.number - other.number):.4g}"
    if value.text != other.text:
        return ""
    return "other parameter values" if " parameters, " in value.text else "other values"


def _tensor_difference(one: TensorFacts, base: TensorFacts) -> str:
    if one.shape != base.shape or not (one.read and base.read):
        return ""
    pairs = zip(one.sample, base.sample, strict=False)
    far = [abs(a - b) for a, b in pairs if a is not None and b is not None and a != b]
    if one.nans != base.nans and not far:
        return ""
    if not far:
        return "other values"
    if one.size <= len(one.sample):
        return f"max difference {max(far):.4g}"
    return f"max difference {max(far):.4g} or more"


def _summary(values: Mapping[int, Variable], *, sparks: bool) -> str:
    """The range and mean of numbers, and of tensors of one value; empty for anything else."""
    numbers = []
    for value in values.values():
        single = value.tensor is not None and value.tensor.size == 1
        number = value.tensor.mean if value.tensor is not None and single else value.number
        if number is None:
            return ""
        numbers.append(number)
    mean = sum(numbers) / len(numbers)
    drawn = f"  {spark(numbers)}" if sparks and len(numbers) > 2 else ""
    return f"min {min(numbers):.4g}, mean {mean:.4g}, max {max(numbers):.4g}{drawn}"


def spark(numbers: Sequence[float]) -> str:
    """A bar for each number, from the smallest to the largest; a dot if it is not a number."""
    finite = [number for number in numbers if math.isfinite(number)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(
        _BARS[round((number - least) * scale)] if math.isfinite(number) else "·"
        for number in numbers
    )
