"""Benchmarks in sentences and tables, as text and as HTML; and while they run.

Nothing is drawn while a benchmark runs: matplotlib would take a core for a fifth of a second while
the ranks are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import takewhile
from textwrap import wrap

from ddp_notebook.bench import steps
from ddp_notebook.bench.result import BenchRun, Curve, Trust, duration
from ddp_notebook.bench.steps import DEFAULT_BUCKET, StepBenchResult, StepPoint
from ddp_notebook.model import counted, format_bytes
from ddp_notebook.views import markup
from ddp_notebook.views.block_plot import Column, plot
from ddp_notebook.views.board import WIDTH
from ddp_notebook.views.table import Cell, Row, Table
from ddp_notebook.views.table import Column as TableColumn

_DIGIT_SPACE = "\N{FIGURE SPACE}"
"""A space as wide as a digit, which HTML keeps."""
_RELIABILITY = {
    Trust.GOOD: "good (the medians hold within their intervals)",
    Trust.FAIR: "fair (compare within this run, not with another machine or day)",
    Trust.NOISY: "too noisy to draw conclusions",
}
_BADGES = {
    Trust.GOOD: ("✔", "#00695c"),
    Trust.FAIR: ("~", "#8a5a00"),
    Trust.NOISY: ("✘", "#b3261e"),
}
"""A symbol, and a background on which white is readable; the words say the same."""


def _chip(trust: Trust, reasons: Sequence[str]) -> str:
    """Return the badge; where there are reasons why it is no better, it unfolds to them."""
    sign, colour = _BADGES[trust]
    style = "color: #fff; border-radius: 4px; padding: 1px 8px; font-weight: bold"
    words = f"{sign} {_RELIABILITY[trust]}"
    chip = f'Reliability: <span style="{style}; background: {colour}">{words}</span>'
    if not reasons:
        return f"<div>{chip}</div>"
    return _details(chip, _list(f"because {reason}." for reason in reasons))


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _page(heading: str, answer: str, *parts: str) -> str:
    """Return a result as HTML: what it is of, the answer in bold, and the rest. Needs no style."""
    bold = f'<div style="margin: 4px 0; font-size: 1.1em"><b>{escape(answer)}</b></div>'
    return f'<div class="ddp-bench"><div>{escape(heading)}</div>{bold}{"".join(parts)}</div>'


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul style="margin: 4px 0; max-width: 70em">{items}</ul>' if items else ""


def _table(head: Sequence[str], rows: Iterable[Row]) -> Table:
    """Return a table of numbers, whose columns are all shown."""
    return Table([TableColumn(header, right=True, always=True) for header in head], list(rows))


# -- collectives -------------------------------------------------------------------------


def title(run: BenchRun) -> str:
    """Return what was measured, on one line."""
    where = f"{run.backend} on {run.device}"
    if len(run.curves) < 2:
        return f"{run.curves[0].name}, {where}" if run.curves else where
    ops = ", ".join(dict.fromkeys(curve.op for curve in run.curves))
    return f"{ops}: {len(run.curves)} curves, {where}"


def answer(run: BenchRun) -> str:
    """Return what the run says in one sentence."""
    return next(iter(run.notes), "") if run.curves else "Nothing was measured."


def table_text(run: BenchRun, baseline: BenchRun | None = None) -> str:
    """Return the answer, a plot and the table of each curve, beside those of a baseline."""
    lines = [title(run), answer(run)]
    if run.ended:
        lines.append(f"Ended early: {run.ended}. What was measured by then is here.")
    lines += ["", *time_plots(run), "", f"Reliability: {_RELIABILITY[run.trust]}"]
    lines += [f"  because {reason}." for reason in run.reasons]
    lines += [f"• {sentence}" for sentence in run.notes[1:]]
    for curve in run.curves:
        heading = ["", curve.name] if len(run.curves) > 1 else [""]
        lines += [*heading, _sizes(curve, baseline).text()]
    lines += ["", *_foot(baseline)]
    return "\n".join(lines).rstrip()


def table_html(run: BenchRun, baseline: BenchRun | None = None, figure: str = "") -> str:
    """Return the result as HTML, with a `figure` that is HTML too."""
    ended = f"<p>Ended early: {escape(run.ended)}. What was measured by then is here.</p>"
    parts = [
        ended if run.ended else "",
        figure,
        _chip(run.trust, run.reasons),
        _list(run.notes[1:]),
    ]
    for curve in run.curves:
        summary = f"{escape(curve.name)}: {counted(len(curve.points), 'size')} as a table"
        parts.append(_details(summary, _scrolling(_sizes(curve, baseline))))
    parts += [f"<p><small>{escape(line)}</small></p>" for line in _foot(baseline)]
    return _page(title(run), answer(run), *parts)


def _scrolling(table: Table) -> str:
    return f'<div style="overflow-x: auto">{table.html()}</div>'


def time_plots(run: BenchRun) -> list[str]:
    """Return the medians of each curve as a plot of text."""
    lines: list[str] = []
    for curve in (curve for curve in run.curves if len(curve.points) > 1):
        times = [max(p.latency_us, 1e-3) for p in curve.points]
        low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        high = max(high, low + 1)
        columns = [
            Column(format_bytes(p.size_bytes), (math.log10(us) - low) / (high - low), p.precise)
            for us, p in zip(times, curve.points, strict=True)
        ]
        heading = f"{curve.name}: median time, logarithmic (░: not precise)"
        ends = (duration(10.0 ** (power - 6)) for power in (high, low))
        lines += [*([""] if lines else []), *plot(heading, columns, *ends)]
    return lines


def _sizes(curve: Curve, baseline: BenchRun | None) -> Table:
    """Return a row for each size; a number of wrong elements is highlighted."""
    # A baseline may lack curves and sizes, and have others: only equal keys are compared.
    before = next((c for c in baseline.curves if c.key == curve.key), None) if baseline else None
    medians = {p.size_bytes: f"{p.latency_us:,.1f}" for p in before.points} if before else {}
    head = [
        *("size", "median (µs)", "95 % interval (µs)"),
        *(["baseline (µs)"] if before else []),
        *("p99 (µs)", "skew (µs)", "algbw (GB/s)", "busbw (GB/s)"),
        "#wrong",
    ]
    # Three digits of different powers of ten: without padding the eye compares the wrong digits.
    algbw = _on_the_point([_three_digits(p.algbw_gb_per_s) for p in curve.points])
    busbw = _on_the_point([_three_digits(p.busbw_gb_per_s) for p in curve.points])
    rows = []
    for number, p in enumerate(curve.points):
        low, high = p.latency_interval_us
        cells = [
            format_bytes(p.size_bytes),
            f"{p.latency_us:,.1f}",
            f"{low:,.1f} – {high:,.1f}{_DIGIT_SPACE if p.precise else '?'}",
            *([medians.get(p.size_bytes, "")] if before else []),
            *(f"{time:,.1f}" for time in (p.p99_us, p.skew_us)),
            algbw[number],
            busbw[number],
        ]
        wrong = Cell(f"{p.wrong:,}", colour=markup.BAD if p.wrong else "")
        rows.append(Row([*map(Cell, cells), wrong]))
    return _table(head, rows)


def _foot(baseline: BenchRun | None) -> Iterator[str]:
    """Yield the sources of the numbers."""
    if baseline is not None:
        about = f"{baseline.backend} on {baseline.device}, measured {baseline.started or 'before'}"
        yield f"Baseline: {about}; reliability: {_RELIABILITY[baseline.trust]}."
    yield (
        "Time = slowest rank of each iteration. Skew: between its fastest and slowest rank. algbw: "
        "size over median; busbw: what each rank must send by that, as in nccl-tests. "
        "GB = 1e9 bytes."
    )


def _three_digits(value: float) -> str:
    """Return a number to three significant digits, without an exponent: ``0.000420``, ``2.81``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    # By way of the rounded number: 0.9996 has three digits as 1.00, not as 0.9996.
    power = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{min(max(2 - power, 0), 9)}f}"  # the ninth is one byte per second, in GB/s


