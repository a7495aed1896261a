"""A benchmark as a table, as a figure, and while it runs."""

from __future__ import annotations

import html
import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from bench_runs import QUIET, bench_run
from hypothesis import given
from hypothesis import strategies as st
from pages import whole_page

from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.result import BenchRun, Trust, duration
from ddp_notebook.model import format_bytes
from ddp_notebook.session import BenchResult
from ddp_notebook.views import bench
from ddp_notebook.views.bench import live, time_plots
from ddp_notebook.views.bench_figures import _time_range, against_size
from ddp_notebook.views.board import WIDTH
from ddp_notebook.views.notebook import bench_bundle

RUN = bench_run(noise=0.05)
NOTHING = replace(RUN, curves=())
SEVERAL = bench_run(Plan(ops=("all_reduce", "broadcast", "barrier"), factor=16))


# -- the table ---------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_size_in_columns() -> None:
    text = bench.table_text(RUN)
    lines = [line for line in text.splitlines() if re.match(r"\s*\d+ \w*B .*\.", line)]
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
        assert (
            "Baseline: gloo on cpu, measured 2026-01-01T00:00:00+00:00; reliability: too noisy"
            in shown
        )
    assert "aseline" not in bench.table_text(RUN)
    other = bench.table_text(RUN, bench_run(world_size=3))
    assert "baseline (µs)" not in other


