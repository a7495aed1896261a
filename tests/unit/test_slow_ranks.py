"""Who is slow, and in what: delays that are found, noise that is not, at any number of ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddp_notebook.diagnosis.training.slow import slow_ranks
from ddp_notebook.model import (
    Diagnosis,
    LineLeft,
    LineStopped,
    PipelinePart,
    Place,
    Ranks,
    RankState,
    Remark,
    Role,
    Snapshot,
    StepPart,
    StepTimes,
    TimedStep,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.training import pipelines, step_marks
from ddp_notebook.rank.training.pipelines import Pipelines
from ddp_notebook.rank.training.step_marks import StepMarks
from ddp_notebook.rank.training.step_times import steps
from ddp_notebook.session.runs.gather import remarks_on
from ddp_notebook.testing import fake_run
from ddp_notebook.views import findings
from ddp_notebook.views.board_rows import BoardFacts, board_of

PARTS = tuple(StepPart)
STEP_US = 20_000
PLACES = {
    StepPart.DATA: Place("train.py", 31, "", "for x in loader:"),
    StepPart.FORWARD: Place("train.py", 33, "", "y = net(x)"),
    StepPart.BACKWARD: Place("train.py", 34, "", "y.sum().backward()"),
    StepPart.OPTIMIZER: Place("train.py", 35, "", "opt.step()"),
}
Delay = Callable[[int, int], float]
"""By rank and step, for how long the rank is held up in the part, in us."""


def ranks_of(
    size: int,
    delay: Delay = lambda rank, step: 0,
    part: str = StepPart.DATA,
    *,
    noise: float = 0.1,
    steps: int = 150,
    seed: int = 0,
    disturbed: Mapping[int, range] | None = None,
    **fields: object,
) -> dict[int, StepTimes]:
    """A job of `size` ranks, step by step; each part takes what it takes, times some noise.

    `disturbed` has for a rank the steps in which it takes twice as long.
    """
    chance = random.Random(seed)
    now_us = 1_000_000
    rows: dict[int, list[TimedStep]] = {rank: [] for rank in range(size)}
    for step in range(steps):
        own, queued = {}, {}
        for rank in range(size):
            times = [STEP_US / 7 * chance.lognormvariate(0, noise) for _ in PARTS]
            queued[rank] = STEP_US * chance.expovariate(10 / noise) if noise > 0.2 else 0.0
            if disturbed and step in disturbed.get(rank, ()):
                times = [2 * each for each in times]
            if part in PARTS:
                times[PARTS.index(StepPart(part))] += delay(rank, step)
            else:
                queued[rank] += delay(rank, step)
            own[rank] = times
        arrived = {rank: now_us + int(sum(own[rank]) + queued[rank]) for rank in own}
        over_us = max(arrived.values()) + 500
        for rank, at_us in arrived.items():
            own_us = tuple(map(int, own[rank]))
            row = TimedStep(step, over_us - at_us, int(queued[rank]), own_us)
            rows[rank].append(row)
        now_us = over_us
    usual = {"run": 1, "host": "h", "cores": (0, 1), "key": "SGD 1 default", "places": PLACES}
    return {
        rank: StepTimes(rank=rank, rows=tuple(of_rank), **{**usual, **fields})  # type: ignore[arg-type]
        for rank, of_rank in rows.items()
    }


def only(remarks: Iterable[Remark]) -> Remark:
    found = tuple(remarks)
    assert len(found) == 1, found
    assert found[0].kind == "slow-rank" and found[0].evidence
    return found[0]


def late(culprit: int, share: float, every: int = 1) -> Delay:
    return lambda rank, step: share * STEP_US * (rank == culprit and step % every == 0)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("size", "noise"), [(2, 0.05), (4, 0.3), (8, 0.3)])
def test_a_delay_of_a_tenth_of_a_step_is_found(part: StepPart, size: int, noise: float) -> None:
    for culprit in range(size):
        remark = only(slow_ranks(ranks_of(size, late(culprit, 0.1), part, noise=noise, seed=size)))
        assert remark.ranks == (culprit,)


class Answers:
    """Ranks that tell their step times, and nothing else."""

    def __init__(self, times: Mapping[int, StepTimes]) -> None:
        self.times = times

    def ask(self, ranks: Ranks, question: object, *_: object) -> Mapping[int, StepTimes]:
        return self.times if question is calls.STEP_TIMES else {}


def test_a_rank_that_the_user_stops_in_every_step_is_not_called_slow() -> None:
    cluster: Any = Answers(ranks_of(2, late(1, 30)))
    run = fake_run(1, (0, 1), cluster=cluster)
    assert only(remarks_on(run.events, cluster)).ranks == (1,)
    stopped = LineStopped(rank=1, cell=1, stop=1, file="cell 1", line=3, function="<module>")
    run.take([stopped, LineLeft(rank=1, cell=1, stop=1)])
    assert remarks_on(run.events, cluster) == ()


def test_its_part_and_its_lines_are_named() -> None:
    for part, words in (
        (StepPart.DATA, "in its DataLoader (train.py, line 31)"),
        (StepPart.LOOP, "in your code after the optimizer's step (train.py, line 35)"),
        (StepPart.FORWARD, "in the forward (train.py, line 33)"),
        (StepPart.LOSS, "in your code after the forward (train.py, line 33)"),
        (StepPart.BACKWARD, "in the backward (train.py, line 34)"),
        (StepPart.AFTER, "in your code after the backward (train.py, line 34)"),
        (StepPart.OPTIMIZER, "in the optimizer's step (train.py, line 35)"),
    ):
        remark = only(slow_ranks(ranks_of(4, late(2, 0.5), part)))
        assert words in remark.text, remark.text
    assert "waited for it in" in remark.text and "of 147 steps" in remark.text
    unknown = only(slow_ranks(ranks_of(4, late(2, 0.5), StepPart.LOOP, places={})))
    assert "in your code after the optimizer's step." in unknown.text


def test_a_delay_in_some_of_the_steps_is_found() -> None:
    for every in (2, 5, 8):
        remark = only(slow_ranks(ranks_of(4, late(1, 0.8, every), noise=0.2)))
        assert remark.ranks == (1,)
    assert not slow_ranks(ranks_of(4, late(1, 0.8, 20)))


def test_two_slow_ranks_are_named_both() -> None:
    def delay(rank: int, step: int) -> float:
        return 0.4 * STEP_US * (rank in (1, 3))

    found = slow_ranks(ranks_of(6, delay))
    assert [remark.ranks for remark in found] == [(1,), (3,)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [2, 4])
def test_nobody_is_named_where_ranks_differ_by_chance(size: int, seed: int) -> None:
    noise = (0.02, 0.1, 0.3, 0.6)[seed % 4]
    disturbed = {seed % size: range(40, 80)} if seed % 2 else None
    times = ranks_of(size, noise=noise, seed=seed, disturbed=disturbed, steps=60 + 40 * (seed % 3))
    assert slow_ranks(times) == ()


def test_nobody_is_named_without_proof() -> None:
    delay = late(1, 0.5)
    assert slow_ranks({}) == ()
    assert slow_ranks(ranks_of(2, delay, steps=20)) == (), "too few steps"
    assert slow_ranks(ranks_of(2, delay, key="")) == (), "nothing is known of who trains what"
    times = ranks_of(2, delay)
    other = ranks_of(2, delay, key="SGD 2 default")
    assert slow_ranks({0: times[0], 1: other[1]}) == (), "stages of a pipeline: not the same model"
    other = ranks_of(2, delay, host="g")
    assert slow_ranks({0: times[0], 1: other[1]}) == (), "clocks of two hosts"
    assert slow_ranks(ranks_of(2, late(1, 0.03))) == (), "rank 0 prints a line in each step"


def test_who_waits_where_it_cannot_be_told_from_work_is_not_slow() -> None:
    """Rank 0's data come late: rank 1 waits for it in its forward, unseen."""
    slow = ranks_of(2, late(0, 0.5), StepPart.DATA)
    seems = ranks_of(2, late(1, 0.5), StepPart.FORWARD)
    assert slow_ranks({0: slow[0], 1: seems[1]}) == ()


