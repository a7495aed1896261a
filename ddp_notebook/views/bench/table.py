"""A benchmark of collectives in sentences and tables: text and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from ddp_notebook.bench.results import (
    BenchPoint,
    BenchRun,
    Change,
    Curve,
    CurveChange,
    Trust,
)
from ddp_notebook.model import format_bytes
from ddp_notebook.views import markup
from ddp_notebook.views.table import Cell, Column, Row, Table

_HEADERS = (
    "size",
    "iterations",
    "median (µs)",
    "95 % interval (µs)",
    "mean (µs)",
    "p90 (µs)",
    "p99 (µs)",
    "skew (µs)",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "#wrong",
)

_MOST_DECIMALS = 9
"""One byte per second, in GB/s."""

_DIGIT_SPACE = "\N{FIGURE SPACE}"
"""A space as wide as a digit, which HTML keeps."""
_BADGES = {
    Trust.GOOD: ("✔", "#00695c"),
    Trust.FAIR: ("~", "#8a5a00"),
    Trust.NOISY: ("✘", "#b3261e"),
}
"""A symbol, and a background on which white is readable; the words say the same."""
_BADGE_STYLE = "color: #fff; border-radius: 4px; padding: 1px 8px; font-weight: bold"
_MEANINGS = {
    Trust.GOOD: "the medians hold within their intervals",
    Trust.FAIR: "compare within this run, not with another machine or day",
    Trust.NOISY: "do not conclude from these numbers",
}


def table_text(run: BenchRun, changes: Sequence[CurveChange] = ()) -> str:
    """The result in words and as tables of fixed width."""
    lines = [title(run), trust_text(run.trust)]
    if run.ended:
        lines.append(f"Ended early: {run.ended}. What was measured by then is here.")
    lines += [f"  because {reason}." for reason in run.reasons]
    lines += [f"• {sentence}" for sentence in (*(_compared(c) for c in changes), *run.notes)]
    for curve in run.curves:
        heading = ["", curve.name] if len(run.curves) > 1 else [""]
        lines += [*heading, _table(curve).text()]
    if not run.curves:
        lines.append("Nothing was measured.")
    lines += ["", *_foot(run)]
    return "\n".join(lines).rstrip()


def trust_text(trust: Trust) -> str:
    """The badge of a benchmark in words."""
    return f"Trust: {trust} ({_MEANINGS[trust]})"


def table_html(run: BenchRun, changes: Sequence[CurveChange] = ()) -> str:
    """The result as HTML. Needs no style sheet."""
    sign, colour = _BADGES[run.trust]
    badge = (
        f'<span style="{_BADGE_STYLE}; background: {colour}">{sign} {escape(run.trust)}</span> '
        f"{escape(_MEANINGS[run.trust])}"
    )
    ended = ""
    if run.ended:
        ended = (
            f"<p><b>Ended early:</b> {escape(run.ended)}. What was measured by then is here.</p>"
        )
    reasons = _list(f"because {reason}." for reason in run.reasons)
    words = _list((*(_compared(change) for change in changes), *run.notes))
    tables = "".join(_html_table(run, curve) for curve in run.curves)
    foot = "".join(f"<p><small>{escape(line)}</small></p>" for line in _foot(run))
    return (
        f'<div class="ddp-bench"><p><b>{escape(title(run))}</b> {badge}</p>{ended}{reasons}'
        f"{words}{tables or '<p>Nothing was measured.</p>'}{foot}</div>"
    )


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul style="margin: 4px 0">{items}</ul>' if items else ""


def _html_table(run: BenchRun, curve: Curve) -> str:
    summary = f"{escape(curve.name)}: {len(curve.points)} sizes as a table"
    opened = " open" if len(run.curves) == 1 else ""
    return f"<details{opened}><summary>{summary}</summary>{_table(curve).html()}</details>"


def _table(curve: Curve) -> Table:
    """A row for each size; a number of wrong elements is highlighted."""
    rows = [
        Row([*map(Cell, cells), Cell(count, colour=markup.BAD if point.wrong else "")])
        for point, (*cells, count) in zip(curve.points, _rows(curve.points), strict=True)
    ]
    return Table(_number_columns(_HEADERS), rows)


def number_table(head: Sequence[str], *rows: Sequence[str]) -> Table:
    """A table of numbers, whose columns are all shown."""
    return Table(_number_columns(head), [Row([*map(Cell, row)]) for row in rows])


def _number_columns(head: Sequence[str]) -> list[Column]:
    return [Column(header, right=True, always=True) for header in head]


def title(run: BenchRun) -> str:
    """What was measured, on one line."""
    if not run.curves:
        return f"{run.backend} on {run.device}"
    if len(run.curves) == 1:
        return f"{run.curves[0].name}, {run.backend} on {run.device}"
    ops = ", ".join(dict.fromkeys(curve.op for curve in run.curves))
    return f"{ops}: {len(run.curves)} curves, {run.backend} on {run.device}"


def _compared(change: CurveChange) -> str:
    """A curve against the baseline's, in words."""
    changed = [p.change for p in change.points if p.change is not Change.SAME]
    noisy = Change.UNDECIDED in changed
    if change.change is Change.SAME:
        some = f"{len(changed)} of {len(change.points)} sizes"
        some = f" ({some} {'are too noisy to say' if noisy else 'differ'})" if changed else ""
        return f"Against the baseline {change.curve.name}: {change.change}{some}."
    if change.change is Change.UNDECIDED:
        return (
            f"Against the baseline {change.curve.name} took {change.ratio:.2f} times its "
            "time, but one of the two runs is too noisy to conclude from: the machine may have "
            "been busier. Measure both again when it is quiet."
        )
    sizes = f"{changed.count(change.change)} of {len(change.points)} sizes"
    if change.together is not None:
        low, high = change.together
        alone = "they are too noisy to say" if noisy else f"{sizes} changed"
        return (
            f"Against the baseline {change.curve.name} is {change.change}: "
            f"{change.ratio:.2f} times its time over all sizes together (99.9 % interval "
            f"{low:.2f} to {high:.2f}); by themselves {alone}."
        )
    return (
        f"Against the baseline {change.curve.name} is {change.change}: {change.ratio:.2f} "
        f"times its time at {sizes}, whose 95 % intervals do not touch."
    )