def test_a_size_that_the_baseline_lacks_has_an_empty_cell() -> None:
    head, rule, *rows = (
        bench.table_text(RUN, bench_run(Plan(factor=16))).split("\n\n")[3].splitlines()
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


def line_through(axes: Any, first: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether a straight line between just these two points is drawn."""
    for line in axes.lines:
        points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        if len(points) == 2 and points == [pytest.approx(first), pytest.approx(last)]:
            return True
    return False


def test_the_limit_of_the_links_is_drawn_beside_the_curve() -> None:
    left, right = drawn(replace(RUN, limit_gb_per_s=478.0)).axes
    assert "a GPU sends at most 478 GB/s" in words(right) and "478" not in words(left)
    assert right.get_ylim()[1] > 478
    assert "at most" not in words(drawn(RUN).axes[1])


def test_ceilings_of_the_same_run_are_lines_and_one_far_above_is_told() -> None:
    fit = RUN.curves[0].fit
    assert fit is not None
    near = drawn(replace(RUN, copy_gb_per_s=4.0)).axes[1]
    heights = [line.get_ydata()[0] for line in near.lines if list(line.get_xdata()) == [0, 1]]
    assert heights == [4.0, pytest.approx(fit.bandwidth_bytes_per_s / 1e9)]
    assert "\neach rank copies memory at 4 GB/s" in words(near)
    far = drawn(replace(RUN, copy_gb_per_s=400.0)).axes[1]
    assert "↑ each rank copies memory at 400 GB/s" in words(far)
    assert far.get_ylim()[1] < 4


def test_the_panels_show_the_numbers_of_the_run() -> None:
    left, right = drawn(RUN).axes
    medians = [p.latency_us for p in RUN.points]
    assert any(list(line.get_ydata()) == medians for line in left.lines)
    rates = [p.busbw_gb_per_s for p in RUN.points]
    assert any(list(line.get_ydata()) == rates for line in right.lines)
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    assert right.get_ylim()[0] == 0


def test_the_whiskers_are_the_intervals_and_those_of_a_bandwidth_are_turned_round() -> None:
    left, right = drawn(RUN).axes
    for axes, ends in (
        (left, [p.latency_interval_us for p in RUN.points]),
        (
            right,
            [
                tuple(p.size_bytes / end / 1e3 for end in reversed(p.latency_interval_us))
                for p in RUN.points
            ],
        ),
    ):
        whiskers = axes.collections[0].get_segments()
        assert [(bottom[1], top[1]) for bottom, top in whiskers] == [
            pytest.approx(pair) for pair in ends
        ]


def test_only_points_whose_intervals_do_not_overlap_are_joined() -> None:
    run = bench_run(noise=0.05, drift=0.2, seed=2)
    left, _ = drawn(run).axes
    joined = []
    for one, other in pairwise(run.points):
        apart = one.latency_interval_us[1] < other.latency_interval_us[0]
        at = ((p.size_bytes, p.latency_us) for p in (one, other))
        joined.append(apart)
        assert line_through(left, *at) is apart
    assert set(joined) == {True, False}


def test_axes_are_labelled_with_their_units() -> None:
    left, right = drawn(RUN).axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("tensor size", "tensor size")
    assert right.get_ylabel() == "GB/s that each rank sends"
    shown = [t.get_text() for t in left.get_yticklabels() if t.get_text()]
    assert {"1 ms", "10 ms"} <= set(shown)


def test_the_two_asymptotes_are_those_of_the_fit_and_carry_its_values() -> None:
    left, _ = drawn(RUN).axes
    fit = RUN.curves[0].fit
    assert fit is not None
    floor_us, rate = fit.latency_s * 1e6, fit.bandwidth_bytes_per_s
    assert line_through(left, (fit.from_bytes, floor_us), (fit.to_bytes, floor_us))
    enters = left.get_ylim()[0] * rate / 1e6
    assert line_through(left, (enters, enters / rate * 1e6), (2**26, 2**26 / rate * 1e6))
    assert f"latency {duration(fit.latency_s)}" in words(left)
    assert f"size / {rate / 1e9:.3g} GB/s" in words(left)
    assert (fit.latency_s, rate) == (pytest.approx(300e-6, rel=0.02), pytest.approx(2e9, rel=0.02))


def test_the_users_buckets_are_marked_where_the_fit_has_them() -> None:
    left, _ = drawn(replace(RUN, bucket_bytes=(2**20, 2**22, 2**40))).axes
    fit = RUN.curves[0].fit
    assert fit is not None
    marks = [line for line in left.lines if line.get_marker() == "D"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks] == [
        (size, pytest.approx(fit.predict(size) * 1e6)) for size in (2**20, 2**22)
    ], "what was not measured is not marked"
    assert f"your 4 MiB bucket: {duration(fit.predict(2**22))}" in words(left)


def test_operations_are_small_multiples_with_the_same_axes() -> None:
    axes = drawn(SEVERAL).axes
    assert [each.get_title().partition(":")[0] for each in axes] == [
        *("all_reduce", "all_reduce", "broadcast", "broadcast")
    ]
    assert axes[0].get_ylim() == axes[2].get_ylim()
    assert axes[0].get_xlim() == axes[2].get_xlim()
    assert axes[1].get_ylim()[1] == pytest.approx(axes[3].get_ylim()[1], rel=0.1)
    assert "barrier, 2 ranks: 30" in words(axes[0])


def test_curves_of_an_operation_differ_by_colour_and_by_marker() -> None:
    left, _ = drawn(bench_run(Plan(factor=16, world_sizes=(2, 4)), world_size=4)).axes
    lines = [line for line in left.lines if line.get_label().startswith("float32")]
    assert len({line.get_color() for line in lines}) == 2
    assert len({line.get_marker() for line in lines}) == 2
    assert "float32, 4 ranks: 300 µs, 2 GB/s" in words(left)


def test_a_baseline_is_drawn_beside_the_run_and_says_what_it_is_of() -> None:
    before = replace(bench_run(seed=1), backend="nccl", device="cuda")
    for axes in drawn(RUN, baseline=before).axes:
        assert "baseline, nccl on cuda" in words(axes)
        assert "this run, gloo on cpu" in words(axes)
        assert any(line.get_markerfacecolor() == "none" for line in axes.lines)


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
    assert "<svg" in bench_bundle(run)["text/html"]


# -- on a page and in a terminal ---------------------------------------------------------


def test_the_answer_comes_first_then_the_figure_the_reliability_and_the_table() -> None:
    shown = bench_bundle(bench_run(answers=({**QUIET, "host_cpu_s": 20.0},) * 2))["text/html"]
    places = [
        shown.index(part)
        for part in ("<b>Below 64 KiB you pay 300", "<svg", "<details><summary>Reliability:")
    ]
    places.append(shown.index("13 sizes as a table</summary>"))
    assert places == sorted(places)
    assert "<details open" not in shown


def test_the_panels_are_drawings_of_their_own_with_text_that_can_be_found() -> None:
    shown = bench_bundle(RUN)["text/html"]
    assert shown.count("<svg ") == 2
    assert shown.count('width="100%"') == 2
    assert "flex-wrap: wrap" in shown
    texts = {text.strip() for text in whole_page(shown).texts}
    assert {"all_reduce: bus bandwidth", "tensor size", "10 ms"} <= texts
    assert not re.search(r"@font-face|<!--|xlink:href=\"(?!#)|url\((?!#)", shown)
    assert "currentColor" in shown and "#333333" not in shown


def test_a_page_without_drawings_has_the_plot_of_text_and_no_heap_of_words() -> None:
    shown = bench_bundle(RUN)["text/html"]
    # What a sanitizer leaves of it: no style sheets, no drawings, but the words in them.
    left = re.sub("<style.*?</style>", "", shown, flags=re.DOTALL)
    left = re.sub(r"</?(svg|g|path|use|defs|clipPath|rect|text|title)\b[^>]*>", "", left)
    assert '<pre class="ddp-plain">' in left
    assert "display: none" in shown and "display: none" not in left
    small = left.partition("font-size: 0px")[2].partition("Reliability")[0]
    assert "tensor size" in small and "tensor size" not in left.replace(small, "")
    written = re.findall(r"<text[^>]*>", shown)
    assert all(re.search(r"font[^;]*: 1?\dpx", text) for text in written), "in its own size"


def test_hovering_over_a_point_tells_size_time_and_bandwidth() -> None:
    titles = re.findall("<title>(.*?)</title>", bench_bundle(RUN)["text/html"])
    for point in RUN.points:
        words = f"{format_bytes(point.size_bytes)}: {duration(point.latency_us / 1e6)} (95 %: "
        told = [title for title in titles if title.startswith(words)]
        assert len(told) == 2, "one in each panel"
        assert told[0].endswith(f" {point.busbw_gb_per_s:.3g} GB/s")


def test_no_id_is_there_twice_also_when_a_figure_is_shown_again() -> None:
    ids = re.findall(r' id="([^"]*)"', "".join(bench_bundle(RUN)["text/html"] for _ in range(2)))
    assert ids
    assert len(ids) == len(set(ids))


def test_nothing_of_a_run_is_markup_in_its_figure() -> None:
    evil = "<script>&\"'</title>-->"
    curves = tuple(replace(curve, dtype=evil) for curve in (*RUN.curves, *RUN.curves))
    run = BenchResult.of(replace(RUN, backend=evil, curves=curves), replace(RUN, curves=curves))
    reader = whole_page(bench_bundle(run)["text/html"])
    assert "script" not in reader.tags


def test_in_a_terminal_a_plot_of_twelve_lines_shows_the_medians() -> None:
    lines = time_plots(RUN)
    assert len(lines) == 12
    assert "\n".join(lines) in bench.table_text(RUN)
    assert lines[1].startswith("100 ms ┤") and lines[10].startswith("100 µs ┤")
    assert lines[11].split()[:2] == ["4", "B"]
    # A column is as high as the logarithm of its time, within an eighth of a line.
    edge, step = len("100 µs ┤"), (WIDTH - 20) // len(RUN.points)
    for number, point in enumerate(RUN.points):
        column = [line.ljust(200)[edge + number * step] for line in lines[1:11]]
        height = sum(" ▁▂▃▄▅▆▇█".index(block) for block in column) / 80
        assert height == pytest.approx(math.log10(point.latency_us / 100) / 3, abs=0.02)


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
    shown = bench_bundle(RUN)
    assert "The figure is not drawn: " in shown["text/html"]
    assert f"<pre>{html.escape(time_plots(RUN)[0])}" in shown["text/html"]
    assert "13 sizes as a table" in shown["text/html"]
