"""The slices of the live board's timeline, and the newest records they are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from saved_runs import MS, collective
from traces import backward

from ddp_notebook.board import timeline as timeline_model
from ddp_notebook.board.timeline import FREED, PAUSED, PHASES, Tails, Timeline, died_ns, is_pause
from ddp_notebook.model import (
    CallFacts,
    CellFinished,
    Collective,
    Collectives,
    LineLeft,
    LineStopped,
    Phase,
    Place,
    RankExited,
    Ranks,
    RankState,
    Snapshot,
    Status,
)
from ddp_notebook.model.fold import LinePause, LineStops
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.testing import fake_run
from ddp_notebook.views.step_rows import of_run


class Page:
    """Takes messages as the page does: slices by rank and number."""

    def __init__(self) -> None:
        self.slices: dict[tuple[int, int], list[int]] = {}
        self.kinds: list[Any] = []
        self.generation = -1

    def take(self, message: dict[str, Any] | None) -> None:
        assert message is not None
        message = json.loads(json.dumps(message))
        if message["generation"] != self.generation:
            self.slices, self.kinds, self.generation = {}, [], message["generation"]
        assert message["first_kind"] <= len(self.kinds)
        self.kinds[message["first_kind"] :] = message["kinds"]
        for each in message["slices"]:
            self.slices[each[0], each[1]] = each


def test_only_what_is_new_or_changed_is_sent() -> None:
    timeline, page = Timeline(0, 2), Page()
    timeline.take(1, [collective(0, 0, 1, None), collective(1, 0, 2, 3)])
    page.take(timeline.news())
    assert len(page.slices) == 2 and len(page.kinds) == 1
    assert timeline.news() is None
    timeline.take(1, [collective(0, 0, 1, 3)])
    news = timeline.news()
    assert news is not None and len(news["slices"]) == 1 and news["kinds"] == []
    page.take(news)
    assert page.slices[0, 0][4:6] == [1000, 3000]


def test_runs_have_their_titles_the_latest_at_once_and_all_in_the_whole() -> None:
    timeline = Timeline(0, 1)
    timeline.take(1, [collective(0, 0, 1, 3)], "cell 4")
    news = timeline.news()
    assert news is not None and news["titles"] == [[1, "cell 4"]]
    timeline.take(2, [collective(0, 0, 5, 7)], "train.py")
    news = timeline.news()
    assert news is not None and news["titles"] == [[2, "train.py"]]
    assert timeline.whole()["titles"] == [[1, "cell 4"], [2, "train.py"]]


def test_the_check_of_a_group_that_an_abort_built_is_no_part_of_the_run() -> None:
    """It came half a minute after the run, and pressed all of it into a corner of the timeline."""
    mine, check = collective(0, 0, 1, 3), replace(collective(0, 1, 30_000, 30_001), path=())
    thread = collective(0, 2, 30_000, 30_001)
    left_ns = {0: 10 * MS}
    assert mine.path and thread.path
    assert of_run([mine, check, thread], left_ns) == (mine, thread)
    early = replace(mine, path=())
    assert of_run([early], left_ns) == of_run([early], {}) == (early,)


def test_what_comes_in_pieces_is_what_comes_as_a_whole() -> None:
    timeline, page, late = Timeline(5, 2), Page(), Page()
    for number in range(51):
        done = number if number % 3 else None
        timeline.take(1, [collective(rank, number, number, done) for rank in (0, 1)])
        if number % 7 == 0 or number == 50:
            page.take(timeline.news())
    late.take(timeline.whole())
    assert page.slices == late.slices and page.kinds == late.kinds
    late.take(timeline.whole())
    assert page.slices == late.slices


def test_what_a_rank_was_in_when_it_died_failed_then_and_waits_no_longer() -> None:
    timeline, page = Timeline(0, 2), Page()
    timeline.take(1, [collective(0, 0, 1, 2), collective(0, 1, 3, None)])
    timeline.take(1, [collective(1, 0, 1, 2), collective(1, 1, 3, None)])
    page.take(timeline.news())
    ranks = (RankState(0, heard_ns=9_000_000), RankState(1, Status.DEAD, heard_ns=7_000_000))
    timeline.end(died_ns(Snapshot(ranks)))
    page.take(timeline.news())
    assert page.slices[1, 1][5:7] == [7000, PHASES.index(Phase.FAILED)]
    assert page.slices[0, 1][5:7] == [0, PHASES.index(Phase.ISSUED)]
    assert page.slices[1, 0][6] == PHASES.index(Phase.DONE)
    timeline.end(died_ns(Snapshot(ranks)))
    assert timeline.news() is None, "it is said once"
    timeline.end({0: 2_000_000}, FREED)
    assert timeline.news() is None, "of a run before"
    timeline.end({0: 95_000_000}, FREED)
    page.take(timeline.news())
    assert page.slices[0, 1][5:7] == [95_000, PHASES.index(FREED)]


def test_a_board_that_is_opened_while_ranks_wait_shows_them_waiting() -> None:
    """What began before the board is at negative times: it was drawn as failed."""
    timeline = Timeline(60_000_000, 2)
    timeline.take(1, [collective(rank, 0, 3, None) for rank in (0, 1)])
    timeline.end({})
    timeline.end({1: 9_000_000}, FREED)
    phases = {slice_[0]: slice_[6] for slice_ in timeline.whole()["slices"]}
    assert phases == {0: PHASES.index(Phase.ISSUED), 1: PHASES.index(FREED)}


def test_for_how_long_a_rank_was_held_is_told_apart_from_its_collective() -> None:
    timeline, page = Timeline(0, 1), Page()
    timeline.take(1, [replace(collective(0, 0, 1, None), phase=Phase.HELD)])
    page.take(timeline.news())
    assert page.slices[0, 0][4:] == [1000, 0, PHASES.index(Phase.HELD), 0, 0]
    timeline.take(
        1, [replace(collective(0, 0, 35_001, 35_007), call=CallFacts(held_ns=35_000 * MS))]
    )
    page.take(timeline.news())
    done = PHASES.index(Phase.DONE)
    assert page.slices[0, 0][4:] == [35_001_000, 35_007_000, done, 35_000_000, 0]


def paused(rank: int, stop: int, began: float, ended: float = 0) -> LinePause:
    """A pause at a line, in ms."""
    place = Place("cell 3", 7, text="x = 1")
    return LinePause(rank, stop, place, "breakpoint()", int(began * MS), int(ended * MS))


def test_a_pause_at_a_line_is_time_that_the_rank_was_held_until_it_goes_on() -> None:
    timeline, page = Timeline(0, 2), Page()
    timeline.take(1, [collective(0, 0, 1, 2)], "cell 3", [paused(0, 1, 5)])
    page.take(timeline.news())
    ((_, number, kind, stop, *times),) = (each for each in page.slices.values() if each[1] < 0)
    assert stop == 1 and times == [5000, 0, PHASES.index(Phase.HELD), 0, 0]
    assert (page.kinds[kind][0], *page.kinds[kind][9:13]) == (
        "line 7",
        -1,
        "cell 3, line 7",
        "x = 1",
        "breakpoint()",
    )
    timeline.take(1, [], "cell 3", [paused(0, 1, 5)])
    assert timeline.news() is None
    both = [paused(0, 1, 5, 35_000), paused(0, 2, 35_001)]
    timeline.take(1, [collective(0, 1, 35_002, 35_003)], "cell 3", both)
    page.take(timeline.news())
    assert page.slices[0, number][4:] == [5000, 35_000_000, PHASES.index(PAUSED), 0, 0]
    assert len(page.slices) == 4
    assert not any(is_pause(each) for each in timeline.last(0, 4)[:1])
    timeline.end({0: 36_000 * MS}, FREED)
    page.take(timeline.news())
    assert {PHASES[each[6]] for each in page.slices.values()} == {Phase.DONE, PAUSED}
    assert set(timeline.last_arrivals()) == {(1, "default", 0), (1, "default", 1)}


def test_of_pauses_what_nothing_happens_in_is_cut_out_of_the_axis() -> None:
    timeline, page = Timeline(0, 2), Page()
    timeline.take(1, [collective(0, 0, 1, 2), collective(1, 0, 1, 2)], "", [paused(0, 1, 5)])
    news = timeline.news()
    page.take(news)
    assert news is not None and news["cuts"] == [], "it may go on: nothing is left out yet"
    # Rank 1 waits since the pause began, in what rank 0 issues after it; and issues one within.
    both = [collective(1, 1, 6, 46_002), collective(0, 1, 46_001, 46_002)]
    timeline.take(1, both, "", [paused(0, 1, 5, 46_000)])
    news = timeline.news()
    assert news is not None and news["cuts"] == [[6000, 46_000_000]]
    timeline.take(1, [collective(1, 2, 20_000, 20_001)], "", [paused(1, 1, 46_100, 46_900)])
    assert timeline.cuts() == [
        (6000, 20_000_000),
        (20_001_000, 46_000_000),
        (46_100_000, 46_900_000),
    ]
    held = replace(collective(0, 2, 60_000, 60_001), call=CallFacts(held_ns=5_000 * MS))
    timeline.take(1, [held])
    assert timeline.cuts()[-1] == (55_000_000, 60_000_000), "a step's pause is one, too"
    timeline.take(1, [collective(0, 3, 160_000, 260_000)])
    assert len(timeline.cuts()) == 4, "what only takes long is no pause"


def test_where_a_rank_parted_is_behind_the_last_that_it_shared_with_those_that_wait() -> None:
    timeline = Timeline(0, 3)
    shared = [collective(rank, n, n, n + 0.5) for rank in (0, 1, 2) for n in (1, 2)]
    timeline.take(1, [*shared, collective(0, 3, 3, None), collective(1, 3, 4, None)])
    waits = [(0, 3000), (1, 4000)]
    assert timeline.parted((2,)) == {"at": [(2, 2500)], "link": [*waits, (2, 2500)]}
    assert timeline.parted((0, 1)) == {}, "no other rank waits"
    timeline.take(1, [collective(2, 3, 9, None)])
    other = timeline.parted((2,))
    assert other == {"at": [(2, 2500)], "link": [*waits, (2, 9000)]}, "what it issued instead"
    timeline.take(2, [collective(0, 0, 20, None)])
    assert timeline.parted((2,)) == {"at": [], "link": [(0, 20_000)]}, "of the run before nothing"


def test_steps_a_second_are_those_of_the_run_of_late_without_pauses() -> None:
    timeline = Timeline(0, 1)
    steps = [replace(collective(0, n, 100 * n, 100 * n + 1), backwards=n) for n in range(1, 11)]
    timeline.take(1, steps)
    assert timeline.steps_a_second(0, 1_100 * MS) == 10
    assert timeline.steps_a_second(0, 60_000 * MS) == 0, "it makes none any more"
    assert timeline.steps_a_second(1, 1_100 * MS) == 0
    late = [
        replace(each, number=n, backwards=n) for n, each in ((11, collective(0, 11, 9_100, 9_101)),)
    ]
    timeline.take(1, late, "", [paused(0, 1, 1_100, 9_000)])
    assert 9 < timeline.steps_a_second(0, 9_200 * MS) <= 10
    timeline.take(2, [replace(collective(0, 0, 9_300, 9_301), backwards=0)])
    assert timeline.steps_a_second(0, 9_400 * MS) == 0


def test_a_pause_that_was_dropped_for_newer_slices_does_not_come_back() -> None:
    timeline = Timeline(0, 40_000)
    pauses = [paused(0, stop, stop, stop + 0.5) for stop in range(1, 30)]
    for seen in range(1, 30):
        timeline.take(1, [], "cell 3", pauses[:seen])
    stops = [each[3] for each in timeline.last(0, 100)]
    assert stops == list(range(22, 30))
    timeline.news()
    timeline.take(1, [], "cell 3", pauses)
    assert timeline.news() is None


def test_the_pauses_of_ranks_follow_from_their_events() -> None:
    def stopped(stop: int, at_ms: int, rank: int = 0, why: str = "") -> tuple[Any, int]:
        source = ("def f():", "    x = 1", "")
        at = {"file": "cell 3", "line": 7, "function": "f", "first": 6, "source": source}
        return LineStopped(rank=rank, cell=3, stop=stop, why=why, **at), at_ms

    stops = LineStops()
    for event, at_ms in (
        stopped(1, 10, why="breakpoint()"),
        stopped(1, 20, why="breakpoint(); an editor has it"),  # still the same stop
        (LineLeft(rank=0, cell=3, stop=1), 30),
        (LineLeft(rank=0, cell=3, stop=2), 40),  # before the word that it stopped
        stopped(2, 41),
        stopped(3, 50),
        stopped(1, 50, rank=1),
        (RankExited(rank=1, pid=1, exit_code=-9), 60),
        stopped(4, 70),
    ):
        stops.take(event, at_ms)
    assert [(each.rank, each.stop, each.began_ns, each.ended_ns) for each in stops.pauses] == [
        (0, 1, 10, 30),
        (0, 3, 50, 70),
        (1, 1, 50, 60),
        (0, 4, 70, 0),
    ]
    assert stops.pauses[0].place == Place("cell 3", 7, "f", "x = 1")
    assert stops.now[0].stop == 4
    stops.take(CellFinished(rank=0, cell=3, outcome="ok"), 80)
    assert not stops.now and stops.pauses[-1].ended_ns == 80


def test_the_runs_before_stay_and_their_collectives_are_others() -> None:
    timeline, page = Timeline(0, 2), Page()
    timeline.take(1, [collective(0, 0, 1, 2), collective(0, 1, 3, None)])
    page.take(timeline.news())
    timeline.take(2, [collective(0, 0, 10, 11)])
    page.take(timeline.news())
    assert sorted(page.slices) == [(0, 0), (0, 1), (0, 2)]
    assert PHASES[page.slices[0, 1][6]] == FREED  # nobody waits for it in another run
    assert [page.kinds[each[2]][13] for each in page.slices.values()] == [1, 1, 2]
    first, _, again = timeline.last(0, 3)
    assert first[3] == again[3] and timeline.collective(first) != timeline.collective(again)


def test_buckets_of_a_backward_pass_are_counted() -> None:
    timeline = Timeline(0, 1)
    records = [
        replace(backward(), number=n, slot=n, issued_ns=n + 1, backwards=1 + n // 3)
        for n in range(6)
    ]
    timeline.take(1, records)
    kinds = timeline.whole()["kinds"]
    buckets = [kinds[each[2]][3] for each in timeline.whole()["slices"]]
    assert buckets == [1, 2, 3, 1, 2, 3]


def test_it_stays_bounded_however_long_it_goes_on() -> None:
    timeline = Timeline(0, 2)
    for start in range(0, 20_000, 500):
        shapes = [
            replace(collective(0, n, n, n + 1), shape=(n,)) for n in range(start, start + 500)
        ]
        timeline.take(1, shapes)
        message = timeline.news()
        assert message is not None and len(message["slices"]) <= timeline_model.MOST_AT_ONCE
    whole = timeline.whole()
    assert len(whole["slices"]) <= timeline_model.MOST_PER_RANK
    assert len(whole["kinds"]) <= timeline_model.MOST_KINDS + 500


def test_what_is_too_much_for_one_message_is_passed_over_and_said() -> None:
    timeline = Timeline(0, 2)
    timeline.take(1, [collective(r, n, n, n + 1) for r in (0, 1) for n in range(1900)])
    message = timeline.news()
    assert message is not None and len(message["slices"]) == timeline_model.MOST_AT_ONCE
    assert timeline.whole()["skipped"] == 2 * 1900 - timeline_model.MOST_AT_ONCE


class Rings:
    """Stands in for the ranks' files: what was written so far."""

    def __init__(self) -> None:
        self.records: dict[int, list[Collective]] = {}
        self.read = 0

    def read_since(self, ranks: Ranks, run: int, first: dict[int, int], most: int) -> Collectives:
        of = {
            rank: tuple(each for each in records if each.number >= first.get(rank, 0))[-most:]
            for rank, records in self.records.items()
        }
        self.read = sum(map(len, of.values()))
        return Collectives(of, {"default": ranks})


