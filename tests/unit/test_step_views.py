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

from ddp_notebook.bench.intervals import median_interval
from ddp_notebook.bench.steps import StepBenchResult
from ddp_notebook.views.bench import live_steps, ms, share_plot
from ddp_notebook.views.bench import steps_html as html
from ddp_notebook.views.bench import steps_text as text
from ddp_notebook.views.bench_figures import against_batch
from ddp_notebook.views.notebook import bench_bundle

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
    assert "░" not in text(RESULT).partition("noise)")[2]
    vague = tuple(replace(each, exposed_interval_us=(-10.0, 1e5)) for each in RESULT.points)
    said = " ".join(text(replace(RESULT, points=vague)).split())
    assert "Whether computation hides communication is within the noise" in said
    assert "░" in said.partition("noise)")[2]


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
    assert "At batches 8, 32 and 128 the difference in samples per second between 4 ranks" in said
    assert "at every batch" not in said


def test_what_ended_it_early_comes_first() -> None:
    assert text(CUT).splitlines()[1] == "Rank 1 died. What was measured until then:"
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
    written = text(result).replace("\n".join(share_plot(result)), "")
    said = [word for word in written.split() if set(word) != {"─"} and word not in only_text]
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
    assert "<svg" in bench_bundle(result)["text/html"]
    assert dict(rcParams) == before
    assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0), "a file is white in dark notebooks too"
    for axes in figure.axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_the_main_panel_is_the_share_of_communication_with_its_interval() -> None:
    left, _ = against_batch(RESULT).axes
    assert [bar.get_height() for bar in left.patches] == [
        pytest.approx(100 * point.exposed_share) for point in RESULT.points
    ]
    whiskers = [segment for each in left.collections for segment in each.get_segments()]
    assert [(low[1], high[1]) for low, high in whiskers] == [
        pytest.approx([100 * end for end in point.share_interval]) for point in RESULT.points
    ]
    shown = " ".join(drawn(against_batch(RESULT)))
    for words in ("% of a step (95 %)", "5 MiB buckets", "default buckets"):
        assert words in shown


def test_only_a_share_that_may_be_nothing_is_hatched() -> None:
    assert not any(bar.get_hatch() for bar in against_batch(RESULT).axes[0].patches)
    vague = [replace(p, exposed_interval_us=(-1.0, p.exposed_us)) for p in RESULT.points[:1]]
    figure = against_batch(replace(RESULT, points=(*vague, *RESULT.points[1:])))
    hatched = [bool(bar.get_hatch()) for bar in figure.axes[0].patches]
    assert hatched == [True, *[False] * (len(RESULT.points) - 1)]
    assert "hatched: within the noise" in drawn(figure)


def test_beside_it_are_the_samples_per_second_of_one_rank_of_all_and_as_ideal() -> None:
    _, right = against_batch(RESULT).axes
    assert (right.get_xscale(), right.get_yscale()) == ("log", "log")
    lines = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    points = RESULT.main_points
    alone = [point.batch / point.alone_us * 1e6 for point in points]
    assert lines["4 ranks"] == [point.samples_per_s for point in points]
    assert lines["one rank alone"] == alone
    assert lines["4 times that: ideal"] == [4 * rate for rate in alone]
    assert f"{points[0].efficiency:.0%}" in drawn(against_batch(RESULT))
    low, high = right.collections[0].get_segments()[0][:, 1]
    slow, middle, fast = median_interval([points[0].times_us])
    rate = points[0].samples_per_s
    assert (low, high) == (pytest.approx(rate * middle / fast), pytest.approx(rate * middle / slow))


def test_bars_of_bucket_sizes_differ_by_colour_and_curves_by_marker() -> None:
    left, right = against_batch(RESULT).axes
    assert len({bar.get_facecolor() for bar in left.patches}) == 2
    markers = [line.get_marker() for line in right.lines if line.get_label()[:1] in "4o"]
    assert sorted(markers) == ["None", "o", "s"]


def test_a_notebook_gets_the_answer_a_figure_and_folded_tables() -> None:
    shown = bench_bundle(RESULT)["text/html"]
    places = [shown.index(part) for part in ("<b>", "<svg", "Reliability:", "<details>")]
    assert places == sorted(places)
    assert "<title>batch 8, step of " in shown


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.0, 0.05), "Everywhere computation hides communication: it adds less than 10%"),
        ((0.2, 0.3), "At no batch size does computation hide communication: at batch 128 it still"),
        ((-0.2, 0.3), "Whether computation hides communication is within the noise: at batch 128"),
    ],
)
def test_where_computation_hides_communication_is_one_sentence_and_the_first(
    ends: tuple[float, float], words: str
) -> None:
    points = tuple(
        replace(p, exposed_interval_us=(ends[0] * p.step_us, ends[1] * p.step_us))
        for p in RESULT.points
    )
    assert f"<b>{words}" in html(replace(RESULT, points=points))
    assert words.split(":")[0] in " ".join(text(replace(RESULT, points=points)).split())


def test_from_the_batch_on_it_is_hidden_where_all_larger_ones_hide_it_too() -> None:
    shares = {8: 0.05, 32: 0.5, 128: 0.05}
    points = tuple(
        replace(p, exposed_interval_us=(0.0, shares[p.batch] * p.step_us)) for p in RESULT.points
    )
    assert "From batch 128 on computation hides" in html(replace(RESULT, points=points))


def test_a_terminal_gets_a_plot_of_twelve_lines() -> None:
    lines = share_plot(RESULT)
    assert len(lines) == 12
    assert lines[11].split() == ["8", "32", "128"]
    assert "\n".join(lines) in text(RESULT)
    assert share_plot(ALONE) == []


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
    shown = live_steps(EVIL, RESULT, 0.25, 7.2)
    assert shown["text/plain"].startswith(f"training steps of {EVIL} [")
    assert shown["text/plain"].endswith("25%, about 7 s left")
    reader = whole_page(shown["text/html"])
    assert "script" not in reader.tags
    assert any("batch 128, default buckets: " in text for text in reader.texts)
    before = live_steps("net", None, 0.0, None, 12.0)
    assert "<li" not in before["text/html"]
    assert before["text/plain"].endswith("0%")
    assert (
        "each rank makes the model and tries every batch size, for 12 s so far"
        in before["text/plain"]
    )