def _on_the_point(numbers: Sequence[str]) -> list[str]:
    """Return the numbers padded with spaces, so that right-aligned their decimal points line up."""
    behind = [len(number) - len(number.partition(".")[0]) for number in numbers]
    most = max(behind, default=0)
    return [number + _DIGIT_SPACE * (most - n) for number, n in zip(numbers, behind, strict=True)]


# -- training steps ----------------------------------------------------------------------


def steps_title(result: StepBenchResult) -> str:
    """Return the model and the ranks on one line."""
    return (
        f"Training steps of {result.model}: {result.parameters:,} parameters, "
        f"{format_bytes(result.gradient_bytes)} of gradients, "
        f"{counted(result.world_size, 'rank')}, {result.backend} on {result.device}"
    )


def steps_text(result: StepBenchResult) -> str:
    """Return what was measured: the answer, a plot, the table, and what to know about it."""
    badge, reasons = steps.judge(result)
    first, *others = _sentences(result) or [""]
    head = [steps_title(result), _folded(first)]
    trust = [
        f"Reliability: {_RELIABILITY[badge]}",
        *(_folded(f"  because {reason}.") for reason in reasons),
    ]
    words = [_folded(sentence) for sentence in others]
    about = [_folded(f"Note: {note}") for note in _steps_notes(result)]
    table = [_STEPS_HEADING, _steps_table(result).text()]
    parts = (head, share_plot(result), trust, words, table, about)
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def steps_html(result: StepBenchResult, figure: str = "") -> str:
    """Return what was measured: the answer, a `figure` that is HTML, the table, and notes."""
    badge, reasons = steps.judge(result)
    first, *others = _sentences(result) or [""]
    return _page(
        steps_title(result),
        first,
        figure,
        _chip(badge, reasons),
        _list(others),
        _details(_STEPS_HEADING, _scrolling(_steps_table(result))),
        f"<small>{_list(_steps_notes(result))}</small>",
    )