def test_another_process_on_its_core_is_named() -> None:
    times = ranks_of(4, late(3, 0.5), "core")
    assert slow_ranks(times) == (), "it may move to another core"
    remark = only(slow_ranks({**times, 3: replace(times[3], cores=(1,))}))
    assert remark.ranks == (3,)
    assert "while other processes use its cores (1)" in remark.text


def test_many_ranks_take_a_moment() -> None:
    remark = only(slow_ranks(ranks_of(500, late(77, 0.5), steps=60)))
    assert remark.ranks == (77,)


def test_it_is_shown_as_no_mistake() -> None:
    remark = only(slow_ranks(ranks_of(2, late(1, 0.5))))
    diagnosis = Diagnosis(remarks=(remark,))
    shown = findings.text(diagnosis)
    assert shown.startswith("✓ No problem found.") and "Rank 1 is slow" in shown
    assert "✗" not in shown and "Rank 1 is slow" in findings.html(diagnosis)
    assert not diagnosis.wrong and diagnosis.to_json()["remarks"][0]["ranks"] == [1]
    snapshot = Snapshot((RankState(0), RankState(1)), "gloo")
    board = board_of(BoardFacts(snapshot, diagnosis=diagnosis))
    assert remark.text in board.notes
    alone = board_of(BoardFacts(snapshot)).rows
    assert [row.role for row in board.rows] == [alone[0].role, Role.LATE], "its row says so"


