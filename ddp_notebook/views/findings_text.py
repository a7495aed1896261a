"""What is wrong, and what a step of set-up gave, as plain text of at most 100 columns.

The words here (who only waits, a state's symbol, an age) are the ones the HTML view uses too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import TextWrapper

from ddp_notebook.model import (
    Category,
    Diagnosis,
    Finding,
    StepRow,
    StepTable,
    format_ranks,
    name_ranks,
)
from ddp_notebook.views.ansi import strip_ansi

WIDTH = 100
"""Columns that no line exceeds."""

HEADERS = ("ranks", "passed", "state", "on what, or why", "waits for", "since")
"""The columns of a step table, in every view."""

STATE_SYMBOLS = {"paused": "‖", "waiting": "…", "failed": "✗", "dead": "†", "done": "✓"}
"""Each is one column wide, and in every font that has box-drawing characters."""

WHAT_TO_DO = "what to do"
EVIDENCE = "evidence"
BUSY = "busy, not stuck"
FURTHER = "also found"
DOING = "what the ranks were doing"
NEXT = "next"

CALM, WRONG, UNDECIDED, PASSING = "✓", "✗", "?", "►"
"""The symbol of a diagnosis without findings, and of each kind of finding."""

_WHY = HEADERS.index("on what, or why")
_ALWAYS = ("ranks", "state")
_GAP = "  "
_WIDEST = {"ranks": 20, "passed": 19, "state": 12, "waits for": 18, "since": 12}
_NARROWEST_WHY = 9
_DEEPEST_WHO = 20
"""Names of ranks longer than this do not push all other lines to the right."""

_BREAK = "\x0b"
"""A place inside a rank set at which a line may end: a space for textwrap, then taken out."""
_LONG_RANK_SET = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?){7,}")


# --------------------------------------------------------------------------- words


def plain(text: str) -> str:
    """`text` on one line, without escape codes and what would move the cursor."""
    return " ".join("".join(_in_a_line(c) for c in strip_ansi(text)).split())


def preformatted(text: str) -> list[str]:
    """The lines of `text`, spaces as they are, without what would move the cursor."""
    lines = strip_ansi(text).expandtabs(4).splitlines() or [""]
    return ["".join(_in_a_line(c) for c in line).rstrip() for line in lines]


def _in_a_line(character: str) -> str:
    """A character that stays where it is: a space for any other space, none for what moves."""
    if character.isprintable():
        return character
    return " " if character.isspace() else ""


def symbol(finding: Finding) -> str:
    """Whether a finding is a mistake (✗), not decided (?) or will mend itself (►)."""
    if finding.passing:
        return PASSING
    return UNDECIDED if finding.category is Category.UNDECIDED else WRONG


def sentence(finding: Finding) -> str:
    """Who, and why: a finding's own line in the words of a diagnosis's headline."""
    return plain(Diagnosis((finding,)).headline)


def only_wait(finding: Finding) -> str:
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


def state_words(state: str) -> str:
    """A state behind its symbol: ``‖ paused``."""
    return f"{STATE_SYMBOLS.get(state, '•')} {plain(state)}"


def since_words(seconds: float) -> str:
    """A time span of a still picture: ``< 1 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
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


def cells(row: StepRow) -> tuple[str, ...]:
    """One row's words in the order of `HEADERS`; empty where there is nothing to say."""
    return (
        format_ranks(row.ranks),
        plain(row.passed) or "none",
        state_words(row.state),
        plain(row.text),
        name_ranks(row.waits_for) if row.waits_for else "",
        since_words(row.since_s),
    )


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns in which at least one row has something to say, and those always there."""
    return [
        column
        for column, header in enumerate(HEADERS)
        if header in _ALWAYS or any(row[column] for row in rows)
    ]


# --------------------------------------------------------------------------- diagnosis


def diagnosis(d: Diagnosis) -> str:
    """The finding, what to do, who waits, the evidence; then further findings and the ranks."""
    parts = [_finding(d.findings[0])] if d.findings else [_calm(d)]
    if d.findings[1:]:
        parts.append(f"{FURTHER}:")
        parts += [_finding(finding) for finding in d.findings[1:]]
    doing = _doing(d.doing)
    return "\n\n".join([*parts, doing] if doing else parts)


def one_line(d: Diagnosis) -> str:
    """The headline and the remedy, for an exception's message."""
    headline = plain(d.headline)
    remedy = plain(d.findings[0].remedy) if d.findings else ""
    if not remedy:
        return headline
    end = "" if headline.endswith((".", "!", "?")) else "."
    return f"{headline}{end} {WHAT_TO_DO.capitalize()}: {remedy}"