def share_plot(result: StepBenchResult) -> list[str]:
    """Return the share of exposed communication against batch size as a plot of text."""
    points = result.main_points
    if result.world_size == 1 or not points:
        return []
    most = max(10, math.ceil(10 * max(p.exposed_share for p in points)) * 10)
    columns = [Column(f"{p.batch:,}", 100 * p.exposed_share / most, not p.unsure) for p in points]
    heading = "Exposed communication, % of a step, against batch per rank (░: within the noise)"
    return plot(heading, columns, f"{most} %", "0 %")


_STEPS_HEADING = "Where a step's time goes (ms)"


def _sentences(result: StepBenchResult) -> list[str]:
    """Return what the numbers mean, most important first."""
    said = [f"{result.problem} What was measured until then:"] if result.problem else []
    if result.world_size > 1 and result.points:
        said += [_hidden(result.main_points), _break_even(result), *_best_bucket(result)]
    return said


_HIDDEN = 0.1
"""Communication is called hidden where it adds at most this share to a step."""


def _hidden(points: Sequence[StepPoint]) -> str:
    """Say from which batch size on computation hides communication, beyond the noise."""
    # From the largest batch down: noise may hide it at a smaller one in between.
    hidden = list(takewhile(lambda p: p.share_interval[1] <= _HIDDEN, reversed(points)))
    last = points[-1]
    low, high = last.share_interval
    if hidden:
        where = f"From batch {hidden[-1].batch:,} on" if len(hidden) < len(points) else "Everywhere"
        return (
            f"{where} computation hides communication: it adds less than {_HIDDEN:.0%} to a step."
        )
    if last.unsure:
        return (
            "Whether computation hides communication is within the noise: at batch "
            f"{last.batch:,} it adds from 0% to {high:.0%} to a step."
        )
    return (
        f"At no batch size does computation hide communication: at batch {last.batch:,} it still "
        f"is {last.exposed_share:.0%} of a step of {ms(last.step_us)} ms (95 %: {low:.0%} to "
        f"{high:.0%})."
    )


def _best_bucket(result: StepBenchResult) -> Iterator[str]:
    """Yield which bucket size is best at the largest batch, if there are several."""
    batch = result.batches[-1]
    at = sorted((p for p in result.points if p.batch == batch), key=lambda p: p.step_us)
    if len(at) < 2:
        return
    best, worst = at[0], at[-1]
    (low, high), (least, most) = best.exposed_interval_us, worst.exposed_interval_us
    if worst.step_us - best.step_us < (high - low + most - least) / 2:
        yield f"Between bucket sizes there is no difference beyond the noise at batch {batch}."
    else:
        yield (
            f"At batch {batch} {name_bucket(best.bucket)} are best ({ms(best.step_us)} ms a step) "
            f"and {name_bucket(worst.bucket)} worst ({ms(worst.step_us)} ms)."
        )


def _break_even(result: StepBenchResult) -> str:
    ranks = f"{result.world_size} ranks process"
    # Two rates that are not further apart than this share cannot be told apart.
    # How noisy the run was decides what counts as a difference.
    noise = {Trust.GOOD: 0.05, Trust.FAIR: 0.15, Trust.NOISY: 0.3}[steps.judge(result)[0]]
    close = [p for p in result.main_points if abs(p.efficiency * p.world_size - 1) < noise]
    if close:
        return (
            f"At {steps.named_batches(close)} the difference in samples per second between "
            f"{result.world_size} ranks and a single rank is within the noise."
        )
    if result.break_even is None:
        return f"{ranks} fewer samples per second than a single rank, at every batch."
    if not result.break_even:
        return f"{ranks} more samples per second than a single rank, at every batch."
    return f"From batch {result.break_even:.0f} on, {ranks} more samples than a single rank."


