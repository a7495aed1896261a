"""The variables of ranks as a table: text, and HTML."""

from __future__ import annotations

from html import escape

from ddp_notebook.model import Unread, VariableSection, VariableTable, format_ranks, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.markup import view
from ddp_notebook.views.table import WIDTH, Cell, Column, Row, Table, indented

NONE = "There are no variables."
_ABSENT = "—"
_COLUMNS = (
    Column("variable", widest=24, always=True, names_row=True),
    Column("≠", widest=2),
    Column("ranks", widest=18, rank_set=True, always=True),
    Column("value", fills=True, always=True, most_lines=3),
)


def text(t: VariableTable) -> str:
    """A table for the variables of each function, then the global ones."""
    parts = [
        f"{_heading(section)}\n{_table(section).text()}" for section in t.sections if section.rows
    ]
    parts += [indented(line, "") for line in _notes(t)]
    return "\n\n".join(parts) or NONE


def html(t: VariableTable) -> str:
    """Return it as HTML: no scripts, every value escaped."""
    parts = []
    for section in t.sections:
        if section.rows:
            heading = escape(_heading(section), quote=False)
            parts.append(f'<div style="font-weight: 600; margin: 8px 0 4px">{heading}</div>')
            parts.append(_table(section).html())
    style = f"margin: 8px 0 0; {markup.MUTED}"
    notes = (f'<div style="{style}">{escape(line, quote=False)}</div>' for line in _notes(t))
    return view([*parts, *notes] if parts or t.unread else [NONE])


def _heading(section: VariableSection) -> str:
    title = plain(section.title)
    return f"{title[:1].upper()}{title[1:]}, {name_ranks(section.ranks)}"


def _table(section: VariableSection) -> Table:
    """Return a line for each value; only the first of a variable is named."""
    lines = []
    for row in section.rows:
        name, differs = plain(row.name), "≠" if row.differs else ""
        for cell in row.cells:
            value = _ABSENT if cell.absent else plain(cell.text)
            # How far it is from that of the others is said behind it.
            value += f" ({cell.note})" if cell.note else ""
            texts = (name, differs, format_ranks(cell.ranks), value)
            lines.append(Row([*map(Cell, texts)], markup.WARN if cell.odd else ""))
            name = differs = ""
        if row.summary:
            lines.append(Row([*map(Cell, ("", "", "", row.summary))]))
    return Table(_COLUMNS, lines, WIDTH)


def _notes(t: VariableTable) -> list[str]:
    left_out = [
        f"{plain(section.title)}: {section.left_out:,} more are left out; %ddp_vars NAME shows one"
        for section in t.sections
        if section.left_out
    ]
    return [*map(unread_words, t.unread), *left_out]


def unread_words(unread: Unread) -> str:
    """Name the ranks whose variables are not known, and why."""
    return f"{name_ranks(unread.ranks)}: {plain(unread.why)}"
