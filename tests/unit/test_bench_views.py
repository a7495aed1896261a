"""A benchmark as a table, as a figure, and while it runs."""

from __future__ import annotations

import html
import io
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from bench_runs import bench_run
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchRun, Trust, duration
from ddp_notebook.views import bench
from ddp_notebook.views.bench import live
from ddp_notebook.views.bench_figures import _time_range, against_size
from ddp_notebook.views.notebook import bench_bundles

RUN = bench_run(noise=0.05)
NOTHING = replace(RUN, curves=())
SEVERAL = bench_run(Plan(ops=("all_reduce", "broadcast", "barrier"), factor=16))


# -- the table ---------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_size_in_columns() -> None:
    text = bench.table_text(RUN)
    lines = [line for line in text.splitlines() if re.match(r"\s*\d+ \w*B ", line)]
    assert len(lines) == len(RUN.points)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:2] == ["4", "B"]
    assert "all_reduce of float32, 2 ranks, gloo on cpu" in text
    assert "Reliability: good" in text


def test_medians_that_are_not_known_well_have_a_question_mark() -> None:
    vague = bench.table_text(bench_run(drift=0.3, seed=1))
    assert vague.count("?") >= 10
    assert "?" not in bench.table_text(bench_run(noise=0.01))


def test_several_curves_are_several_tables() -> None:
    text = bench.table_text(SEVERAL)
    assert "all_reduce, broadcast, barrier: 3 curves, gloo on cpu" in text
    assert text.count("median (µs)") == 3
    assert "\nbarrier, 2 ranks\n" in text


def test_a_table_of_nothing_says_so() -> None:
    assert "Nothing was measured." in bench.table_text(NOTHING)
    assert "Nothing was measured." in bench.table_html(NOTHING)


def test_the_html_has_the_same_cells_and_sentences_as_the_text() -> None:
    shown = html.unescape(re.sub(r"<[^>]+>", " ", bench.table_html(RUN)))
    for point in RUN.points:
        assert f"{point.latency_us:,.1f}" in shown
    for sentence in (*RUN.notes, *RUN.reasons):
        assert sentence in shown


def test_wrong_results_stand_out() -> None:
    shown = bench.table_html(bench_run(wrong={16: 3}))
    assert shown.count("background: #b3261e") == 1  # the badge
    assert shown.count("ddp-chip") == 1  # the cell
    assert not re.search("background: #b3261e|ddp-chip", bench.table_html(RUN))


def test_nothing_in_a_run_can_become_markup() -> None:
    evil = "<script>&\"'"
    run = replace(
        RUN,
        backend=evil,
        device=evil,
        ended=evil,
        notes=(evil,),
        reasons=(evil,),
        curves=(replace(RUN.curves[0], op=evil, dtype=evil),),
    )
    for shown in (bench.table_html(run), live(run, 0.5, 3.0)["text/html"]):
        assert "<script" not in shown


def test_a_run_that_was_cut_short_says_so_first() -> None:
    cut = replace(RUN, ended="rank 1 died")
    assert "Ended early: rank 1 died" in bench.table_text(cut).splitlines()[2]
    assert "Ended early" in bench.table_html(cut)


def test_a_baseline_has_a_column_and_says_how_far_it_was_trusted() -> None:
    before = replace(bench_run(noise=0.01), trust=Trust.NOISY)
    for shown in (bench.table_text(RUN, before), bench.table_html(RUN, before)):
        assert "baseline (µs)" in shown
        assert all(f"{point.latency_us:,.1f}" in shown for point in before.points)
        assert "Baseline: measured 2026-01-01T00:00:00+00:00; reliability: too noisy" in shown
    assert "aseline" not in bench.table_text(RUN)
    other = bench.table_text(RUN, bench_run(world_size=3))
    assert "baseline (µs)" not in other


def test_a_size_that_the_baseline_lacks_has_an_empty_cell() -> None:
    head, rule, *rows = (
        bench.table_text(RUN, bench_run(Plan(factor=16))).partition("\n\n")[2].splitlines()[:9]
    )
    assert "baseline (µs)" in head
    assert {len(row) for row in rows} == {len(rule)}
    assert len(rows[0].split()) == len(rows[1].split()) + 1


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        (Trust.GOOD, "good (the medians hold"),
        (Trust.FAIR, "fair (compare within this run"),
        (Trust.NOISY, "too noisy to draw conclusions"),
    ],
)
def test_a_badge_says_in_words_what_its_colour_says(trust: Trust, words: str) -> None:
    run = replace(RUN, trust=trust)
    assert words in bench.table_html(run)
    assert f"Reliability: {words}" in bench.table_text(run)


# -- the figure --------------------------------------------------------------------------


def drawn(run: BenchRun, baseline: BenchRun | None = None) -> Any:
    """The figure, laid out as it will be seen."""
    made = against_size(run, baseline)
    made.savefig(io.BytesIO(), format="png")
    return made


