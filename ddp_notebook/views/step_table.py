"""A step table, where each rank is and which it waits for: as text and as HTML."""

from __future__ import annotations

import math
from html import escape

from ddp_notebook.model import StepTable, format_ranks, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain, preformatted
from ddp_notebook.views.markup import box, view
from ddp_notebook.views.table import WIDTH, Cell, Column, Row, Table, indented, wrapped

STATE_SYMBOLS = {"paused": "‖", "waiting": "…", "failed": "✗", "dead": "†", "done": "✓"}
"""Each is one column wide and in every font that has box-drawing characters."""

NEXT = "next"

_COLUMNS = (
    Column("ranks", widest=20, always=True, names_row=True, rank_set=True),
    Column("passed", widest=19, breaks=True),
    Column("state", widest=12, always=True),
    Column("where, or why", fills=True, breaks=True),
    Column("waits for", widest=18, rank_set=True),
    Column("since", widest=12),
)
_STATE_COLOURS = {
    "paused": markup.BUSY,
    "failed": markup.BAD,
    "dead": markup.BAD,
    "done": markup.OK,
}
_PRE = (
    f"margin: 8px 0 0; padding: 0; border: 0; background: none; color: inherit;"
    f" white-space: pre-wrap; {markup.BREAKABLE}; word-break: normal;"  # Jupyter's is break-all
    f" line-height: 1.4; {markup.MONO}"
)


def text(t: StepTable) -> str:
    """The title, who arrived where, what the stage is about, further lines, what to type next."""
    about = (indented(line, "") for line in (plain(t.about), plain(t.link)) if line)
    lines = (line for detail in t.details for line in preformatted(detail))
    # A line keeps its spaces, and is folded only if it is too long.
    details = (line if len(line) <= WIDTH else "\n".join(wrapped(line, WIDTH)) for line in lines)
    parts = [
        indented(plain(t.title), ""),
        _table(t).text() if t.rows else "",
        "\n".join(about),
        "\n".join(details),
        indented(plain(t.next_call), f"{NEXT}: ") if plain(t.next_call) else "",
    ]
    return "\n\n".join(filter(None, parts))


def html(t: StepTable) -> str:
    """Return it as HTML: no scripts, every value escaped."""
    title = f'<div style="font-weight: 600; margin: 0 0 6px">{markup.words(t.title)}</div>'
    about, link = markup.words(t.about), plain(t.link)
    read_on = markup.breakable(link)
    # A link of another kind (javascript:, file:) in a saved run would act on a click.
    if link.startswith(("https://", "http://")):
        new_tab = 'target="_blank" rel="noopener noreferrer"'
        read_on = f'<a href="{escape(link)}" {new_tab}>{read_on}</a>'
    stage = "<br>".join(filter(None, (about, read_on)))
    lines = [line for detail in t.details for line in preformatted(detail)]
    parts = [
        title if plain(t.title) else "",
        _table(t).html() if t.rows else "",
        f'<div style="margin: 10px 0 0; {markup.BREAKABLE}">{stage}</div>' if stage else "",
        f'<pre style="{_PRE}">{escape(chr(10).join(lines), quote=False)}</pre>' if lines else "",
        box(NEXT, t.next_call, "margin: 10px 0 0") if plain(t.next_call) else "",
    ]
    return view(parts)


def since_words(seconds: float) -> str:
    """A time span in a static view: ``< 1 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 1:
        return "< 1 s"
    if seconds < 60:
        return f"{int(seconds)} s"
    minutes, left = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s" if left else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def _table(t: StepTable) -> Table:
    rows = []
    for row in t.rows:
        state = f"{STATE_SYMBOLS.get(row.state, '•')} {plain(row.state)}"
        cells = (
            Cell(format_ranks(row.ranks)),
            Cell(plain(row.passed) or "none"),
            Cell(state, colour=_STATE_COLOURS.get(row.state, markup.IDLE)),
            Cell(plain(row.text)),
            Cell(name_ranks(row.waits_for) if row.waits_for else ""),
            Cell(since_words(row.since_s)),
        )
        rows.append(Row(cells, markup.BAD if row.state in ("failed", "dead") else ""))
    return Table(_COLUMNS, rows, WIDTH)