def _calm(d: Diagnosis) -> str:
    return _lines(plain(d.headline), f"{CALM} ")


def _finding(finding: Finding) -> str:
    """One finding; what belongs to it is indented below its sentence."""
    busy = f"{BUSY} · " if finding.passing else ""
    said = f"{busy}{sentence(finding)} [{finding.category.value}]"
    parts = [_lines(said, f"{symbol(finding)} ")]
    remedy, waiting = plain(finding.remedy), only_wait(finding)
    if remedy:
        parts.append(f"  {WHAT_TO_DO}:\n{_lines(remedy, '      ')}")
    if waiting:
        parts.append(_lines(waiting, "  "))
    if finding.evidence:
        facts = "\n".join(_lines(plain(fact), "    • ") for fact in finding.evidence)
        parts.append(f"  {EVIDENCE}:\n{facts}")
    return "\n\n".join(parts)


def _doing(doing: Mapping[int, str] | None) -> str:
    """What each rank did, the texts below each other."""
    folded = folded_doing(doing)
    if not folded:
        return ""
    deepest = max((len(who) for who, _ in folded if len(who) <= _DEEPEST_WHO), default=0)
    return "\n".join([f"{DOING}:", *(_who_did(who, text, deepest) for who, text in folded)])


def _who_did(who: str, text: str, deepest: int) -> str:
    """One line, or more when it is long, of who did what."""
    if len(who) <= deepest:
        return _lines(text, f"  {who}:{' ' * (deepest - len(who))} ")
    return f"{_lines(who + ':', '  ')}\n{_lines(text, '      ')}"


# --------------------------------------------------------------------------- steps


def step_table(t: StepTable) -> str:
    """The title, who arrived where, what the stage is about, further lines, what to type next."""
    parts = [_lines(plain(t.title), "")] if plain(t.title) else []
    if t.rows:
        parts.append(_table([cells(row) for row in t.rows]))
    about = [_lines(text, "") for text in (plain(t.about), plain(t.link)) if text]
    if about:
        parts.append("\n".join(about))
    if t.details:
        lines = (line for text in t.details for line in preformatted(text))
        parts.append("\n".join(_preformatted(line) for line in lines))
    if plain(t.next_call):
        parts.append(_lines(plain(t.next_call), f"{NEXT}: "))
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Header, rule and rows; every column as wide as its widest line."""
    columns = used_columns(rows)
    room = _room_for_why(rows, columns)
    head, *body = ([_fold(c, row[c], room) for c in columns] for row in (HEADERS, *rows))
    blocks = (head, *body)
    widths = [max(len(line) for block in blocks for line in block[i]) for i in range(len(columns))]
    rule = [["─" * width] for width in widths]
    return "\n".join(line for b in (head, rule, *body) for line in _block_lines(b, widths))


def _room_for_why(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    """The width that the other columns leave for what the ranks wait on."""
    others = (
        max(len(line) for row in (HEADERS, *rows) for line in _fold(column, row[column], WIDTH))
        for column in columns
        if column != _WHY
    )
    return max(_NARROWEST_WHY, WIDTH - sum(others) - len(_GAP) * (len(columns) - 1))


def _fold(column: int, text: str, room: int) -> list[str]:
    """The lines one cell takes. Never empty."""
    return _wrapped(text, room if column == _WHY else _WIDEST[HEADERS[column]]) or [""]


def _block_lines(block: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """One row of cells, each of one line or more, as lines of text."""
    for i in range(max(len(cell) for cell in block)):
        line = (cell[i] if i < len(cell) else "" for cell in block)
        yield _GAP.join(
            words.ljust(width) for words, width in zip(line, widths, strict=True)
        ).rstrip()


# --------------------------------------------------------------------------- lines


def _lines(text: str, first: str) -> str:
    """`text` behind `first`, its further lines indented as far."""
    body = _wrapped(text, WIDTH - len(first)) or [""]
    return "\n".join(
        ((first if number == 0 else " " * len(first)) + line).rstrip()
        for number, line in enumerate(body)
    )


def _wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of `width`. A long rank set is broken behind its commas."""
    breakable = _LONG_RANK_SET.sub(lambda ranks: ranks[0].replace(",", f",{_BREAK}"), text)
    wrapper = TextWrapper(
        width, replace_whitespace=False, expand_tabs=False, break_on_hyphens=False
    )
    return [line.replace(_BREAK, "") for line in wrapper.wrap(breakable)]


def _preformatted(line: str) -> str:
    """A line with its own spaces; only one that is too long is broken."""
    return line if len(line) <= WIDTH else "\n".join(_wrapped(line, WIDTH))
