"""The first index at which a tensor differs between ranks: by checksums of smaller parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.model import RankVariables, TensorFacts, VariableCell, VariableRow, VariableTable
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import MOST_VALUES

if TYPE_CHECKING:
    from ddp_notebook.session.tools.debugger.own_ranks import OwnRanks

_ASK_TIMEOUT_S = 1.0
_MOST_CELLS = 3
"""Tensors compared per row: with more, they probably differ everywhere."""
_FAR = "max difference"
LARGEST = 2**24
"""Tensors with more values than this are not compared."""


def placed(
    table: VariableTable, values: Sequence[RankVariables], subject: OwnRanks
) -> VariableTable:
    """`table`, of one expression, with the index at which tensors differ from most ranks'."""
    facts = {
        variables.rank: variable.tensor
        for variables in values
        for scope in variables.scopes
        for variable in scope.variables
        if variable.tensor is not None
    }
    sections = tuple(
        replace(section, rows=tuple(_row(row, facts, subject) for row in section.rows))
        for section in table.sections
    )
    return replace(table, sections=sections)


def _row(row: VariableRow, facts: Mapping[int, TensorFacts], subject: OwnRanks) -> VariableRow:
    base = next((cell for cell in row.cells if not cell.note and not cell.odd), None)
    if base is None or len(row.cells) < 2:
        return row
    cells = [
        _cell(cell, base.ranks[0], facts, subject) if number <= _MOST_CELLS else cell
        for number, cell in enumerate(row.cells)
    ]
    return replace(row, cells=tuple(cells))


def _cell(
    cell: VariableCell, base: int, facts: Mapping[int, TensorFacts], subject: OwnRanks
) -> VariableCell:
    rank = cell.ranks[0]
    own, other = facts.get(rank), facts.get(base)
    if rank == base or own is None or other is None or not _comparable(own, other):
        return cell
    index, far = _first((base, rank), own.size, subject)
    return cell if index is None else replace(cell, note=_note(cell.note, index, far, own))


def _note(note: str, index: int, far: float | None, own: TensorFacts) -> str:
    if far and own.size <= MOST_VALUES:
        note = f"{_FAR} {far:.4g}"
    elif far and not note.startswith(_FAR):
        note = f"{_FAR} {far:.4g} or more"
    place = f"first at {unravelled(index, own.shape)}"
    return f"{note}, {place}" if note else place


def _comparable(own: TensorFacts, other: TensorFacts) -> bool:
    was_read = bool(own.read and other.read)
    return was_read and own.shape == other.shape and 1 < own.size <= LARGEST


def _first(ranks: tuple[int, int], size: int, subject: OwnRanks) -> tuple[int | None, float | None]:
    """The index of the first of `size` values that differs between both; None if unknown.

    Also the largest difference among the values read: all of them if they are few.
    """
    begin, end, far = 0, size, None
    while True:
        request = calls.Part(begin, end)
        answers = subject.ask(ranks, calls.CHECKSUMS, request, _ASK_TIMEOUT_S)
        checksums = [answer for answer in answers.values() if isinstance(answer, calls.Checksums)]
        if len(checksums) < len(ranks) or not all(checksum.step for checksum in checksums):
            return None, far
        one, other = checksums
        pairs = zip(one.of, other.of, strict=False)
        number = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if number is None:
            return None, far
        far = _apart(one, other) or far
        begin, step = begin + number * one.step, one.step
        if step == 1:
            return begin, far
        end = min(begin + step, end)


def _apart(one: calls.Checksums, other: calls.Checksums) -> float | None:
    """The largest difference of the values read; None without any."""
    pairs = zip(one.values, other.values, strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def unravelled(index: int, shape: Sequence[int]) -> list[int]:
    """A flat index of a tensor as a multi-dimensional one."""
    found = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return found[::-1]