def follow(tails: Tails, rings: Rings, run: CellRun) -> Sequence[Collective]:
    """What is new in `run`."""
    return tails.follow(rings, run)  # type: ignore[arg-type]


def test_tails_give_what_is_new_and_look_again_at_what_is_not_done() -> None:
    tails, rings, run = Tails(), Rings(), fake_run(4, (0, 1))
    rings.records = {0: [collective(0, 0, 1, 2), collective(0, 1, 3, None)], 1: []}
    assert len(follow(tails, rings, run)) == 2
    assert follow(tails, rings, run) == ()
    assert rings.read == 1, "the one that is not done is looked at again"
    rings.records[0][1] = collective(0, 1, 3, 9)
    (changed,) = follow(tails, rings, run)
    assert changed.over
    assert follow(tails, rings, run) == () and rings.read == 0
    assert [each.number for each in tails.collectives.of[0]] == [0, 1]


def test_tails_begin_anew_with_a_new_run_and_stay_bounded() -> None:
    tails, rings = Tails(), Rings()
    rings.records = {0: [collective(0, n, n, n + 1) for n in range(2000)]}
    assert len(follow(tails, rings, fake_run(4, (0,)))) == 512
    assert len(tails.collectives.of[0]) <= 256
    rings.records = {0: [collective(0, 0, 1, 2)]}
    assert [each.number for each in follow(tails, rings, fake_run(5, (0,)))] == [0]
    assert tails.run == 5
