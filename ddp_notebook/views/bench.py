"""A benchmark as a table: text for a terminal, HTML for a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ddp_notebook.model import BenchPoint, BenchResult, format_bytes

_HEADERS = (
    "size",
    "iterations",
    "latency (µs)",
    "p10 – p90 (µs)",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "wrong",
)

_MOST_DECIMALS = 9
"""Of a bandwidth in GB/s: one byte per second."""

_TABLE_STYLE = "border-collapse: collapse; font-variant-numeric: tabular-nums"
_CELL_STYLE = "text-align: right; padding: 2px 10px; white-space: nowrap"
_WRONG_STYLE = f"{_CELL_STYLE}; font-weight: bold; color: #fff; background: #b3261e"


def table_text(result: BenchResult) -> str:
    """The result as a table of fixed width, its notes below it."""
    rows = [_HEADERS, *_rows(result.points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADERS))]
    lines = [title(result), "", *(_line(row, widths) for row in rows)]
    if not result.points:
        lines.append("Nothing was measured.")
    if result.notes:
        lines += ["", *(f"Note: {note}" for note in result.notes)]
    return "\n".join(lines)


def table_html(result: BenchResult) -> str:
    """The result as an HTML table, its notes below it. Needs no style sheet."""
    head = "".join(f'<th scope="col" style="{_CELL_STYLE}">{escape(h)}</th>' for h in _HEADERS)
    rows = zip(result.points, _rows(result.points), strict=True)
    body = "".join(_html_row(row, wrong=point.wrong > 0) for point, row in rows)
    if not result.points:
        body = f'<tr><td colspan="{len(_HEADERS)}">Nothing was measured.</td></tr>'
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.notes)
    return (
        f'<div class="ddp-bench"><table style="{_TABLE_STYLE}">'
        f'<caption style="text-align: left">{escape(title(result))}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
    )


def title(result: BenchResult) -> str:
    """What was measured, on one line."""
    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size} ranks"
    return f"{result.op} of {result.dtype}, {ranks}, {result.backend} on {result.device}"


def _rows(points: Sequence[BenchPoint]) -> list[tuple[str, ...]]:
    """The sizes as text, each in the order of `_HEADERS`."""
    algbw = _on_the_point([_three_digits(p.algbw_gb_per_s) for p in points])
    busbw = _on_the_point([_three_digits(p.busbw_gb_per_s) for p in points])
    return [
        (
            format_bytes(p.size_bytes),
            f"{p.iterations:,}",
            f"{p.latency_us:,.1f}",
            f"{p.p10_us:,.1f} – {p.p90_us:,.1f}",
            algbw[number],
            busbw[number],
            f"{p.wrong:,}",
        )
        for number, p in enumerate(points)
    ]


def _three_digits(value: float) -> str:
    """A number to three significant digits, without an exponent: ``0.000420``, ``2.81``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    power = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{min(max(2 - power, 0), _MOST_DECIMALS)}f}"


def _on_the_point(numbers: Sequence[str]) -> list[str]:
    """The numbers with spaces behind them, so that aligned right their points are in line."""
    behind = [len(number) - len(number.partition(".")[0]) for number in numbers]
    most = max(behind, default=0)
    return [number + " " * (most - n) for number, n in zip(numbers, behind, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """One row, every column as wide as its widest cell and aligned right."""
    return "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _html_row(row: Sequence[str], *, wrong: bool) -> str:
    """One size as a table row; wrong results stand out."""
    styles = [_CELL_STYLE] * (len(row) - 1) + [_WRONG_STYLE if wrong else _CELL_STYLE]
    body = "".join(
        f'<td style="{style}">{_as_wide_as_digits(escape(cell))}</td>'
        for style, cell in zip(styles, row, strict=True)
    )
    return f"<tr>{body}</tr>"


def _as_wide_as_digits(cell: str) -> str:
    """A cell whose last spaces a page keeps, each as wide as a digit."""
    text = cell.rstrip(" ")
    return text + "\N{FIGURE SPACE}" * (len(cell) - len(text))
