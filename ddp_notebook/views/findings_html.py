"""What is wrong, and what a step of set-up gave, as HTML: no scripts, every value escaped.

All styles stand on the elements, in colours for light and dark pages: a notebook that is not
trusted loses style sheets, and the theme's variables with them. A symbol or a word stands
beside each colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from ddp_notebook.model import Diagnosis, Finding, StepRow, StepTable
from ddp_notebook.views import findings_text

_OK, _BUSY, _BAD = "43, 154, 75", "47, 127, 224", "217, 60, 60"
_WARN, _IDLE = "217, 123, 0", "128, 128, 128"
"""The middle tones that the board uses."""

_FINDING_COLOURS = {
    findings_text.WRONG: _BAD,
    findings_text.UNDECIDED: _WARN,
    findings_text.PASSING: _BUSY,
}
_STATE_COLOURS = {"paused": _BUSY, "failed": _BAD, "dead": _BAD, "done": _OK}

_MOST_OPEN_ROWS = 8
"""Of more rows than this, what the ranks were doing is folded: the finding is what counts."""

_LONGEST_WHO = 24
"""Characters of a rank set that stays on one line."""

_BREAKS = re.compile(r"[,/](?=[^\s,/])")
"""Behind these a rank set, a store key or a path may go on in the next line."""

_VIEW = "padding: 4px 0; line-height: 1.45; max-width: 60em"
_MUTED = "opacity: 0.72"
_BREAKABLE = "overflow-wrap: break-word; overflow-wrap: anywhere"
"""The first for JupyterLab, which takes the second out where a notebook is not trusted."""
_MONO = "font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.92em"
_CARD = "padding: 8px 14px 10px; margin: 0 0 10px; border-radius: 3px"
_SYMBOL = "display: inline-block; width: 1.3em; font-weight: 700"
_BELOW = "margin: 8px 0 0 1.3em"
_COPY = (
    f"display: block; margin: 3px 0 0; padding: 6px 10px; border-radius: 3px; color: inherit;"
    f" border: 1px solid rgba({_IDLE}, 0.35); background: rgba({_IDLE}, 0.1);"
    f" white-space: pre-wrap; {_BREAKABLE}; line-height: 1.4; {_MONO};"
    # One click selects all of it; where it is taken out, a triple click does.
    " user-select: all"
)
_CHIP = "display: inline-block; padding: 0 8px; border-radius: 9px; white-space: nowrap"
_TABLE = "border-collapse: collapse; table-layout: auto; margin: 0; color: inherit"
_ALIGNED = (
    "text-align: left; vertical-align: baseline; padding: 4px 10px 4px 4px; color: inherit;"
    " line-height: 1.4"
)
_ROW = f"background: none; border-top: 1px solid rgba({_IDLE}, 0.3)"
_LIST = "margin: 4px 0 0; padding: 0 0 0 1.2em; list-style: disc"
_SUMMARY = "cursor: pointer"
_PRE = (
    f"margin: 8px 0 0; padding: 0; border: 0; background: none; color: inherit;"
    f" white-space: pre-wrap; {_BREAKABLE}; word-break: normal;"  # JupyterLab's own is break-all
    f" line-height: 1.4; {_MONO}"
)


# --------------------------------------------------------------------------- diagnosis


def diagnosis(d: Diagnosis) -> str:
    """The finding, what to do, who waits, the evidence; then further findings and the ranks."""
    parts = [_finding(d.findings[0])] if d.findings else [_calm(d)]
    if d.findings[1:]:
        parts.append(f'<div style="{_MUTED}; margin: 0 0 4px">{findings_text.FURTHER}</div>')
        parts += [_finding(finding) for finding in d.findings[1:]]
    return _view([*parts, _doing(d.doing)])


def _view(parts: Sequence[str]) -> str:
    return f'<div class="ddp-findings" style="{_VIEW}">{"".join(parts)}</div>'


def _calm(d: Diagnosis) -> str:
    sign = f'<span style="{_SYMBOL}; color: rgb({_OK})">{findings_text.CALM}</span>'
    return f'<div style="margin: 0 0 8px">{sign}{_text(d.headline)}</div>'


def _finding(finding: Finding) -> str:
    """One finding as a card, its colour at the edge; what may mend itself is not in bold."""
    sign = findings_text.symbol(finding)
    colour = _FINDING_COLOURS[sign]
    card = f"{_CARD}; border-left: 4px solid rgb({colour}); background: rgba({colour}, 0.08)"
    return (
        f'<div style="{card}">{_sentence(finding, sign, colour)}'
        f"{_remedy(finding)}{_waiting(finding)}{_evidence(finding.evidence)}</div>"
    )


def _sentence(finding: Finding, sign: str, colour: str) -> str:
    """Who and why, behind the symbol, before the name of the mistake."""
    busy = f"{_chip(findings_text.BUSY, colour)} " if finding.passing else ""
    weight = 400 if finding.passing else 600
    return (
        f'<div style="padding-left: 1.3em; text-indent: -1.3em; {_BREAKABLE}">'
        f'<span style="{_SYMBOL}; text-indent: 0; color: rgb({colour})">{sign}</span>{busy}'
        f'<span style="font-weight: {weight}">{_text(findings_text.sentence(finding))}</span> '
        f'<span style="{_MUTED}; white-space: nowrap">[{finding.category.value}]</span></div>'
    )


def _remedy(finding: Finding) -> str:
    """What to do, in a box of its own."""
    if not findings_text.plain(finding.remedy):
        return ""
    return (
        f'<div style="{_BELOW}"><span style="{_MUTED}">{findings_text.WHAT_TO_DO}</span>'
        f'<code style="{_COPY}">{_text(finding.remedy)}</code></div>'
    )


def _waiting(finding: Finding) -> str:
    waiting = findings_text.only_wait(finding)
    return f'<div style="{_BELOW}">{_text(waiting)}</div>' if waiting else ""


def _evidence(evidence: Sequence[str]) -> str:
    """What proves it, folded: for who wants to check."""
    if not evidence:
        return ""
    facts = "".join(f'<li style="margin: 0; {_BREAKABLE}">{_text(fact)}</li>' for fact in evidence)
    count = f"{len(evidence)} fact{'' if len(evidence) == 1 else 's'}"
    return (
        f'<details style="{_BELOW}"><summary style="{_SUMMARY}">{findings_text.EVIDENCE}'
        f' <span style="{_MUTED}">({count})</span></summary>'
        f'<ul style="{_LIST}">{facts}</ul></details>'
    )


def _doing(doing: Mapping[int, str] | None) -> str:
    """What each rank did, as a table that can be folded."""
    folded = findings_text.folded_doing(doing)
    if not folded:
        return ""
    rows = "".join(_who_did(who, text) for who, text in folded)
    is_open = " open" if len(folded) <= _MOST_OPEN_ROWS else ""
    head = "".join(_head(header) for header in ("who", "doing"))
    return (
        f'<details{is_open} style="margin: 0">'
        f'<summary style="{_SUMMARY}">{findings_text.DOING}</summary>'
        f"{_table(head, rows)}</details>"
    )


def _who_did(who: str, text: str) -> str:
    return (
        f'<tr style="{_ROW}">{_row_head(who)}'
        f'<td style="{_ALIGNED}; {_BREAKABLE}">{_text(text)}</td></tr>'
    )


# --------------------------------------------------------------------------- steps


def step_table(t: StepTable) -> str:
    """The title, who arrived where, what the stage is about, further lines, what to type next."""
    title = f'<div style="font-weight: 600; margin: 0 0 6px">{_text(t.title)}</div>'
    return _view(
        [title if findings_text.plain(t.title) else "", _rows(t), _about(t), _details(t), _next(t)]
    )


def _rows(t: StepTable) -> str:
    """The rows under their headers; nothing where there are none."""
    if not t.rows:
        return ""
    texts = [findings_text.cells(row) for row in t.rows]
    columns = findings_text.used_columns(texts)
    head = "".join(_head(findings_text.HEADERS[column]) for column in columns)
    body = "".join(_row(row, text, columns) for row, text in zip(t.rows, texts, strict=True))
    return _table(head, body)


def _row(row: StepRow, text: Sequence[str], columns: Sequence[int]) -> str:
    """One row; that its ranks failed or died shows over all of it."""
    gone = row.state in ("failed", "dead")
    style = f"{_ROW}; background: rgba({_BAD}, 0.09)" if gone else _ROW
    body = "".join(
        _cell(findings_text.HEADERS[column], text[column], row.state) for column in columns
    )
    return f'<tr style="{style}">{body}</tr>'


def _cell(header: str, text: str, state: str) -> str:
    """One value in the form of its column."""
    match header:
        case "ranks":
            return _row_head(text)
        case "state":
            return f'<td style="{_ALIGNED}">{_chip(text, _STATE_COLOURS.get(state, _IDLE))}</td>'
        case "on what, or why":
            style = f"{_ALIGNED}; {_BREAKABLE}; min-width: 10em"
            return f'<td style="{style}">{_text(text)}</td>'
        case "since":
            return f'<td style="{_ALIGNED}; white-space: nowrap">{_text(text)}</td>'
        case _:
            return f'<td style="{_ALIGNED}">{_text(text)}</td>'


def _about(t: StepTable) -> str:
    """What the stage is about, and where to read on. Only a web address becomes a link."""
    about, link = _text(t.about), findings_text.plain(t.link)
    if link.startswith(("https://", "http://")):
        new_tab = 'target="_blank" rel="noopener noreferrer"'
        read_on = f'<a href="{escape(link)}" {new_tab}>{_text(link)}</a>'
    else:
        read_on = _text(link)
    said = "<br>".join(part for part in (about, read_on) if part)
    return f'<div style="margin: 10px 0 0; {_BREAKABLE}">{said}</div>' if said else ""


def _details(t: StepTable) -> str:
    lines = [line for text in t.details for line in findings_text.preformatted(text)]
    return f'<pre style="{_PRE}">{escape(chr(10).join(lines), quote=False)}</pre>' if lines else ""


def _next(t: StepTable) -> str:
    """What to type to go on, as easy to copy as a remedy."""
    if not findings_text.plain(t.next_call):
        return ""
    return (
        f'<div style="margin: 10px 0 0"><span style="{_MUTED}">{findings_text.NEXT}</span>'
        f'<code style="{_COPY}">{_text(t.next_call)}</code></div>'
    )


# --------------------------------------------------------------------------- pieces


def _table(head: str, body: str) -> str:
    return (
        f'<div style="overflow-x: auto; margin: 2px 0 0"><table style="{_TABLE}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(text: str) -> str:
    style = f"{_ALIGNED}; {_MUTED}; font-weight: 400; white-space: nowrap"
    return f'<th scope="col" style="{style}">{text}</th>'


def _row_head(who: str) -> str:
    # A browser would break 0-2 behind its hyphen; a set too long for a line breaks at its commas.
    wrap = "white-space: nowrap" if len(who) <= _LONGEST_WHO else "max-width: 14em"
    return f'<th scope="row" style="{_ALIGNED}; font-weight: 600; {wrap}">{_text(who)}</th>'


def _chip(text: str, colour: str) -> str:
    style = f"{_CHIP}; text-indent: 0; border: 1px solid rgb({colour})"
    return f'<span style="{style}; background: rgba({colour}, 0.16)">{_text(text)}</span>'


def _text(said: str) -> str:
    """Words for a person as HTML, with places where what is long may break."""
    # Escaped first, or the breaks would be too; what escape() writes has neither `,` nor `/`.
    return _BREAKS.sub(r"\g<0><wbr>", escape(findings_text.plain(said), quote=False))