def _foot(run: BenchRun) -> list[str]:
    """The sources of the numbers."""
    lines = []
    floors = [
        f"{floor.what} "
        + (f"{floor.latency_us:.3g} µs, " if floor.latency_us else "")
        + f"{floor.bandwidth_gb_per_s:.3g} GB/s ({floor.source})"
        for floor in run.floors
    ]
    if floors:
        lines.append(f"This machine: {'; '.join(floors)}.")
    lines.append(
        "An iteration took as long as on its slowest rank. Skew: between its fastest and slowest "
        "rank. algbw: size over median; busbw: what each rank must send by that, as in nccl-tests. "
        "GB = 1e9 bytes."
    )
    return lines


def _rows(points: Sequence[BenchPoint]) -> list[tuple[str, ...]]:
    """The sizes as text, each in the order of `_HEADERS`."""
    algbw = _on_the_point([_three_digits(p.algbw_gb_per_s) for p in points])
    busbw = _on_the_point([_three_digits(p.busbw_gb_per_s) for p in points])
    return [
        (
            format_bytes(p.size_bytes),
            f"{p.iterations:,}",
            f"{p.latency_us:,.1f}",
            f"{p.latency_interval_us[0]:,.1f} – {p.latency_interval_us[1]:,.1f}"
            + (_DIGIT_SPACE if p.precise else "?"),
            f"{p.mean_us:,.1f}",
            f"{p.p90_us:,.1f}",
            f"{p.p99_us:,.1f}",
            f"{p.skew_us:,.1f}",
            algbw[number],
            busbw[number],
            f"{p.wrong:,}",
        )
        for number, p in enumerate(points)
    ]


def _three_digits(value: float) -> str:
    """A number to three significant digits, without an exponent: ``0.000420``, ``2.81``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    power = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{min(max(2 - power, 0), _MOST_DECIMALS)}f}"


def _on_the_point(numbers: Sequence[str]) -> list[str]:
    """The numbers padded with spaces, so that right-aligned their decimal points line up."""
    behind = [len(number) - len(number.partition(".")[0]) for number in numbers]
    most = max(behind, default=0)
    return [number + _DIGIT_SPACE * (most - n) for number, n in zip(numbers, behind, strict=True)]