def name_bucket(bucket: str) -> str:
    """Return a bucket size in a sentence: ``default buckets``, ``5 MiB buckets``."""
    return f"{bucket} buckets" if bucket == DEFAULT_BUCKET else f"{bucket} MiB buckets"


def _steps_notes(result: StepBenchResult) -> Iterator[str]:
    """Yield what to know about the numbers."""
    yield (
        f"Fed with {result.inputs}. The optimizer is SGD with a learning rate of 0. "
        f"{counted(result.threads, 'thread')} per rank, {result.cores} cores. Times are medians "
        "over steps of the slowest rank; exposed is a DDP step minus the same step under no_sync, "
        "with its 95 % interval."
    )
    yield from result.notes


def _steps_table(result: StepBenchResult) -> Table:
    head = (
        *("batch", "bucket (MiB)", "step (ms)", "forward", "backward", "exposed", "(95 %)"),
        *("optimizer", "overlapped", "samples/s", "efficiency", "steps"),
    )
    rows = (
        (
            f"{p.batch:,}",
            p.bucket,
            ms(p.step_us),
            ms(p.forward_us),
            ms(p.backward_us),
            ms(p.exposed_us),
            " to ".join(ms(end) for end in p.exposed_interval_us),
            ms(p.optimizer_us),
            ms(p.overlapped_us),
            f"{p.samples_per_s:,.0f}",
            f"{p.efficiency:.0%}" if p.efficiency <= steps.PERFECT else "noise",
            f"{p.steps:,}",
        )
        for p in result.points
    )
    return _table(head, (Row([*map(Cell, row)]) for row in rows))


def ms(value_us: float | None) -> str:
    """A time in milliseconds, to three digits: ``0.52``, ``20.1``, ``1,204``; empty for None."""
    if value_us is None:
        return ""
    value = value_us / 1e3
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _folded(line: str) -> str:
    return "\n".join(wrap(line, WIDTH, subsequent_indent="  "))


# -- while it runs -----------------------------------------------------------------------


def live(run: BenchRun | None, done: float, left_s: float | None) -> dict[str, str]:
    """Return a benchmark of collectives so far. `done` is 0 to 1, `left_s` None if not known."""
    curves = [curve for curve in run.curves if curve.points] if run is not None else []
    measured = [
        (f"{curve.name}: " if len(curves) > 1 else "")
        + ", ".join(
            f"{format_bytes(point.size_bytes)} {duration(point.latency_us / 1e6)}"
            for point in curve.points
        )
        for curve in curves
    ]
    what = title(run) if run is not None else "the benchmark begins"
    return _progress(what, done, left_s, measured)


def live_steps(
    what: str,
    result: StepBenchResult | None,
    done: float,
    left_s: float | None,
    elapsed_s: float = 0.0,
) -> dict[str, str]:
    """Return a benchmark of training steps of the model `what` so far. `done` is 0 to 1."""
    about = f"training steps of {what}"
    if not done:
        about += (
            f": each rank makes the model and tries every batch size, for {elapsed_s:.0f} s so far"
        )
    measured = [
        f"batch {point.batch:,}, {name_bucket(point.bucket)}: {ms(point.step_us)} ms a step, of "
        f"which communication adds {ms(point.exposed_us)} ms"
        for point in (result.points if result is not None else ())
    ]
    return _progress(about, done, left_s, measured)


def _progress(
    what: str, done: float, left_s: float | None, measured: Iterable[str]
) -> dict[str, str]:
    """Return a progress bar, and below it what is measured so far."""
    filled = round(30 * done)
    left = f", about {left_s:.0f} s left" if left_s is not None else ""
    bar = f"[{'█' * filled}{'·' * (30 - filled)}] {done:.0%}{left}"
    hint = "Interrupt the cell to stop, or press Cancel on the board: what is measured is kept."
    return {
        "text/plain": f"{what} {bar}",
        "text/html": (
            f"<div><div><b>{escape(what)}</b></div>"
            f'<progress max="1" value="{done:.3f}" style="width: 300px"></progress> '
            f"{done:.0%}{escape(left)}<div><small>{hint}</small></div>{_list(measured)}</div>"
        ),
    }