def words(axes: Any) -> str:
    """All that is written in a panel."""
    legend = axes.get_legend()
    entries = [text.get_text() for text in legend.get_texts()] if legend else []
    return "\n".join([axes.get_title(), *(text.get_text() for text in axes.texts), *entries])


def test_the_limit_of_the_links_is_drawn_beside_the_curve() -> None:
    left, right = drawn(replace(RUN, limit_gb_per_s=478.0)).axes
    assert "a GPU sends at most 478 GB/s" in words(right) and "478" not in words(left)
    assert right.get_ylim()[1] > 478
    assert "at most" not in words(drawn(RUN).axes[1])


def test_the_panels_show_the_numbers_of_the_run() -> None:
    left, right = drawn(RUN).axes
    medians = [p.latency_us for p in RUN.points]
    assert any(list(line.get_ydata()) == medians for line in left.lines)
    rates = [p.busbw_gb_per_s for p in RUN.points]
    assert any(list(line.get_ydata()) == rates for line in right.lines)
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    assert right.get_ylim()[0] == 0


def test_axes_are_labelled_with_their_units() -> None:
    left, right = drawn(RUN).axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("tensor size", "tensor size")
    assert right.get_ylabel() == "bus bandwidth in GB/s"
    shown = [t.get_text() for t in left.get_yticklabels() if t.get_text()]
    assert {"1 ms", "10 ms"} <= set(shown)


def test_the_fit_its_latency_and_half_of_the_bandwidth_are_marked() -> None:
    left, _ = drawn(RUN).axes
    assert "latency 30" in words(left) or "latency 29" in words(left)
    assert "half of the\nbandwidth" in words(left)
    assert "fit, off by" in words(left)


def test_curves_differ_by_colour_and_by_marker() -> None:
    left, _ = drawn(SEVERAL).axes
    lines = [line for line in left.lines if line.get_marker() not in ("None", "_", "|", "")]
    assert len({line.get_color() for line in lines}) == 2
    assert len({line.get_marker() for line in lines}) == 2
    assert "broadcast of float32, 2 ranks" in words(left)


def test_a_baseline_is_drawn_beside_the_run() -> None:
    left, right = drawn(RUN, baseline=bench_run(seed=1)).axes
    assert "baseline" in words(left)
    assert "baseline" in words(right)


def test_wrong_results_are_marked_in_both_panels() -> None:
    for axes in drawn(bench_run(wrong={64: 1})).axes:
        assert any(line.get_label() == "wrong results" for line in axes.lines)


@pytest.mark.parametrize(
    "run",
    [
        NOTHING,
        bench_run(world_size=1),
        bench_run(Plan(max_bytes=4)),
        bench_run(Plan(ops=("barrier",))),
        bench_run(rounds=1, iterations=1),
        bench_run(latency_s=0.0, bytes_per_s=1e18),
        SEVERAL,
    ],
)
def test_every_run_can_be_drawn(run: BenchRun) -> None:
    assert drawn(run).axes


@given(st.floats(0, 1e9), st.floats(1, 1e6))
def test_the_time_axis_holds_all_times_and_at_least_two_labels(low: float, ratio: float) -> None:
    fast, slow = (replace(RUN.points[0], latency_us=us) for us in (low, low * ratio))
    bottom, top = _time_range([fast, slow])
    assert 0 < bottom <= max(low, 1e-3)
    assert top >= low * ratio
    assert sum(bottom <= 10.0**n <= top for n in range(-6, 20)) >= 2


# -- while it runs -----------------------------------------------------------------------


def test_what_is_measured_so_far_is_said_point_by_point() -> None:
    first = replace(RUN, curves=(replace(RUN.curves[0], points=RUN.points[:2]),))
    assert live(first, 0.1, 12.0)["text/html"].count("µs") == 2
    shown = live(SEVERAL, 0.9, 1.0)["text/html"]
    for curve in SEVERAL.curves:
        assert f"{curve.name}: " in shown
        assert all(duration(point.latency_us / 1e6) in shown for point in curve.points)


def test_the_bar_tells_the_share_and_the_time_left() -> None:
    shown = live(RUN, 0.5, 7.4)
    assert shown["text/plain"].endswith("50%, about 7 s left")
    assert '<progress max="1" value="0.500"' in shown["text/html"]
    assert "what is measured is kept" in shown["text/html"]
    assert "left" not in live(RUN, 1.0, None)["text/plain"]


def test_before_anything_is_known_there_is_a_bar_alone() -> None:
    for run in (None, NOTHING):
        assert "<li" not in live(run, 0.0, 15.0)["text/html"]


# -- what it costs -----------------------------------------------------------------------


def test_importing_the_views_does_not_load_matplotlib_and_drawing_no_pyplot() -> None:
    code = (
        "import sys\n"
        "import ddp_notebook.views.bench_figures as figures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from ddp_notebook.bench.result import BenchRun\n"
        "figures.against_size(BenchRun('gloo', 'cpu', 2, ()))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_numbers_are_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn, table = bench_bundles(RUN)
    assert "not drawn: " in drawn["text/plain"]
    assert "text/html" in table
