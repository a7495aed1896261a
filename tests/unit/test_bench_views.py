"""A benchmark as text, HTML and a figure."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import ddp_notebook
from ddp_notebook.model import BenchPoint, BenchResult
from ddp_notebook.views.bench import table_html, table_text
from ddp_notebook.views.plots import all_reduce_figure


def point(size_bytes: int, latency_us: float, busbw: float, wrong: int = 0) -> BenchPoint:
    """A size whose band is from 10 % below to 50 % above the median."""
    return BenchPoint(
        size_bytes=size_bytes,
        iterations=600,
        latency_us=latency_us,
        mean_us=latency_us * 1.1,
        p10_us=latency_us * 0.9,
        p90_us=latency_us * 1.5,
        algbw_gb_per_s=busbw / 1.5,
        busbw_gb_per_s=busbw,
        wrong=wrong,
    )


RESULT = BenchResult(
    op="all_reduce",
    backend="gloo",
    device="cpu",
    dtype="float32",
    world_size=4,
    points=(point(4, 150, 0), point(2**10, 290, 0.006), point(2**26, 36_000, 2.8125, wrong=2)),
    notes=("4 ranks on 2 cores: patience.",),
)
EMPTY = replace(RESULT, points=(), notes=())


def test_the_table_is_exactly_this() -> None:
    assert table_text(RESULT) == dedent(
        """\
        all_reduce of float32, 4 ranks, gloo on cpu

          size  iterations  latency (µs)       p10 – p90 (µs)  algbw (GB/s)  busbw (GB/s)  wrong
           4 B         600         150.0        135.0 – 225.0       0             0            0
         1 KiB         600         290.0        261.0 – 435.0       0.00400       0.00600      0
        64 MiB         600      36,000.0  32,400.0 – 54,000.0       1.88          2.81         2

        Note: 4 ranks on 2 cores: patience."""
    )


@pytest.mark.parametrize(
    ("busbw", "shown"),
    [
        (0.0, "0"),
        (1e-12, "0.000000000"),
        (0.0000138, "0.0000138"),
        (0.00042, "0.000420"),
        (0.9996, "1.00"),
        (2.8125, "2.81"),
        (99.96, "100"),
        (450.2, "450"),
        (1234.5, "1,234"),
        (float("inf"), "inf"),
    ],
)
def test_a_bandwidth_has_three_digits_however_small_it_is(busbw: float, shown: str) -> None:
    result = replace(RESULT, points=(point(4, 1, busbw),), notes=())
    assert table_text(result).split()[-2] == shown
    assert Cells(table_html(result)).rows[-1][-2].strip() == shown


def test_bandwidths_are_in_line_on_their_points() -> None:
    points = tuple(point(4, 1, busbw) for busbw in (1234.5, 0.0000138, 2.8125))
    lines = table_text(replace(RESULT, points=points, notes=())).splitlines()[3:]
    first = lines[1].rindex(".")
    assert lines[0][first - 5 : first + 1] == "1,234 "
    assert lines[2].rindex(".") == first


def test_a_table_of_nothing_says_so() -> None:
    assert table_text(EMPTY).splitlines()[-1] == "Nothing was measured."
    assert "Nothing was measured." in table_html(EMPTY)


def test_one_rank_is_not_called_ranks() -> None:
    assert table_text(replace(EMPTY, world_size=1)).startswith("all_reduce of float32, 1 rank, ")


class Cells(HTMLParser):
    """The text of each table row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_the_html_table_has_the_same_cells_as_the_text() -> None:
    rows = Cells(table_html(replace(RESULT, notes=()))).rows
    assert rows[0][0] == "size"
    assert [cell.rstrip("\u2007") for cell in rows[-1]] == [
        "64 MiB", "600", "36,000.0", "32,400.0 – 54,000.0", "1.88", "2.81", "2",
    ]  # fmt: skip
    assert len(rows) == 4


def test_wrong_results_stand_out_in_the_html_table() -> None:
    html = table_html(RESULT)
    assert html.count("font-weight: bold") == 1
    assert "font-weight: bold" not in table_html(replace(RESULT, points=RESULT.points[:2]))


def test_nothing_in_a_result_can_become_markup() -> None:
    html = table_html(replace(RESULT, backend="<script>", notes=("<b>&",)))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<p>&lt;b&gt;&amp;</p>" in html


def panels(result: BenchResult) -> tuple[Axes, Axes]:
    """The latency and the bandwidth panel."""
    latency, bandwidth = all_reduce_figure(result).axes
    return latency, bandwidth


def drawn(line: Line2D) -> list[tuple[float, float]]:
    """The points of a line."""
    return [(x, y) for x, y in np.asarray(line.get_xydata()).tolist()]


def test_the_figure_is_titled_with_what_was_measured() -> None:
    figure = all_reduce_figure(RESULT)
    assert figure.get_suptitle() == "all_reduce of float32, 4 ranks, gloo on cpu"
    assert [axes.get_title() for axes in figure.axes] == [
        "Time of one all_reduce on the slowest rank",
        "Bus bandwidth in GB/s",
    ]


