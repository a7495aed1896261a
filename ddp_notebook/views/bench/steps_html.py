"""Where the time of a DDP step goes, as HTML. Needs no style sheet; every value is escaped."""

from __future__ import annotations

from html import escape

from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.views.bench.steps_text import Table, notes, sentences, tables, title

_TABLE = "border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0"
_CELL = "text-align: right; padding: 2px 10px; white-space: nowrap"
_HEAD = f"{_CELL}; font-weight: 600; border-bottom: 1px solid rgba(128, 128, 128, 0.5)"
_CAPTION = "text-align: left; padding: 8px 0 2px 0; font-weight: 600; white-space: nowrap"
_LINE = "margin: 2px 0; max-width: 70em"
_NOTE = f"{_LINE}; opacity: 0.72"


def html(result: StepBenchResult) -> str:
    """What was measured: what it says in words, the tables, and what to know about it."""
    said = "".join(f'<p style="{_LINE}">{escape(line)}</p>' for line in sentences(result))
    shown = "".join(_table(table) for table in tables(result))
    known = "".join(f'<p style="{_NOTE}">{escape(note)}</p>' for note in notes(result))
    return (
        f'<div class="ddp-steps"><div style="font-weight: 600">{escape(title(result))}</div>'
        f'{said}<div style="overflow-x: auto">{shown}</div>{known}</div>'
    )


def _table(table: Table) -> str:
    caption = f'<caption style="{_CAPTION}">{escape(table.title)}</caption>'
    if not table.rows:
        return f'<p style="{_LINE}">{escape(table.title)}</p>'
    head, *rows = table.rows
    heads = "".join(f'<th scope="col" style="{_HEAD}">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table style="{_TABLE}">{caption}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )
