"""A diagnosis, what is wrong and how to fix it: as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Protocol, TypeVar

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import (
    HAS_FAILED,
    NOT_SENT,
    Category,
    Diagnosis,
    Finding,
    Ranks,
    Traceback,
    by_value,
    counted,
    format_ranks,
    name_ranks,
    verb,
)
from ddp_notebook.views import finding_code, markup
from ddp_notebook.views.ansi import plain, preformatted
from ddp_notebook.views.markup import box, view
from ddp_notebook.views.table import Cell, Column, Row, Table, age_words, indented

FIX = "fix"
EVIDENCE = "evidence"
BUSY = "busy, not stuck"
FURTHER = "also found"
RAISED = "traceback"
RAISED_TOO = "errors of other ranks"
NEXT = "next"
EXPLAIN = "%ddp_why --explain"
"""The command that explains a finding, in a notebook."""
DOING = "rank activity"

CALM, WRONG, UNDECIDED, PASSING = "✓", "✗", "?", "►"
"""The symbol of a diagnosis without findings, and of each kind of finding."""

_COLOURS = {WRONG: markup.BAD, UNDECIDED: markup.WARN, PASSING: markup.BUSY}
_MOST_TRACEBACKS, _MOST_LINES = 4, 160
"""How many different tracebacks are shown, and how much of each."""
_DOING_COLUMNS = (
    Column("rank", names_row=True, rank_set=True),
    Column("activity", fills=True, breaks=True),
)

_EDGE = f"rgba({markup.IDLE}, 0.35)"
_CARD = f"padding: 0 0 4px; margin: 0 0 10px; border-radius: 4px; border: 1px solid {_EDGE}"
_SYMBOL = "display: inline-block; width: 1.3em; font-weight: 700"
_ROW = "padding: 5px 12px 0"
_LIST = "margin: 4px 0 0; padding: 0 0 0 1.2em; list-style: disc"
_CHANGE = f"margin: 6px 0 0; white-space: pre; overflow-x: auto; {markup.MONO}"
_SUMMARY = "cursor: pointer"
_TRACEBACK = (
    f"margin: 0 0 10px; padding: 6px 10px; max-height: 24em; overflow: auto;"
    f" background: rgba({markup.IDLE}, 0.1); line-height: 1.3; {markup.MONO}"
)


class _Raised(Protocol):
    @property
    def ranks(self) -> Ranks:
        """The ranks that raised it."""


R = TypeVar("R", bound=_Raised)


def symbol(finding: Finding) -> str:
    """Return the sign of a mistake (✗), of one undecided (?), or of what passes by itself (►)."""
    if finding.passing:
        return PASSING
    return UNDECIDED if finding.category is Category.UNDECIDED else WRONG


def sentence(finding: Finding) -> str:
    """Which ranks, and why: a finding's line in the words of a diagnosis's headline."""
    return plain(finding.sentence)


def waiting_words(finding: Finding, d: Diagnosis) -> str:
    """``Rank 0 is waiting.``, ``Ranks 0,2 are waiting.``; empty for none. Once over, they were.

    A rank that has failed since then (for example because it lost its connection) is left out.
    """
    doing = d.doing or {}
    ranks = [r for r in finding.waiting if not doing.get(r, "").startswith((HAS_FAILED, NOT_SENT))]
    if not ranks:
        return ""
    one, many = ("was", "were") if d.run is not None and d.run.over else ("is", "are")
    return f"{verb(ranks, one, many).capitalize()} waiting."


def next_words(finding: Finding, d: Diagnosis, explain: str = EXPLAIN) -> str:
    """Who waits, where the code does not show it; what frees them; and where more is said."""
    shown = {rank for side in finding.sides if side.place is not None for rank in side.ranks}
    waiting = "" if shown.issuperset(finding.waiting) else waiting_words(finding, d)
    on = d.run is not None and not d.run.over
    stuck = finding.waiting and not finding.passing
    frees = "%ddp_abort frees the ranks, with their variables" if on and stuck else ""
    more = f"more: {explain.format(finding.category.value)}" if explain else ""
    following = " · ".join(filter(None, (waiting, frees, more)))
    return following if following == more else f"{NEXT}: {following}"


def past_words(d: Diagnosis) -> str:
    """The run of the findings, if it is over: ``From cell 3 (12 s ago).``."""
    run = d.run
    if run is None or not run.over or not d.findings:
        return ""
    when = f"{age_words(run.age_s)} ago" if run.age_s >= 1 else "just now"
    return f"From {plain(run.title)} ({when})."


def _more(d: Diagnosis) -> str:
    """Name the ranks whose tracebacks are not shown, and how to see them."""
    ranks = sorted(
        {rank for traceback in d.tracebacks[_MOST_TRACEBACKS:] for rank in traceback.ranks}
    )
    if not ranks:
        return ""
    return (
        f"{name_ranks(ranks).capitalize()} raised, too: %ddp_output --ranks {format_ranks(ranks)}"
    )


def divided(d: Diagnosis, raised: Sequence[R]) -> tuple[list[R], list[R]]:
    """The errors of the culprits, and those of the victims.

    Without a known cause no rank is a victim: then all errors are shown first.
    """
    finding = d.findings[0] if d.findings else None
    if finding is None or finding.category is Category.UNDECIDED or not finding.ranks:
        return list(raised), []
    # A victim's traceback is the longest and names a lost connection: shown first, it is taken for
    # the cause.
    of_culprits = [each for each in raised if set(each.ranks) & set(finding.ranks)]
    return of_culprits, [each for each in raised if each not in of_culprits]


def _lines_of(traceback: Traceback) -> list[str]:
    """The lines of a traceback; of very many, the first and the last."""
    lines = preformatted(traceback.text)
    left_out = len(lines) - _MOST_LINES
    if left_out <= 0:
        return lines
    # Where it was raised is at the end, and what called that at the beginning.
    half = _MOST_LINES // 2
    return [*lines[:half], f"[... {left_out:,} lines not shown ...]", *lines[-half:]]


def folded_doing(doing: Mapping[int, str] | None) -> list[tuple[str, str]]:
    """Who did what; ranks that did the same are named together, the lowest rank first."""
    texts = {rank: plain(text) for rank, text in (doing or {}).items()}
    return [(name_ranks(ranks), text or "nothing known") for ranks, text in by_value(texts)]


# -- text --------------------------------------------------------------------------------


def text(d: Diagnosis, explain: str = EXPLAIN) -> str:
    """Return the first finding: its code, its fix, what is next, the evidence; then further
    findings, the errors of the culprits and of other ranks, and the activity of all.

    `explain` is the command that explains it, ``{}`` its category.
    """
    first, others = divided(d, d.tracebacks[:_MOST_TRACEBACKS])
    parts = [past_words(d)]
    if d.findings:
        parts.append(_finding_text(d.findings[0], d, explain))
    else:
        parts += map(_traceback_text, first)
        parts.append(indented(plain(d.headline), f"{CALM if d.proven else PASSING} "))
    if d.findings[1:]:
        parts.append(f"{FURTHER}:")
        parts += [_finding_text(finding, d) for finding in d.findings[1:]]
    if d.findings:
        parts += map(_traceback_text, first)
    parts += [f"{RAISED_TOO}:", *map(_traceback_text, others)] if others else []
    parts.append(_more(d))
    for remark in d.remarks:
        facts = [indented(plain(fact), "    • ") for fact in remark.evidence]
        said = indented(f"{plain(remark.text)} [{remark.kind}]", f"{PASSING} ")
        parts.append("\n".join([said, *facts]))
    parts += [indented(plain(note), f"{UNDECIDED} ") for note in d.notes]
    return "\n\n".join(filter(None, [*parts, _doing_text(d.doing)]))


def _traceback_text(traceback: Traceback) -> str:
    return "\n".join([f"── {name_ranks(traceback.ranks)} ──", *_lines_of(traceback)])


def _finding_text(finding: Finding, d: Diagnosis, explain: str = "") -> str:
    """One finding: its sentence, both sides' code, the fix, what is next, the evidence."""
    busy = f"{BUSY} · " if finding.passing else ""
    headline = f"{busy}{sentence(finding)} [{finding.category.value}]"
    parts = [indented(headline, f"{symbol(finding)} ")]
    if code := finding_code.text(finding):
        parts.append(code)
    if remedy := plain(finding.remedy):
        parts.append(indented(remedy, f"{FIX}: "))
        parts += [f"     {line}" for line in preformatted(finding.patch)] if finding.patch else []
    if following := next_words(finding, d, explain):
        parts.append(indented(following, ""))
    if finding.evidence:
        facts = "\n".join(indented(plain(fact), "  • ") for fact in finding.evidence)
        parts.append(f"{EVIDENCE}:\n{facts}")
    return "\n".join(parts)


