"""Where the time of a training step goes, in sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import chain
from textwrap import wrap

from ddp_notebook.bench.steps import trust
from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint, name_bucket
from ddp_notebook.model import counted, format_bytes
from ddp_notebook.views.bench.table import number_table, trust_text
from ddp_notebook.views.board import WIDTH
from ddp_notebook.views.table import Table

_MANY_RANKS = 8
"""The most ranks that have a column each in the table of arrivals."""

_TITLE = "padding: 8px 0 2px 0; font-weight: 600"
_LINE = "margin: 2px 0; max-width: 70em"
_NOTE = f"{_LINE}; opacity: 0.72"


@dataclass(frozen=True, slots=True)
class Section:
    """A title and the table under it, as texts whose first row is the head; without rows, none."""

    title: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def table(self) -> Table | None:
        """The rows as a table of numbers."""
        return number_table(*self.rows) if self.rows else None

    def text(self) -> str:
        """The title and the table in fixed width."""
        return f"{self.title}\n{self.table.text()}" if self.table else self.title

    def html(self) -> str:
        """The same for a page."""
        title = f'<div style="{_TITLE}">{escape(self.title)}</div>'
        return title + (self.table.html() if self.table else "")


def text(result: StepBenchResult) -> str:
    """What was measured: what it says in words, the tables, and what to know about it."""
    badge, reasons = trust.judge(result)
    because = [_folded(f"  because {reason}.") for reason in reasons]
    head = "\n".join([title(result), trust_text(badge), *because])
    parts = [head, "\n".join(_folded(line) for line in sentences(result))]
    parts += [section.text() for section in sections(result)]
    parts.append("\n".join(_folded(f"Note: {note}") for note in notes(result)))
    return "\n\n".join(part for part in parts if part)


def html(result: StepBenchResult) -> str:
    """What was measured: what it says in words, the tables, and what to know about it."""
    badge, reasons = trust.judge(result)
    because = "".join(f'<p style="{_NOTE}">because {escape(reason)}.</p>' for reason in reasons)
    words = "".join(f'<p style="{_LINE}">{escape(line)}</p>' for line in sentences(result))
    tables = "".join(section.html() for section in sections(result))
    about = "".join(f'<p style="{_NOTE}">{escape(note)}</p>' for note in notes(result))
    return (
        f'<div class="ddp-steps"><div style="font-weight: 600">{escape(title(result))}</div>'
        f'<p style="{_LINE}">{escape(trust_text(badge))}</p>'
        f"{because}{words}{tables}{about}</div>"
    )


def title(result: StepBenchResult) -> str:
    """The model and the ranks on one line."""
    return (
        f"Training steps of {result.model}: {result.parameters:,} parameters, "
        f"{format_bytes(result.gradient_bytes)} of gradients, "
        f"{counted(result.world_size, 'rank')}, {result.backend} on {result.device}"
    )


def sentences(result: StepBenchResult) -> Iterator[str]:
    """What the numbers mean, most important first."""
    if result.problem:
        yield f"{result.problem} What was measured until then:"
    late = result.straggler
    if late is not None:
        yield (
            f"Rank {late.rank} is late: in {late.share:.0%} of the steps it takes longer than the "
            f"others to the last all_reduce, by {ms(late.late_us)} ms, and they wait for it. It "
            f"loses the time in its {late.where}, and not waiting for a core."
        )
    if result.world_size == 1 or not result.points:
        return
    low, high = result.main_points[0], result.main_points[-1]
    yield f"At batch {low.batch} {_adds(low)}."
    if high is not low:
        yield f"At batch {high.batch} {_adds(high)}."
    yield _break_even(result)
    yield from _best_bucket(result)


def _adds(point: StepPoint) -> str:
    """What communication adds to a step, as far as that is known."""
    step = f"a step of {ms(point.step_us)} ms"
    if point.exposed_interval_us[0] <= 0:
        return f"what communication adds to {step} cannot be told from noise"
    return f"communication adds {ms(point.exposed_us)} ms to {step} ({point.exposed_share:.0%})"


def _break_even(result: StepBenchResult) -> str:
    ranks = f"{result.world_size} ranks"
    noise = trust.NOISE[trust.judge(result)[0]]
    gains = {p.batch: p.efficiency * result.world_size - 1 for p in result.main_points}
    close = ", ".join(str(batch) for batch, gain in gains.items() if abs(gain) < noise)
    if close:
        return (
            f"At batch {close} whether {ranks} process more samples per second than a single rank "
            "cannot be told from noise."
        )
    if result.break_even is None:
        return f"{ranks} process fewer samples per second than a single rank, at every batch."
    if not result.break_even:
        return f"{ranks} process more samples per second than a single rank, at every batch."
    return (
        f"From batch {result.break_even:.0f} on, {ranks} process more samples per second than a "
        "single rank."
    )


def _best_bucket(result: StepBenchResult) -> Iterator[str]:
    if len(result.buckets) < 2:
        return
    batch = result.batches[-1]
    at = sorted((p for p in result.points if p.batch == batch), key=lambda p: p.step_us)
    if len(at) < 2:
        return
    best, worst = at[0], at[-1]
    apart = worst.step_us - best.step_us
    noise = sum(
        point.exposed_interval_us[1] - point.exposed_interval_us[0] for point in (best, worst)
    )
    if apart < noise / 2:
        yield f"Between bucket sizes there is no difference beyond the noise at batch {batch}."
    else:
        yield (
            f"At batch {batch} {name_bucket(best.bucket)} are best ({ms(best.step_us)} ms a step) "
            f"and {name_bucket(worst.bucket)} worst ({ms(worst.step_us)} ms)."
        )


def notes(result: StepBenchResult) -> list[str]:
    """What to know about the numbers."""
    sentences = [
        f"Fed with {result.inputs}. The optimizer is SGD with a learning rate of 0. "
        f"{counted(result.threads, 'thread')} per rank, "
        f"{result.cores} cores. Times are medians over steps of the slowest rank; exposed is a "
        "DDP step minus the same step under no_sync, with its 95 % interval.",
        *result.notes,
    ]
    if any(point.own_us for point in result.points):
        sentences.insert(1, "Own time is from the beginning of a step, without waiting for a core.")
    if result.prediction is not None:
        sentences += result.prediction.assumes
    return sentences


# -- tables ----------------------------------------------------------------------------


def sections(result: StepBenchResult) -> list[Section]:
    """The tables for which there are numbers: steps, three estimates, arrivals, the prediction."""
    shown = [_steps(result)]
    shown += list(_ways(result))
    shown += list(_arrivals(result))
    if result.prediction is not None:
        shown += list(_prediction(result))
    return shown


def _steps(result: StepBenchResult) -> Section:
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
            f"{p.efficiency:.0%}" if p.efficiency <= trust.PERFECT else "noise",
            f"{p.steps:,}",
        )
        for p in result.points
    )
    return Section("Where a step's time goes (ms)", (head, *rows))


def _ways(result: StepBenchResult) -> Iterator[Section]:
    """Three estimates of the exposed communication."""
    points = [p for p in result.points if p.hook_exposed_us or p.logger_exposed_us]
    if not points:
        return
    head = ("batch", "bucket (MiB)", "by no_sync", "by a hook", "by DDP's logger", "step with hook")
    rows = (
        (
            f"{p.batch:,}",
            p.bucket,
            *(ms(time) for time in (p.exposed_us, p.hook_exposed_us, p.logger_exposed_us)),
            ms(p.hook_step_us),
        )
        for p in points
    )
    yield Section("Exposed communication (ms): the truth, and what stamps say", (head, *rows))


def _arrivals(result: StepBenchResult) -> Iterator[Section]:
    for bucket in result.buckets:
        points = [p for p in result.of_bucket(bucket) if p.arrivals]
        if not points:
            continue
        point = points[len(points) // 2]
        ranks = range(result.world_size)
        columns = ranks if result.world_size <= _MANY_RANKS else _latest(point)
        head = ("bucket", "size", *(f"rank {rank}" for rank in columns))
        rows: Iterator[tuple[str, ...]] = (
            (
                str(number),
                format_bytes(arrival.size_bytes),
                *(ms(arrival.late_us[rank]) for rank in columns),
            )
            for number, arrival in enumerate(point.arrivals)
        )
        if point.own_us:
            own = ("own time", "to the last", *(ms(point.own_us[rank]) for rank in columns))
            rows = chain(rows, [own])
        what = f"{name_bucket(bucket)} at batch {point.batch}"
        yield Section(f"How late each rank comes to each all_reduce (ms), {what}", (head, *rows))


def _latest(point: StepPoint) -> list[int]:
    """With many ranks, those that reach the last bucket last."""
    late = point.arrivals[-1].late_us
    return sorted(sorted(range(len(late)), key=lambda rank: -late[rank])[:_MANY_RANKS])


def _prediction(result: StepBenchResult) -> Iterator[Section]:
    prediction = result.prediction
    assert prediction is not None
    if prediction.refused:
        yield Section(f"No prediction: {prediction.refused}.", ())
        return
    head = ("batch", "bucket (MiB)", "measured (ms)", "model (ms)", "error", "model (ms)")
    ranks = ("", "", f"{result.world_size} ranks", f"{result.world_size} ranks", "")
    rows = (
        (
            f"{here.batch:,}",
            here.bucket,
            ms(here.measured_us),
            ms(here.step_us),
            "" if here.error is None else f"{here.error:+.0%}",
            ms(there.step_us),
        )
        for here, there in zip(prediction.checked, prediction.steps, strict=True)
    )
    worst = max(prediction.errors, default=0.0)
    what = f"Predicted step, a model: off by at most {worst:.0%} where it can be checked"
    what += f", perhaps by {prediction.within:.0%} at {prediction.world_size} ranks"
    yield Section(what, (head, (*ranks, f"{prediction.world_size} ranks"), *rows))


def ms(value_us: float | None) -> str:
    """A time in milliseconds, to three digits: ``0.52``, ``20.1``, ``1,204``; empty for None."""
    if value_us is None:
        return ""
    value = value_us / 1e3
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _folded(line: str) -> str:
    return "\n".join(wrap(line, WIDTH, subsequent_indent="  "))
