"""The variables of all ranks as one table: equal values are one cell.

If they differ, it says by how much: from a strict majority, else from the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    sections = []
    for (function, file), of_ranks in sorted(scopes.items(), key=lambda item: not item[0][0]):
        values: dict[str, dict[int, Variable]] = {}
        for rank, scope in of_ranks.items():
            for variable in scope.variables:
                values.setdefault(variable.name, {})[rank] = variable
        title = "values where each rank stands"
        if not evaluated:
            scope_of = f"variables of {function} ({file})"
            title = scope_of if function else f"global variables of {file}".removesuffix(" of ")
        ranks = tuple(of_ranks)
        rows = tuple(row(name, of, ranks, sparks=evaluated) for name, of in values.items())
        left_out = max(scope.left_out for scope in of_ranks.values())
        sections.append(VariableSection(title, ranks, rows, left_out))
    return VariableTable(tuple(sections), tuple(unread), world_size)


def row(
    name: str, values: Mapping[int, Variable], ranks: Ranks, *, sparks: bool = False
) -> VariableRow:
    """A variable on `ranks`; ranks that are not in `values` do not have it."""
    # A digest is made while there is time. If one rank has it and another has not, equal values
    # would be shown as two: so what some lack is compared on none.
    if not all(v.digest or v.tensor or v.number is not None for v in values.values()):
        values = {rank: replace(value, digest="") for rank, value in values.items()}
    tensors = {rank: value.tensor for rank, value in values.items() if value.tensor is not None}
    if not all(facts.digest or not facts.read for facts in tensors.values()):
        values = dict(values)
        for rank, facts in tensors.items():
            if facts.read != facts.size:
                values[rank] = replace(values[rank], tensor=replace(facts, digest=""))
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        key: object = None
        if (value := values.get(rank)) is not None:
            key, tensor = (value.text, value.digest), value.tensor
            if tensor is not None:  # which GPU it is on is a rank's own
                key = replace(tensor, device=_kind(tensor))
        groups.setdefault(key, []).append(rank)
    # A tensor may be equal to another one of its shape of which more values were read.
    most_read: dict[object, int] = {}
    for key in groups:
        if isinstance(key, TensorFacts):
            what = (key.shape, key.dtype, key.device)
            most_read[what] = max(key.read, most_read.get(what, 0))
    known = {
        key: members
        for key, members in groups.items()
        if not isinstance(key, TensorFacts)
        or key.read in (key.size, most_read[key.shape, key.dtype, key.device])
    }
    largest = max(known.values(), key=len)
    has_majority = 2 * len(largest) > len(ranks)
    base = largest if has_majority else next(iter(known.values()))
    cells = []
    for key, members in groups.items():
        value = values.get(members[0])
        cell = VariableCell(
            tuple(members), _text(members, values, full=sparks), absent=value is None
        )
        if key not in known:
            cell = replace(cell, unknown=True)
        elif members is not base:
            other = values.get(base[0])
            cell = replace(cell, note=_difference(value, other), odd=has_majority)
        cells.append(cell)
    # The range and mean of numbers, and of tensors of one value; empty for anything else.
    numbers, summary = [], ""
    for value in values.values():
        tensor = value.tensor
        number = tensor.mean if tensor is not None and tensor.size == 1 else value.number
        numbers += [number] if number is not None else []
    if len(known) > 1 and len(numbers) == len(values):
        drawn = f"  {spark(numbers)}" if sparks and len(numbers) > 2 else ""
        mean = sum(numbers) / len(numbers)
        summary = f"min {min(numbers):.4g}, mean {mean:.4g}, max {max(numbers):.4g}{drawn}"
    return VariableRow(name, tuple(cells), summary)


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
    measured = (("mean", tensor.mean), ("std", tensor.std))
    statistics = [f"{name} {value:.4g}" for name, value in measured if value is not None]
    counts = ((tensor.nans, "NaN"), (tensor.infinite, "inf"))
    statistics += [f"{count:,} {name}" for count, name in counts if count]
    part = f" of {tensor.read:,} of its values" if tensor.read < tensor.size else ""
    return f"{', '.join([what, *statistics])}{part}"


def _difference(value: Variable | None, other: Variable | None) -> str:
    """How far a value is from the other; empty if the two texts say enough."""
    if value is None or other is None:
        return ""
    one, base = value.tensor, other.tensor
    if one is not None and base is not None:
        if one.shape != base.shape or not (one.read and base.read):
            return ""
        pairs = zip(one.sample, base.sample, strict=False)
        far = [abs(a - b) for a, b in pairs if a is not None and b is not None and a != b]
        if far:
            return f"max difference {max(far):.4g}{' or more' * (one.size > len(one.sample))}"
        return "other values" if one.nans == base.nans else ""
    if value.number is not None and other.number is not None:
        return f"difference {abs(value.number - other.number):.4g}"
    if value.text != other.text:
        return ""
    return "other parameter values" if " parameters, " in value.text else "other values"


def spark(numbers: Sequence[float]) -> str:
    """A bar for each number, from the smallest to the largest; a dot if it is not a number."""
    finite = [number for number in numbers if math.isfinite(number)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(
        _BARS[round((number - least) * scale)] if math.isfinite(number) else "·"
        for number in numbers
    )