# -- what a rank's steps are made of -------------------------------------------------------


def ms(value: float) -> int:
    return int(value * 1e6)


def marks_of_step(number: int, begin_ms: float) -> list[tuple[int, int, int, int]]:
    """20 ms from one reduction to the next, 2 of them without a core."""
    queued = ms(2 * number)
    at = [
        (step_marks.STEP, 1, step_marks.UNKNOWN),
        (step_marks.STEPPED, 2, queued),
        (step_marks.LOADING, 3, step_marks.UNKNOWN),
        (step_marks.LOADED, 7, step_marks.UNKNOWN),
        (step_marks.FORWARD, 8, queued),
        (step_marks.INNER, 9, step_marks.UNKNOWN),
        (step_marks.FORWARDED, 11, step_marks.UNKNOWN),
        (step_marks.BACKWARD, 12, queued),
        (step_marks.BUCKET, 16, queued + ms(2)),
        (step_marks.REDUCED, 20, queued + ms(2)),
    ]
    return [(kind, number, ms(begin_ms + after), waited) for kind, after, waited in at]


def test_a_step_is_parted_at_its_marks() -> None:
    marks = [mark for step in range(4) for mark in marks_of_step(step, 20 * step)]
    rows = steps(marks, [])
    assert [row.number for row in rows] == [1, 2, 3]
    for row in rows:
        own = dict(zip(StepPart, row.own_us, strict=True))
        assert own[StepPart.DATA] == 4000 and own[StepPart.FORWARD] == 2000
        assert own[StepPart.BACKWARD] == 2000, "without the 2 ms for which it had no core"
        assert own[StepPart.LOOP] == 2000 and own[StepPart.LOSS] == 1000
        assert own[StepPart.AFTER] == own[StepPart.OPTIMIZER] == 1000
        assert row.waited_us == 1000 + 4000, "for buffers, and for gradients"
        assert row.queued_us == 2000 and row.whole_us == 20_000


def test_what_waits_in_a_collective_is_no_work_and_unmarked_steps_are_left_out() -> None:
    marks = [mark for step in range(3) for mark in marks_of_step(step, 20 * step)]
    rows = steps(marks, [(ms(23), ms(26))])
    assert rows[0].own_us[0] == 1000 and rows[0].waited_us == 3000 + 5000
    begin = (step_marks.REDUCED, 0, ms(480), ms(48))
    later = [begin, *marks_of_step(24, 480)]
    assert steps([*marks, *later], [])[-1].whole_us == 20_000
    assert steps([], []) == []


def test_in_a_pipeline_no_step_is_marked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages tell times nothing: marking each micro-batch would cost, and be for nothing."""
    part = PipelinePart("1F1B", (0,), 2, 4, (0,), (0, 1))
    monkeypatch.setattr(pipelines, "part_of", lambda _: part)
    monkeypatch.setitem(sys.modules, pipelines.SCHEDULES_MODULE, sys)
    marks, found = StepMarks(CallSites(UserCode())), Pipelines()
    found.found = marks.end

    def train() -> int:
        before = marks.written
        for kind in (step_marks.FORWARD, step_marks.BACKWARD, step_marks.STEPPED) * 5:
            marks.mark(kind)
            marks.reduced()
        return marks.written - before

    assert train()
    found.see(sys._getframe())
    assert not train()
    marks.begin()  # the next run
    assert train()
