"""A diagnosis, what is wrong and what to do about it: as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_notebook.model import Category, Diagnosis, Finding, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.paragraphs import box, indented, view
from ddp_notebook.views.table import Cell, Column, Row, Table

WHAT_TO_DO = "what to do"
EVIDENCE = "evidence"
BUSY = "busy, not stuck"
FURTHER = "also found"
DOING = "what the ranks were doing"

CALM, WRONG, UNDECIDED, PASSING = "✓", "✗", "?", "►"
"""The symbol of a diagnosis without findings, and of each kind of finding."""

_COLOURS = {WRONG: markup.BAD, UNDECIDED: markup.WARN, PASSING: markup.BUSY}
_MOST_OPEN_ROWS = 8
"""Of more rows than this, what the ranks were doing is folded: the finding is what counts."""
_DEEPEST_WHO = 20
"""Names of ranks longer than this do not push all other lines to the right."""
_DOING_COLUMNS = (
    Column("who", names_row=True, rank_set=True),
    Column("doing", fills=True, breaks=True),
)

_CARD = "padding: 8px 14px 10px; margin: 0 0 10px; border-radius: 3px"
_SYMBOL = "display: inline-block; width: 1.3em; font-weight: 700"
_BELOW = "margin: 8px 0 0 1.3em"
_LIST = "margin: 4px 0 0; padding: 0 0 0 1.2em; list-style: disc"
_SUMMARY = "cursor: pointer"


def symbol(finding: Finding) -> str:
    """Whether a finding is a mistake (✗), not decided (?) or will mend itself (►)."""
    if finding.passing:
        return PASSING
    return UNDECIDED if finding.category is Category.UNDECIDED else WRONG


def sentence(finding: Finding) -> str:
    """Who, and why: a finding's own line in the words of a diagnosis's headline."""
    return plain(finding.sentence)


def waiting_words(finding: Finding) -> str:
    """``Rank 0 is waiting.``, ``Ranks 0,2 are waiting.``; empty for none."""
    ranks = finding.waiting
    if not ranks:
        return ""
    return f"{name_ranks(ranks).capitalize()} {'is' if len(ranks) == 1 else 'are'} waiting."


def folded_doing(doing: Mapping[int, str] | None) -> list[tuple[str, str]]:
    """Who did what; ranks that did the same are named together, the lowest rank first."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted((doing or {}).items()):
        ranks_by_text.setdefault(plain(text), []).append(rank)
    return [(name_ranks(ranks), text or "nothing known") for text, ranks in ranks_by_text.items()]


# -- text --------------------------------------------------------------------------------


def text(d: Diagnosis) -> str:
    """The finding, what to do, who waits, the evidence; then further findings and the ranks."""
    parts = [_finding_text(d.findings[0])] if d.findings else [_calm_text(d)]
    if d.findings[1:]:
        parts.append(f"{FURTHER}:")
        parts += [_finding_text(finding) for finding in d.findings[1:]]
    doing = _doing_text(d.doing)
    return "\n\n".join([*parts, doing] if doing else parts)


def one_line(d: Diagnosis) -> str:
    """The headline and the remedy, for an exception's message."""
    headline = plain(d.headline)
    remedy = plain(d.findings[0].remedy) if d.findings else ""
    if not remedy:
        return headline
    end = "" if headline.endswith((".", "!", "?")) else "."
    return f"{headline}{end} {WHAT_TO_DO.capitalize()}: {remedy}"


def _calm_text(d: Diagnosis) -> str:
    return indented(plain(d.headline), f"{CALM} ")


def _finding_text(finding: Finding) -> str:
    """One finding; the rest of it is indented below its sentence."""
    busy = f"{BUSY} · " if finding.passing else ""
    headline = f"{busy}{sentence(finding)} [{finding.category.value}]"
    parts = [indented(headline, f"{symbol(finding)} ")]
    remedy, waiting = plain(finding.remedy), waiting_words(finding)
    if remedy:
        parts.append(f"  {WHAT_TO_DO}:\n{indented(remedy, '      ')}")
    if waiting:
        parts.append(indented(waiting, "  "))
    if finding.evidence:
        facts = "\n".join(indented(plain(fact), "    • ") for fact in finding.evidence)
        parts.append(f"  {EVIDENCE}:\n{facts}")
    return "\n\n".join(parts)


