"""A benchmark as a table: text for a terminal, HTML for a notebook."""

from __future__ import annotations

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

_TABLE_STYLE = "border-collapse: collapse; font-variant-numeric: tabular-nums"
_CELL_STYLE = "text-align: right; padding: 2px 10px; white-space: nowrap"
_WRONG_STYLE = f"{_CELL_STYLE}; font-weight: bold; color: #fff; background: #b3261e"


def table_text(result: BenchResult) -> str:
    """The result as a table of fixed width, its notes below it."""
    rows = [_HEADERS, *(_cells(p) for p in result.points)]
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
    body = "".join(_html_row(p) for p in result.points)
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


def _cells(point: BenchPoint) -> tuple[str, ...]:
    """One size as text, in the order of `_HEADERS`."""
    return (
        format_bytes(point.size_bytes),
        f"{point.iterations:,}",
        f"{point.latency_us:,.1f}",
        f"{point.p10_us:,.1f} – {point.p90_us:,.1f}",
        f"{point.algbw_gb_per_s:,.3f}",
        f"{point.busbw_gb_per_s:,.3f}",
        f"{point.wrong:,}",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """One row, every column as wide as its widest cell and aligned right."""
    return "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _html_row(point: BenchPoint) -> str:
    """One size as a table row; wrong results stand out."""
    *cells, wrong = _cells(point)
    style = _WRONG_STYLE if point.wrong else _CELL_STYLE
    return (
        "<tr>"
        + "".join(f'<td style="{_CELL_STYLE}">{escape(cell)}</td>' for cell in cells)
        + f'<td style="{style}">{escape(wrong)}</td></tr>'
    )
