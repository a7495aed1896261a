"""A benchmark of training steps as text, HTML and a figure."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure
from pages import whole_page
from step_results import ABOUT, plan, ranks, summarise

from ddp_notebook.bench.steps import StepBenchResult
from ddp_notebook.views.bench import live_steps, ms
from ddp_notebook.views.bench import steps_html as html
from ddp_notebook.views.bench import steps_text as text
from ddp_notebook.views.bench_figures import against_batch
from ddp_notebook.views.notebook import bench_bundles

PNG = b"\x89PNG\r\n\x1a\n"
EVIL = '<script>alert("&")</script>'


def whole(world_size: int = 4, **changes: Any) -> StepBenchResult:
    """A result with everything in it, of two bucket sizes."""
    found = summarise(ABOUT, ranks(plan((8, 32, 128), ("default", "5")), world_size))
    return replace(found, **changes)


RESULT = whole()
ALONE = summarise(ABOUT, ranks(plan((8,)), 1))
CUT = summarise(replace(ABOUT, problem="Rank 1 died."), [ranks(plan((8,)))[0], []])


def drawn(figure: Figure) -> list[str]:
    """Every text in a figure."""
    from matplotlib.text import Text

    return [each.get_text() for each in figure.findobj(Text) if each.get_text()]


# -- text ------------------------------------------------------------------------------


def test_the_text_begins_with_what_matters() -> None:
    lines = text(RESULT).splitlines()
    assert lines[0] == (
        "Training steps of net: 2,097,152 parameters, 8 MiB of gradients, 4 ranks, gloo on cpu"
    )
    said = " ".join(lines)
    assert "4 ranks process more samples per second than a single rank, at every batch" in said
    assert "Between bucket sizes there is no difference beyond the noise at batch 128." in said


def test_there_is_a_row_for_each_batch_and_bucket_and_all_rows_are_in_line() -> None:
    shown = text(RESULT)
    table = shown.partition("Where a step's time goes (ms)\n")[2].partition("\n\n")[0].splitlines()
    head, rule, *rows = table
    assert [row.split()[:2] for row in rows] == [
        [batch, bucket] for bucket in ("5", "default") for batch in ("8", "32", "128")
    ]
    assert {len(row) for row in rows} == {len(rule)}
    assert len(head) == len(rule)


def test_what_cannot_be_told_from_noise_is_not_given_as_a_number() -> None:
    assert "At batch 8 communication adds" in text(RESULT)
    vague = tuple(replace(each, exposed_interval_us=(-10.0, 10.0)) for each in RESULT.points)
    said = " ".join(text(replace(RESULT, points=vague)).split())
    assert "At batch 8 the cost of communication in a step of" in said
    assert "is within the noise" in said


def test_a_bucket_size_that_is_best_beyond_the_noise_is_named() -> None:
    slow = tuple(
        replace(point, step_us=point.step_us * 2) if point.bucket == "5" else point
        for point in RESULT.points
    )
    assert "At batch 128 default buckets are best" in text(replace(RESULT, points=slow))


def test_break_even_is_said_in_words() -> None:
    for value, words in (
        (None, "fewer samples per second than a single rank, at every batch"),
        (0.0, "more samples per second than a single rank, at every batch"),
        (17.4, "From batch 17 on, 4 ranks process more samples than a single rank"),
    ):
        assert words in " ".join(text(replace(RESULT, break_even=value)).split())


def test_a_rate_as_high_as_that_of_one_rank_within_the_noise_is_not_called_higher() -> None:
    crowded = tuple(
        replace(point, alone_us=point.step_us * 1.1 / RESULT.world_size) for point in RESULT.points
    )
    said = " ".join(text(replace(RESULT, points=crowded, others_cpu=1.5)).split())
    assert "At batch 8, 32, 128 the difference in samples per second between 4 ranks" in said
    assert "at every batch" not in said


def test_what_ended_it_early_comes_first() -> None:
    shown = text(CUT).split("\n\n")[1]
    assert shown.startswith("Rank 1 died. What was measured until then:")
    assert "Rank 1 died." in html(CUT)


def test_times_are_written_with_three_digits() -> None:
    assert [ms(us) for us in (None, 0.0, 520.4, 20_130.0, 1_204_000.0, -5_000.0)] == [
        "",
        "0.00",
        "0.52",
        "20.1",
        "1,204",
        "-5.00",
    ]


# -- HTML ------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [RESULT, ALONE, CUT])
def test_the_page_says_what_the_text_says(result: StepBenchResult) -> None:
    page = " ".join(" ".join(whole_page(html(result)).texts).split())
    only_text = {"Note:"}
    said = [word for word in text(result).split() if set(word) != {"─"} and word not in only_text]
    assert [word for word in said if word not in page] == []


def test_what_others_wrote_is_escaped() -> None:
    result = whole(model=EVIL, inputs=EVIL, notes=(EVIL,), problem=EVIL)
    reader = whole_page(html(result))
    assert "script" not in reader.tags
    assert EVIL in "".join(reader.texts)


# -- figures ---------------------------------------------------------------------------


@pytest.mark.parametrize("result", [RESULT, ALONE, CUT, whole(2), whole(12)])
def test_a_figure_can_be_made_of_any_result(result: StepBenchResult) -> None:
    before = dict(rcParams)
    figure = against_batch(result)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(PNG)
    assert dict(rcParams) == before
    assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0), "white in dark notebooks too"
    for axes in figure.axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_the_figure_shows_the_share_of_communication_and_scaling_against_batch_size() -> None:
    figure = against_batch(RESULT)
    left, right = figure.axes
    shares = [100 * point.exposed_share for point in RESULT.main_points]
    assert any(list(line.get_ydata()) == shares for line in left.lines)
    rates = [point.samples_per_s for point in RESULT.main_points]
    assert any(list(line.get_ydata()) == rates for line in right.lines)
    shown = " ".join(drawn(figure))
    for words in (
        "% of the step",
        "5 MiB buckets",
        "default buckets",
        "samples per second",
        "one rank alone",
        f"{RESULT.main_points[0].efficiency:.0%}",
    ):
        assert words in shown


def test_lines_are_told_apart_without_colour() -> None:
    for axes in against_batch(RESULT).axes:
        markers = [
            line.get_marker() for line in axes.lines if line.get_marker() not in ("None", "_")
        ]
        assert len(set(markers)) == len(markers) == 2


def test_a_notebook_gets_a_figure_and_tables() -> None:
    figure, tables = bench_bundles(RESULT)
    assert set(figure) == {"image/png", "text/plain"}
    assert set(tables) == {"text/html", "text/plain"}


# -- while it runs -----------------------------------------------------------------------


def test_the_steps_that_are_measured_so_far_are_said_one_by_one() -> None:
    told = ranks(plan((8, 32, 128)))
    said = []
    for blocks in (0, 1, 2, len(told[0])):
        result = summarise(ABOUT, [each[:blocks] for each in told])
        shown = live_steps("net", result, 0.5, 3.0)["text/html"]
        whole_page(shown)
        said.append(shown.count("ms a step, of which communication adds"))
    assert said == [0, 1, 2, 3]


def test_what_is_said_while_it_runs_says_what_it_is_of() -> None:
    shown = live_steps(EVIL, RESULT, 0.25, 2.4)
    assert shown["text/plain"].startswith(f"training steps of {EVIL} [")
    assert shown["text/plain"].endswith("25%, about 7 s left")
    reader = whole_page(shown["text/html"])
    assert "script" not in reader.tags
    assert any("batch 128, default buckets: " in text for text in reader.texts)
    before = live_steps("net", None, 0.0, 12.0)
    assert "<li" not in before["text/html"]
    assert before["text/plain"].endswith("0%")
    assert (
        "each rank makes the model and tries every batch size, for 12 s so far"
        in before["text/plain"]
    )
