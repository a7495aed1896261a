"""The board for a page without scripts: its arrangement, and the drawings of its rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from saved_runs import MS, collective

from ddp_notebook.board import model, still_picture
from ddp_notebook.board.still_picture import MOST_ROWS, drawings
from ddp_notebook.board.timeline import Timeline
from ddp_notebook.model import (
    CallFacts,
    Category,
    Diagnosis,
    Finding,
    Phase,
    Place,
    RankState,
    Role,
    Side,
    Snapshot,
    Stage,
    Status,
)
from ddp_notebook.model.fold import LinePause
from ddp_notebook.views.board_rows import board

MOST_BYTES = 20_000
SVG = "{http://www.w3.org/2000/svg}"


def drawn(timeline: Timeline, *rows: tuple[int, ...]) -> list[ElementTree.Element]:
    """The drawings as a browser has them; they are well-formed."""
    return [ElementTree.fromstring(each) for each in drawings(timeline, rows).of_rows if each]


def spans(drawing: ElementTree.Element, colour: str) -> list[tuple[int, int]]:
    """From where to where the bars of a colour are."""
    drawn = [
        each.get("d", "") for each in drawing.iter(f"{SVG}path") if colour in each.get("fill", "")
    ]
    found = [re.findall(r"M(\d+) \d+h(\d+)", each) for each in drawn]
    return [(int(a), int(a) + int(b)) for each in found for a, b in each]


BLUE, AMBER, RED, VIOLET = "47, 127, 224", "217, 123, 0", "217, 60, 60", "150, 90, 170"


def test_who_came_first_waits_until_the_last_comes() -> None:
    timeline = Timeline(0, 2)
    timeline.take(1, [collective(0, 0, 100, 1000), collective(1, 0, 600, 1000)])
    early, late = drawn(timeline, (0,), (1,))
    ((start, met),) = spans(early, AMBER)
    assert start == 0 and spans(early, BLUE) == [(met, spans(late, BLUE)[0][1])]
    assert spans(late, AMBER) == []


def test_held_time_is_not_drawn_as_communication_and_a_freed_one_does_not_squeeze() -> None:
    timeline = Timeline(0, 2)
    held = replace(collective(1, 0, 900, 1000), call=CallFacts(held_ns=800 * MS))
    freed = replace(collective(0, 1, 1000, 90_000), phase=Phase.FAILED, call=CallFacts(freed=True))
    timeline.take(1, [collective(0, 0, 100, 1000), freed, held])
    first, second = drawn(timeline, (0,), (1,))
    ((came, went_on),) = spans(second, VIOLET)
    assert came == 0 and went_on == spans(second, BLUE)[0][0] == spans(first, BLUE)[0][0]
    assert spans(first, RED) == [] and spans(first, "128, 128, 128")
    assert spans(first, BLUE)[0][1] > 500


def test_a_pause_at_a_line_is_drawn_as_the_time_that_it_was() -> None:
    timeline = Timeline(0, 2)
    pause = LinePause(1, 1, Place("cell 3", 7), "", 200 * MS, 800 * MS)
    timeline.take(1, [collective(r, 0, 100 + 800 * r, 1000) for r in (0, 1)], "", [pause])
    first, second = drawn(timeline, (0,), (1,))
    ((began, ended),) = spans(second, VIOLET)
    assert 0 < began < ended < spans(second, BLUE)[0][0] and not spans(first, VIOLET)
    title = second.find(f"{SVG}title")
    assert title is not None and title.text is not None
    assert title.text.endswith("1 collective, the last: all_reduce #0, done, 1 pause at lines")


def test_what_is_not_done_reaches_the_edge_and_what_failed_is_red() -> None:
    timeline = Timeline(0, 4)
    waits = collective(0, 0, 100, None)
    held = replace(collective(1, 0, 200, None), phase=Phase.HELD)
    failed = replace(collective(2, 0, 100, 300), phase=Phase.FAILED)
    timeline.take(1, [waits, held, failed])
    rows = drawn(timeline, (0,), (1,), (2,), (3,))
    assert spans(rows[0], AMBER)[0][1] == spans(rows[1], VIOLET)[0][1] == 1000
    assert spans(rows[2], RED)
    titles = [row.find(f"{SVG}title") for row in rows]
    assert [each.text for each in titles if each is not None] == [
        "rank 0: 1 collective, the last: all_reduce #0, issued",
        "rank 1: 1 collective, the last: all_reduce #0, held",
        "rank 2: 1 collective, the last: all_reduce #0, failed",
        "rank 3: no collective",
    ]


def test_the_newest_run_alone_is_drawn_and_has_the_number_of_its_collectives() -> None:
    timeline = Timeline(0, 2)
    timeline.take(1, [collective(rank, n, n, n + 1) for rank in (0, 1) for n in range(3)])
    timeline.take(2, [collective(0, 0, 90_000, 90_010)])
    first, second = drawn(timeline, (0,), (1,))
    assert spans(first, BLUE)[0][1] > 900 and not spans(second, BLUE)
    title = first.find(f"{SVG}title")
    assert title is not None
    assert title.text == "rank 0: 1 collective, the last: all_reduce #0, done"


def test_collectives_of_an_earlier_run_are_called_so() -> None:
    timeline = Timeline(0, 1)
    timeline.take(1, [collective(0, 0, 0, 1)])
    assert "of an earlier run" not in drawings(timeline, [(0,)]).about
    timeline.take(2, [])
    assert "The last collectives, of an earlier run" in drawings(timeline, [(0,)]).about


def test_ranks_of_which_nothing_is_drawn_are_named() -> None:
    timeline = Timeline(0, 64)
    timeline.take(1, [collective(rank, 0, 1, 2) for rank in range(64)])
    shown = drawings(timeline, [(rank,) for rank in range(64)])
    assert shown.about.endswith(f"Not drawn: ranks {MOST_ROWS}-63.")
    assert len(shown.of_rows) == 64 and not any(shown.of_rows[MOST_ROWS:])
    for none in (Timeline(0, 2), None):
        assert drawings(none, [(0,), (1,)]).of_rows == ["", ""]


def test_it_is_small_and_nothing_in_it_is_markup_of_a_ranks() -> None:
    timeline = Timeline(0, 64)
    evil = "</svg><script>alert('1')</script>\"&"
    timeline.take(
        1,
        [
            replace(collective(rank, n, 1000 * n + 31 * rank, 1000 * n + 900), operation=evil)
            for rank in range(64)
            for n in range(200)
        ],
    )
    rows = [(rank,) for rank in range(64)]
    html = "".join(drawings(timeline, rows).of_rows)
    assert len(html.encode()) < MOST_BYTES
    assert "<script" not in html and evil in "".join(drawn(timeline, *rows)[0].itertext())
    assert not re.search(r"(?:href|src|url\()", html)


@given(st.lists(st.tuples(*[st.integers(0, 10**12)] * 2, st.sampled_from(Phase)), max_size=40))
def test_bars_stay_inside_whatever_the_times_are(made: list[tuple[int, int, Phase]]) -> None:
    timeline = Timeline(0, 1)
    timeline.take(
        1,
        [
            replace(collective(0, n, 0, None), issued_ns=issued, done_ns=done, phase=phase)
            for n, (issued, done, phase) in enumerate(made)
        ],
    )
    for drawing in drawn(timeline, (0,)):
        for colour in (BLUE, AMBER, RED, VIOLET):
            assert all(0 <= start <= end <= 1004 for start, end in spans(drawing, colour))


HANG = Diagnosis(
    (
        Finding(
            Category.CONDITIONAL_COLLECTIVE,
            (0,),
            "Only rank 0 calls barrier",
            "Call it on all ranks.",
            sides=(
                Side((0,), "barrier", "", Place("cell 2", 2, "", "dist.barrier()")),
                Side((1, 2), "all_reduce", "float32 [4]", Place("cell 2", 3, "", "<script>")),
            ),
        ),
    ),
)


def test_a_saved_board_is_arranged_as_the_live_one() -> None:
    """A row for each rank with what it did last, the finding with both sides, the rest folded."""
    ranks = tuple(
        RankState(rank, Status.RUNNING, Stage.VERIFIED, None, device="cpu", pid=7 + rank, cell=2)
        for rank in range(3)
    )
    note = "No GPU is visible."
    known = Snapshot(
        ranks=ranks, backend="gloo", taken_ns=9, init_method="env://h:1", notes=(note,)
    )
    timeline = Timeline(0, 3)
    timeline.take(1, [collective(rank, 0, 10, 20) for rank in range(3)])
    html = still_picture.html(board(known), HANG, timeline)
    places = [html.index(part) for part in (
        "▶ running",
        "<svg",
        "The last collectives",
        "Only rank 0 calls barrier",
        "rank 0</b>",
        "dist.barrier()</span>",
        "ranks 1 and 2</b>",
        "&lt;script&gt;",
        "Call it on all ranks.",
        "about these ranks",
        "env://h:1",
        note,
    )]  # fmt: skip
    assert places == sorted(places) and html.count("<svg") == 3
    assert "<script" not in html and "<button" not in html
    calm = still_picture.html(board(known))
    assert "▶ running" in calm and "<svg" not in calm and "last collectives" not in calm


def test_its_marks_are_those_of_the_live_board() -> None:
    words = (Path(model.__file__).parent / "page" / "words.js").read_text("utf-8")
    states = words.partition("STATES = {")[2].partition("};")[0]
    marks = dict(re.findall(r"^  (\w+): \[\"(.)\", ", states, re.MULTILINE))
    assert {word: mark for word, (mark, _) in still_picture.STATES.items()} == marks
    of = re.search(r"STATE_OF = {(.*)}", words)
    assert of is not None
    named = dict(re.findall(r"(\w+): \"(\w+)\"", of[1]))
    assert {role.value: state for role, state in still_picture.STATE_OF.items()} == named
    assert {*map(str, Role)} - named.keys() - marks.keys() == {"silent"}