def test_the_panels_show_the_numbers_of_the_result() -> None:
    latency, bandwidth = panels(RESULT)
    sizes = [4, 2**10, 2**26]
    assert drawn(latency.lines[0]) == list(zip(sizes, [150, 290, 36_000], strict=True))
    assert drawn(bandwidth.lines[0]) == list(zip(sizes, [0, 0.006, 2.8125], strict=True))
    band = np.asarray(latency.collections[0].get_paths()[0].vertices).tolist()
    for corner in ([4, 135], [4, 225], [2**26, 32_400], [2**26, 54_000]):
        assert corner in band


def test_latency_is_log_log_and_bandwidth_starts_at_zero() -> None:
    latency, bandwidth = panels(RESULT)
    assert (latency.get_xscale(), latency.get_yscale()) == ("log", "log")
    assert (bandwidth.get_xscale(), bandwidth.get_yscale()) == ("log", "linear")
    assert bandwidth.get_ylim()[0] == 0


def test_sizes_and_times_are_labelled_for_people() -> None:
    latency, bandwidth = panels(RESULT)
    for axes in (latency, bandwidth):
        assert [t.get_text() for t in axes.get_xticklabels()] == ["4 B", "1 KiB", "64 MiB"]
    form = latency.yaxis.get_major_formatter()
    assert [form(us, 0) for us in (0.5, 100, 1e3, 1e4, 2e6)] == [
        "0.5 µs",
        "100 µs",
        "1 ms",
        "10 ms",
        "2 s",
    ]


@settings(max_examples=30, deadline=None)  # each draws a figure
@given(st.floats(0.01, 1e7), st.floats(1, 100))
def test_the_time_axis_holds_all_times_and_at_least_two_labels(low: float, ratio: float) -> None:
    points = (point(4, low, 0), point(16, low * ratio, 0))
    bottom, top = panels(replace(RESULT, points=points))[0].get_ylim()
    assert bottom < points[0].p10_us < points[1].p90_us < top
    assert sum(bottom <= 10.0**power <= top for power in range(-4, 12)) >= 2


def test_labels_of_many_sizes_do_not_run_into_each_other() -> None:
    result = replace(RESULT, points=tuple(point(4**n, 100 + n, n) for n in range(1, 14)))
    figure = all_reduce_figure(result)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(boxes) == 7
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_wrong_results_are_marked_in_both_panels() -> None:
    for axes in panels(RESULT):
        marks = [line for line in axes.lines if line.get_label() == "wrong results"]
        assert [[x for x, _ in drawn(line)] for line in marks] == [[2**26]]
    for axes in panels(replace(RESULT, points=RESULT.points[:2])):
        assert len(axes.lines) == 1


def test_one_rank_is_told_why_there_is_no_bus_bandwidth() -> None:
    _, bandwidth = panels(replace(RESULT, world_size=1, points=(point(4, 9, 0), point(8, 9, 0))))
    assert [t.get_text() for t in bandwidth.texts] == ["one rank sends nothing"]


def test_a_figure_of_nothing_says_so() -> None:
    for axes in panels(EMPTY):
        assert [t.get_text() for t in axes.texts] == ["nothing was measured"]


@pytest.mark.parametrize("result", [RESULT, EMPTY, replace(RESULT, points=(point(4, 0, 0),))])
def test_every_figure_can_be_written_as_an_image(result: BenchResult) -> None:
    image = io.BytesIO()
    all_reduce_figure(result).savefig(image, format="png")
    assert image.getvalue().startswith(b"\x89PNG")


def test_a_figure_that_is_given_is_drawn_over() -> None:
    figure = Figure()
    assert all_reduce_figure(RESULT, figure) is figure
    all_reduce_figure(replace(RESULT, points=RESULT.points[:2]), figure)
    assert len(figure.axes) == 2
    assert len(drawn(figure.axes[0].lines[0])) == 2


def test_drawing_changes_nothing_global() -> None:
    before = dict(rcParams)
    all_reduce_figure(RESULT)
    assert dict(rcParams) == before


def test_importing_the_plots_does_not_load_matplotlib() -> None:
    code = "import sys, ddp_notebook.views.plots; sys.exit('matplotlib' in sys.modules)"
    home = Path(next(iter(ddp_notebook.__path__))).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=home, check=False, timeout=60)
    assert done.returncode == 0


def test_drawing_does_not_load_pyplot() -> None:
    code = (
        "import sys\n"
        "from ddp_notebook.model import BenchResult\n"
        "from ddp_notebook.views.plots import all_reduce_figure\n"
        "all_reduce_figure(BenchResult('all_reduce', 'gloo', 'cpu', 'float32', 2, ()))\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    home = Path(next(iter(ddp_notebook.__path__))).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=home, check=False, timeout=60)
    assert done.returncode == 0
