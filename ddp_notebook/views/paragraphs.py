"""The parts of views beside tables: indented text, boxes to copy from."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_notebook.views import markup
from ddp_notebook.views.table import wrapped

WIDTH = 100
"""The width of a line in characters."""

_VIEW = "padding: 4px 0; line-height: 1.45; max-width: 60em"
_COPY = (
    f"display: block; margin: 3px 0 0; padding: 6px 10px; border-radius: 3px; color: inherit;"
    f" border: 1px solid rgba({markup.IDLE}, 0.35); background: rgba({markup.IDLE}, 0.1);"
    f" white-space: pre-wrap; {markup.BREAKABLE}; line-height: 1.4; {markup.MONO};"
    # One click selects all of it; if this style is removed, a triple click does.
    " user-select: all"
)


def indented(text: str, first: str) -> str:
    """`text` behind `first`, its further lines indented as far."""
    lines = wrapped(text, WIDTH - len(first)) or [""]
    starts = [first, *[" " * len(first)] * (len(lines) - 1)]
    return "\n".join(f"{start}{line}".rstrip() for start, line in zip(starts, lines, strict=True))


def view(parts: Sequence[str]) -> str:
    """Parts of HTML as one element.

    All styles are on the elements: a notebook that is not trusted loses style sheets and the
    theme's variables. Beside each colour there is a symbol or a word.
    """
    return f'<div class="ddp-findings" style="{_VIEW}">{"".join(parts)}</div>'


def box(label: str, command: str, style: str) -> str:
    """Return a call in a box from which it is easy to copy."""
    return (
        f'<div style="{style}"><span style="{markup.MUTED}">{label}</span>'
        f'<code style="{_COPY}">{markup.words(command)}</code></div>'
    )
