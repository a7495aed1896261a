"""One line per bar, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

Numbers = Mapping[str, float]
"""What one round of a measurement gave, by name."""


@dataclass(frozen=True)
class Row:
    """One bar: what we have, what a rival has, what is wanted of it."""

    bar: str
    ours: str
    rival: str = ""
    ratio: float | None = None
    """Ours divided by the rival's."""
    wanted: str = ""
    """Empty for a number that is given for information."""
    met: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self)


class Measurement(Protocol):
    """Something that is measured in rounds. Rivals are measured in the same round."""

    name: str

    def round(self) -> Numbers:
        """Measure once."""

    def rows(self, medians: Numbers) -> list[Row]:
        """The bars, from the medians over all rounds."""


def medians(rounds: Sequence[Numbers]) -> dict[str, float]:
    """The median of each number over the rounds."""
    return {name: median(numbers[name] for numbers in rounds) for name in rounds[0]}


def seconds(value: float) -> str:
    """A time for a person: ``3.2 ms``, ``1.40 s``."""
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def compare(bar: str, ours_s: float, rival_s: float, at_most: float, rival: str) -> Row:
    """A bar on a time against a rival's: at most `at_most` times it."""
    ratio = ours_s / rival_s
    return Row(
        bar,
        seconds(ours_s),
        f"{rival} {seconds(rival_s)}",
        ratio,
        f"at most {at_most:g}x",
        ratio <= at_most,
    )


def table(rows: Sequence[Row]) -> str:
    """All rows, in columns."""
    head = ("bar", "ours", "rival", "ratio", "wanted", "met")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, tuple("─" * width for width in widths))
    return "\n".join(
        " │ ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    ratio = f"{row.ratio:.2f}x" if row.ratio is not None else ""
    met = "" if row.met is None else ("yes" if row.met else "NO")
    return (row.bar, row.ours, row.rival, ratio, row.wanted, met)
