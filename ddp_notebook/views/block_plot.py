"""A plot of twelve lines for a terminal: columns of block characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddp_notebook.views.board import WIDTH

_ROWS = 10
_EIGHTHS = " ▁▂▃▄▅▆▇█"


class Column(NamedTuple):
    """One column: its name below it, its height from 0 to 1, and whether that is certain."""

    name: str
    height: float
    sure: bool = True


def plot(heading: str, columns: Sequence[Column], top: str, bottom: str) -> list[str]:
    """Return a heading, ten lines of columns between `bottom` and `top`, and the names."""
    wide = max(2, min(8, (WIDTH - 20) // max(len(columns), 1)))
    edge = max(len(top), len(bottom))
    lines = [heading]
    for row in reversed(range(_ROWS)):
        mark = {_ROWS - 1: top, 0: bottom}.get(row, "")
        line = ""
        for column in columns:
            # A row has eight steps; the lowest is there for any height.
            filled = max(1, round(8 * _ROWS * column.height)) - 8 * row
            block = _EIGHTHS[max(0, min(8, filled))]
            line += (block if column.sure or block == " " else "░") * (wide - 1) + " "
        lines.append(f"{mark:>{edge}} ┤{line}".rstrip())
    # Every name needs a space behind it, so perhaps not all have room.
    every = -(-(max((len(column.name) for column in columns), default=0) + 1) // wide)
    names = "".join(f"{column.name:<{every * wide}}" for column in columns[::every])
    return [*lines, f"{'':>{edge}}  {names}".rstrip()]
