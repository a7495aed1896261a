"""The last collectives as bars, for a page without scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from saved_runs import MS, collective

from ddp_notebook.board.timeline import Timeline
from ddp_notebook.board.timeline_svg import MOST_ROWS, bars
from ddp_notebook.model import Phase

MOST_BYTES = 20_000
SVG = "{http://www.w3.org/2000/svg}"


def table(html: str) -> ElementTree.Element:
    """The bars as a browser has them; they are well-formed."""
    return ElementTree.fromstring(html.replace("<wbr>", ""))


def spans(row: ElementTree.Element, colour: str) -> list[tuple[int, int]]:
    """From where to where the bars of a colour are."""
    drawn = [each.get("d", "") for each in row.iter(f"{SVG}path") if colour in each.get("fill", "")]
    found = [re.findall(r"M(\d+) \d+h(\d+)", each) for each in drawn]
    return [(int(a), int(a) + int(b)) for each in found for a, b in each]


BLUE, AMBER, RED, VIOLET = "47, 127, 224", "217, 123, 0", "217, 60, 60", "150, 90, 170"


def test_who_came_first_waits_until_the_last_comes() -> None:
    timeline = Timeline(0, 2)
    timeline.take(1, [collective(0, 0, 100, 1000), collective(1, 0, 600, 1000)])
    early, late = table(bars(timeline, [(0,), (1,)])).iter("tr")
    ((start, met),) = spans(early, AMBER)
    assert start == 0 and spans(early, BLUE) == [(met, spans(late, BLUE)[0][1])]
    assert spans(late, AMBER) == []


def test_held_time_is_not_painted_as_communication_and_a_freed_one_does_not_squeeze() -> None:
    timeline = Timeline(0, 2)
    held = replace(collective(1, 0, 900, 1000), held_ns=800 * MS)
    freed = replace(collective(0, 1, 1000, 90_000), phase=Phase.FAILED, freed=True)
    timeline.take(1, [collective(0, 0, 100, 1000), freed, held])
    first, second = table(bars(timeline, [(0,), (1,)])).iter("tr")
    ((came, went_on),) = spans(second, VIOLET)
    assert came == 0 and went_on == spans(second, BLUE)[0][0] == spans(first, BLUE)[0][0]
    assert spans(first, RED) == [] and spans(first, "128, 128, 128")
    assert spans(first, BLUE)[0][1] > 500


def test_what_is_not_done_reaches_the_edge_and_what_failed_is_red() -> None:
    timeline = Timeline(0, 4)
    waits = collective(0, 0, 100, None)
    held = replace(collective(1, 0, 200, None), phase=Phase.HELD)
    failed = replace(collective(2, 0, 100, 300), phase=Phase.FAILED)
    timeline.take(1, [waits, held, failed])
    rows = list(table(bars(timeline, [(0,), (1,), (2,), (3,)])).iter("tr"))
    assert spans(rows[0], AMBER)[0][1] == spans(rows[1], VIOLET)[0][1] == 1000
    assert spans(rows[2], RED)
    titles = [row.find(f"td/{SVG}svg/{SVG}title") for row in rows]
    assert [each.text for each in titles if each is not None] == [
        "rank 0: 1 collective, the last: all_reduce #0, issued",
        "rank 1: 1 collective, the last: all_reduce #0, held",
        "rank 2: 1 collective, the last: all_reduce #0, failed",
        "rank 3: no collective",
    ]


def test_a_row_is_named_by_its_ranks_and_those_without_one_are_said() -> None:
    timeline = Timeline(0, 64)
    timeline.take(1, [collective(rank, 0, 1, 2) for rank in range(64)])
    first, second = table(bars(timeline, [(0, 1, 2, 5), (3, 4)])).iter("tr")
    assert "".join(first.itertext()).startswith("0-2,5")
    assert "".join(second.itertext()).startswith("3-4")
    shown = bars(timeline, [(rank,) for rank in range(64)])
    assert f"Not here: ranks {MOST_ROWS}-63." in shown
    assert bars(Timeline(0, 2), [(0,), (1,)]) == ""


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
    html = bars(timeline, [(rank,) for rank in range(64)])
    assert len(html.encode()) < MOST_BYTES
    assert "<script" not in html and evil in "".join(table(html).itertext())
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
    html = bars(timeline, [(0,)])
    for colour in (BLUE, AMBER, RED, VIOLET) if html else ():
        for start, end in spans(table(html), colour):
            assert 0 <= start <= end <= 1004