def _doing_text(doing: Mapping[int, str] | None) -> str:
    """Return the activity of each rank, the texts below each other."""
    folded = folded_doing(doing)
    if not folded:
        return ""
    # A longer rank set stands on a line of its own, and does not indent the others.
    deepest = max((len(who) for who, _ in folded if len(who) <= 20), default=0)
    lines = [f"{DOING}:"]
    for who, text in folded:
        if len(who) <= deepest:
            lines.append(indented(text, f"  {who}:{' ' * (deepest - len(who))} "))
        else:
            lines += [indented(f"{who}:", "  "), indented(text, "      ")]
    return "\n".join(lines)


# -- HTML --------------------------------------------------------------------------------


def html(d: Diagnosis, *, with_doing: bool = True) -> str:
    """Return the first finding: its code, its fix, what is next, the evidence; then further
    findings, the errors of the culprits and of other ranks, and the activity of all.
    """
    first, others = divided(d, d.tracebacks[:_MOST_TRACEBACKS])
    parts = [_line(markup.words(past_words(d)))]
    if d.findings:
        parts.append(_finding(d.findings[0], d, EXPLAIN))
    else:
        sign, colour = (CALM, markup.OK) if d.proven else (PASSING, markup.BUSY)
        parts += [*map(_traceback, first), _line(markup.words(d.headline), sign, colour)]
    if d.findings[1:]:
        parts.append(f'<div style="{markup.MUTED}; margin: 0 0 4px">{FURTHER}</div>')
        parts += [_finding(finding, d) for finding in d.findings[1:]]
    if d.findings:
        # Where the cause is known the line that raised stands above, and the message.
        undecided = d.findings[0].category is Category.UNDECIDED
        parts.append(_folded(RAISED, map(_traceback, first), is_open=undecided))
    parts.append(_folded(RAISED_TOO, map(_traceback, others)))
    parts.append(_line(markup.words(_more(d))))
    for remark in d.remarks:  # no mistake, and worth knowing
        kind = f'<span style="{markup.MUTED}; white-space: nowrap">[{remark.kind}]</span>'
        said = f"{markup.words(remark.text)} {kind}{_evidence(remark.evidence)}"
        parts.append(_line(said, PASSING, markup.BUSY))
    # A note says what is not known because a rule failed.
    parts += [_line(markup.words(note), UNDECIDED, markup.WARN) for note in d.notes]
    return view([*parts, _doing(d.doing, is_open=not d.findings) if with_doing else ""])


