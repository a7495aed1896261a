"""How every view's HTML looks: tones, chips, escaped text, a style sheet.

Colours come from the notebook's theme (its ``--jp-*`` variables); without a theme, as in an
exported page, text has the page's own colour. Whatever a colour says, a word says too.

A notebook that is not trusted loses the style sheet and every ``var()``. So the necessary styles
are on the elements, in colours for light and dark pages, and the sheet overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ddp_notebook.views.ansi import plain

OK, BUSY, BAD = "43, 154, 75", "47, 127, 224", "217, 60, 60"
WARN, IDLE = "217, 123, 0", "128, 128, 128"
"""Colours without a theme: the red, green and blue of middle tones."""

MUTED = "opacity: 0.72"
BREAKABLE = "overflow-wrap: break-word; overflow-wrap: anywhere"
"""The first for JupyterLab, which removes the second if a notebook is not trusted."""
MONO = "font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.92em"

_CHIP = "display: inline-block; padding: 0 8px; border-radius: 9px; text-indent: 0"
_BREAKS = re.compile(r"[,/](?=[^\s,/])")
"""After these characters a rank set, a store key or a path may be broken."""


def chip(text: str, colour: str) -> str:
    """Escaped `text` in a frame of one of the colours above."""
    style = f"{_CHIP}; border: 1px solid rgb({colour}); background: rgba({colour}, 0.16)"
    return f'<span class="ddp-chip" style="{style}">{escape(text, quote=False)}</span>'


def breakable(text: str) -> str:
    """Escaped `text` in which long words may be broken."""
    # Escaped first, or the breaks would be too; what escape() writes has neither `,` nor `/`.
    return _BREAKS.sub(r"\g<0><wbr>", escape(text, quote=False))


def words(text: str) -> str:
    """Text on one line, without escape codes, as HTML in which long words may be broken."""
    return breakable(plain(text))


def prose(text: str) -> str:
    """Words as HTML, what stands in backticks as code."""
    parts = plain(text).split("`")
    if len(parts) % 2 == 0:  # one is open, and may be the user's
        return words(text)
    code = (f"<code>{breakable(part)}</code>" for part in parts[1::2])
    return "".join(breakable(part) + next(code, "") for part in parts[::2])


_VIEW = "padding: 4px 0; line-height: 1.45; max-width: 60em"
_COPY = (
    f"display: block; margin: 3px 0 0; padding: 6px 10px; border-radius: 3px; color: inherit;"
    f" border: 1px solid rgba({IDLE}, 0.35); background: rgba({IDLE}, 0.1);"
    f" white-space: pre-wrap; {BREAKABLE}; line-height: 1.4; {MONO};"
    # One click selects all of it; if this style is removed, a triple click does.
    " user-select: all"
)


def view(parts: Sequence[str]) -> str:
    """Parts of HTML as one element.

    All styles are on the elements: a notebook that is not trusted loses style sheets and the
    theme's variables. Beside each colour there is a symbol or a word.
    """
    return f'<div class="ddp-findings" style="{_VIEW}">{"".join(parts)}</div>'


def box(label: str, command: str, style: str) -> str:
    """Return a call in a box from which it is easy to copy."""
    return (
        f'<div style="{style}"><span style="{MUTED}">{label}</span>'
        f'<code style="{_COPY}">{words(command)}</code></div>'
    )


# `.ddp-view` stands twice where the notebook's own rules for tables and code must not win;
# `!important` stands where the theme's colour goes before the one on the element.
STYLE = """<style>
.ddp-view {
  --ddp-ok: var(--jp-success-color1, #2b9a4b); --ddp-busy: var(--jp-brand-color1, #2f7fe0);
  --ddp-warn: var(--jp-warn-color1, #d97b00); --ddp-bad: var(--jp-error-color1, #d93c3c);
  --ddp-idle: rgba(128, 128, 128, 0.75); --ddp-line: rgba(128, 128, 128, 0.3);
  --ddp-mono: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace);
  color: var(--jp-ui-font-color1, inherit); font-size: var(--jp-ui-font-size1, 13px);
  font-family: var(--jp-ui-font-family, system-ui, -apple-system, "Segoe UI", sans-serif);
  line-height: 1.45; padding: 4px 0; scrollbar-width: thin;
  scrollbar-color: var(--ddp-idle) transparent }
.ddp-view .ddp-view { padding: 0 }
.ddp-headline { font-size: 1.08em }
.ddp-view.ddp-view table.ddp-board { table-layout: auto; margin: 0; border: 0;
  font-size: 1em; font-variant-numeric: tabular-nums }
.ddp-view.ddp-view .ddp-board :is(th, td) { border: 0; background: none; color: inherit;
  font-weight: inherit; line-height: inherit; max-width: none }
.ddp-view.ddp-view .ddp-board thead th { font-size: 0.88em }
.ddp-view.ddp-view .ddp-board thead, .ddp-view.ddp-view .ddp-board thead tr { border: 0 }
.ddp-view.ddp-view .ddp-board tbody tr { --ddp-c: var(--ddp-idle); background: none;
  border-top: 1px solid var(--ddp-line) }
.ddp-board tbody th div { width: max-content; max-width: 12em; white-space: normal }
.ddp-view.ddp-view .ddp-board tr.ddp-ready { --ddp-c: var(--ddp-ok) }
.ddp-view.ddp-view .ddp-board tr.ddp-late { --ddp-c: var(--ddp-warn) }
.ddp-view.ddp-view .ddp-board tr:is(.ddp-running, .ddp-setting-up) { --ddp-c: var(--ddp-busy) }
.ddp-view.ddp-view .ddp-board tbody tr:is(.ddp-failed, .ddp-dead) { --ddp-c: var(--ddp-bad);
  background: color-mix(in srgb, var(--ddp-bad) 9%, transparent) !important;
  box-shadow: inset 3px 0 var(--ddp-bad) }
.ddp-view.ddp-view .ddp-board td.ddp-doing { max-width: 48em }
.ddp-doing div { overflow-wrap: anywhere; max-height: 12em;
  overflow-y: auto; font-family: var(--ddp-mono); font-size: 0.92em }
.ddp-host div { max-width: 12em; overflow: hidden; text-overflow: ellipsis }
.ddp-chip { font-size: 0.92em; font-weight: 500; border-color: var(--ddp-c) !important;
  background: color-mix(in srgb, var(--ddp-c) 16%, transparent) !important }
.ddp-strip .ddp-passed { background: var(--ddp-ok) !important }
:is(.ddp-dead, .ddp-ended) .ddp-strip .ddp-passed { background: var(--ddp-idle) !important }
.ddp-strip .ddp-entering { border-color: var(--ddp-busy) !important;
  animation: ddp-pulse 1.4s ease-in-out infinite }
.ddp-strip .ddp-failed { background: var(--ddp-bad) !important }
.ddp-view.ddp-view .ddp-board .ddp-silent td.ddp-last-seen {
  text-decoration: underline 2px var(--ddp-warn); text-underline-offset: 4px }
.ddp-view.ddp-view ul.ddp-notes { margin: 8px 0 0; padding: 0 0 0 12px; list-style: none }
.ddp-view.ddp-view .ddp-notes li { overflow-wrap: anywhere; margin: 0;
  padding-left: 12px; text-indent: -12px; opacity: 0.85 }
.ddp-notes li::before { content: "•"; display: inline-block; width: 12px; text-indent: 0 }
.ddp-who { font-size: 0.92em; margin-bottom: 2px }
.ddp-tail { max-height: 24em; overflow: auto; display: flex; flex-direction: column-reverse }
.ddp-view.ddp-view :is(.ddp-tail, .ddp-folded) pre { margin: 0; padding: 0; border: 0;
  background: none; color: inherit; font-family: var(--ddp-mono);
  font-size: var(--jp-code-font-size, 13px); line-height: 1.35; white-space: pre-wrap;
  overflow-wrap: anywhere }
.ddp-tail img { display: block; max-width: 100%; margin: 4px 0 }
.ddp-view.ddp-view .ddp-tail pre.ddp-nothing { font-style: italic }
.ddp-stderr { background: var(--jp-rendermime-error-background, rgba(217, 60, 60, 0.12))
  !important }
.ddp-elapsed { font-variant-numeric: tabular-nums }
.ddp-fg { color: color-mix(in srgb, var(--ddp-fg) 70%, currentColor) }
.ddp-bg { background: color-mix(in srgb, var(--ddp-bg) 35%, transparent) }
.ddp-bold { font-weight: 700 }
.ddp-italic { font-style: italic }
.ddp-underline { text-decoration: underline }
@keyframes ddp-pulse { 50% { opacity: 0.3 } }
@media (prefers-reduced-motion: reduce) { .ddp-strip .ddp-entering { animation: none } }
</style>"""