def _doing_text(doing: Mapping[int, str] | None) -> str:
    """What each rank did, the texts below each other."""
    folded = folded_doing(doing)
    if not folded:
        return ""
    deepest = max((len(who) for who, _ in folded if len(who) <= _DEEPEST_WHO), default=0)
    return "\n".join([f"{DOING}:", *(_who_did(who, text, deepest) for who, text in folded)])


def _who_did(who: str, text: str, deepest: int) -> str:
    """One line, or more when it is long, of who did what."""
    if len(who) <= deepest:
        return indented(text, f"  {who}:{' ' * (deepest - len(who))} ")
    return f"{indented(who + ':', '  ')}\n{indented(text, '      ')}"


# -- HTML --------------------------------------------------------------------------------


def html(d: Diagnosis) -> str:
    """The finding, what to do, who waits, the evidence; then further findings and the ranks."""
    parts = [_finding(d.findings[0])] if d.findings else [_calm(d)]
    if d.findings[1:]:
        parts.append(f'<div style="{markup.MUTED}; margin: 0 0 4px">{FURTHER}</div>')
        parts += [_finding(finding) for finding in d.findings[1:]]
    return view([*parts, _doing(d.doing)])


def _calm(d: Diagnosis) -> str:
    sign = f'<span style="{_SYMBOL}; color: rgb({markup.OK})">{CALM}</span>'
    return f'<div style="margin: 0 0 8px">{sign}{markup.words(d.headline)}</div>'


def _finding(finding: Finding) -> str:
    """One finding as a card, its colour at the edge; what may mend itself is not in bold."""
    sign = symbol(finding)
    colour = _COLOURS[sign]
    card = f"{_CARD}; border-left: 4px solid rgb({colour}); background: rgba({colour}, 0.08)"
    return (
        f'<div style="{card}">{_sentence(finding, sign, colour)}'
        f"{_remedy(finding)}{_waiting(finding)}{_evidence(finding.evidence)}</div>"
    )


def _sentence(finding: Finding, sign: str, colour: str) -> str:
    """Who and why, behind the symbol, before the name of the mistake."""
    busy = f"{markup.chip(BUSY, colour)} " if finding.passing else ""
    weight = 400 if finding.passing else 600
    return (
        f'<div style="padding-left: 1.3em; text-indent: -1.3em; {markup.BREAKABLE}">'
        f'<span style="{_SYMBOL}; text-indent: 0; color: rgb({colour})">{sign}</span>{busy}'
        f'<span style="font-weight: {weight}">{markup.words(sentence(finding))}</span> '
        f'<span style="{markup.MUTED}; white-space: nowrap">[{finding.category.value}]</span></div>'
    )


def _remedy(finding: Finding) -> str:
    """What to do, in a box of its own."""
    return box(WHAT_TO_DO, finding.remedy, _BELOW) if plain(finding.remedy) else ""


def _waiting(finding: Finding) -> str:
    waiting = waiting_words(finding)
    return f'<div style="{_BELOW}">{markup.words(waiting)}</div>' if waiting else ""


def _evidence(evidence: Sequence[str]) -> str:
    """What proves it, folded: for who wants to check."""
    if not evidence:
        return ""
    facts = "".join(
        f'<li style="margin: 0; {markup.BREAKABLE}">{markup.words(fact)}</li>' for fact in evidence
    )
    count = f"{len(evidence)} fact{'' if len(evidence) == 1 else 's'}"
    return (
        f'<details style="{_BELOW}"><summary style="{_SUMMARY}">{EVIDENCE}'
        f' <span style="{markup.MUTED}">({count})</span></summary>'
        f'<ul style="{_LIST}">{facts}</ul></details>'
    )


def _doing(doing: Mapping[int, str] | None) -> str:
    """What each rank did, as a table that can be folded."""
    rows = [Row((Cell(who), Cell(activity))) for who, activity in folded_doing(doing)]
    if not rows:
        return ""
    is_open = " open" if len(rows) <= _MOST_OPEN_ROWS else ""
    return (
        f'<details{is_open} style="margin: 0">'
        f'<summary style="{_SUMMARY}">{DOING}</summary>'
        f"{Table(_DOING_COLUMNS, rows).html()}</details>"
    )