def _folded(title: str, parts: Iterable[str], *, is_open: bool = False) -> str:
    """Return parts below a title that unfolds them; empty without parts."""
    inside = "".join(parts)
    summary = f'<summary style="{_SUMMARY}">{title}</summary>'
    opened = " open" if is_open else ""
    return f'<details{opened} style="margin: 0 0 8px">{summary}{inside}</details>' if inside else ""


def _line(html: str, sign: str = "", colour: str = "") -> str:
    """Return a paragraph behind a coloured sign, if one is given; empty if there are no words."""
    shown = f'<span style="{_SYMBOL}; color: rgb({colour})">{sign}</span>' if sign else ""
    return f'<div style="margin: 0 0 8px">{shown}{html}</div>' if html else ""


def _traceback(traceback: Traceback) -> str:
    """Return a traceback under the names of its ranks; a long one scrolls."""
    text = escape("\n".join(_lines_of(traceback)), quote=False)
    return (
        f'<div style="margin: 0 0 4px"><b>{name_ranks(traceback.ranks)}</b></div>'
        f'<pre style="{_TRACEBACK}">{text}</pre>'
    )


def _finding(finding: Finding, d: Diagnosis, explain: str = "") -> str:
    """Return a finding as a card, its colour at the edge; one that may resolve is not bold."""
    sign = symbol(finding)
    colour = _COLOURS[sign]
    busy = f"{markup.chip(BUSY, colour)} " if finding.passing else ""
    weight = 400 if finding.passing else 600
    following = next_words(finding, d, explain)
    remedy = plain(finding.remedy)
    fix = f'<b style="color: rgb({markup.OK})">{FIX.capitalize()}</b> {markup.prose(remedy)}'
    if remedy.startswith("%"):  # to be typed as it is
        fix = box(FIX, remedy, "")
    rows = (
        f'<div style="{_ROW}">{fix}{_change(finding.patch)}</div>' if remedy else "",
        f'<div style="{_ROW}; {markup.MUTED}">{markup.prose(following)}</div>' if following else "",
        _evidence(finding.evidence),
    )
    return (
        f'<div style="{_CARD}; border-left: 4px solid rgb({colour})">'
        f'<div style="padding: 8px 12px 6px 2.2em; text-indent: -1.3em; {markup.BREAKABLE}">'
        f'<span style="{_SYMBOL}; text-indent: 0; color: rgb({colour})">{sign}</span>{busy}'
        f'<span style="font-weight: {weight}">{markup.prose(sentence(finding))}</span></div>'
        f"{_page(finding.category)}{finding_code.html(finding)}{''.join(rows)}</div>"
    )


def _page(category: Category) -> str:
    """Return the category, which unfolds its page: no address could lead there from a notebook."""
    page = catalogue.entry(category)["page"]
    told = (("Cause", page["means"]), ("How it is found", page["found"]), ("Fix", page["fix"]))
    lines = (f'<div style="{_ROW}"><b>{key}</b> {markup.prose(text)}</div>' for key, text in told)
    program = escape(page["broken"].strip(), quote=False)
    return (
        f'<details style="padding: 0 12px 6px 2.2em"><summary style="{_SUMMARY}; {markup.MUTED}">'
        f"[{category.value}]</summary>{''.join(lines)}"
        f'<div style="{_ROW}"><b>A program with it, and the change</b>'
        f'<div style="{_CHANGE}">{program}</div>{_change(page["fixed"].strip(chr(10)))}</div>'
        "</details>"
    )


def _change(diff: str) -> str:
    """Return a change of code: what goes and what comes, coloured; empty without one."""
    if not diff:
        return ""
    colours = {"+": markup.OK, "-": markup.BAD}
    lines = (
        f'<div style="background: rgba({colours[line[0]]}, 0.15)">{escape(line)}</div>'
        if line[:1] in colours
        else f"<div>{escape(line)}</div>"
        for line in preformatted(diff)
    )
    return f'<div style="{_CHANGE}">{"".join(lines)}</div>'


def _evidence(evidence: Sequence[str]) -> str:
    """The evidence, folded."""
    if not evidence:
        return ""
    facts = "".join(
        f'<li style="margin: 0; {markup.BREAKABLE}">{markup.words(fact)}</li>' for fact in evidence
    )
    count = counted(len(evidence), "fact")
    return (
        f'<details style="{_ROW}"><summary style="{_SUMMARY}">{EVIDENCE}'
        f' <span style="{markup.MUTED}">({count})</span></summary>'
        f'<ul style="{_LIST}">{facts}</ul></details>'
    )


def _doing(doing: Mapping[int, str] | None, *, is_open: bool) -> str:
    """Return the activity of each rank, as a table that can be folded."""
    rows = [Row((Cell(who), Cell(activity))) for who, activity in folded_doing(doing)]
    if not rows:
        return ""
    # A long one is folded, and one below a finding, which matters more.
    opened = " open" if is_open and len(rows) <= 8 else ""
    return (
        f'<details{opened} style="margin: 0">'
        f'<summary style="{_SUMMARY}">{DOING}</summary>'
        f"{Table(_DOING_COLUMNS, rows).html()}</details>"
    )
