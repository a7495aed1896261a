"""From every rank's blocks to where a step's time goes."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_results import (
    ABOUT,
    BACKWARD,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OVERLAPPED,
    STEPS,
    plan,
    ranks,
    summarise,
)

from ddp_notebook.bench.steps import StepPoint, break_even, middle_parts
from ddp_notebook.rank.bench.collectives import since_ns
from ddp_notebook.rank.bench.steps import overlapped_ns

CLOSE = 0.05


def test_a_step_is_split_into_what_it_was_made_of() -> None:
    point = summarise(ABOUT, ranks(plan((8,)))).points[0]
    assert point.steps == 3 * STEPS
    assert point.forward_us == pytest.approx(FORWARD / 1e3, rel=CLOSE)
    assert point.backward_us == pytest.approx(BACKWARD / 1e3, rel=CLOSE)
    assert point.optimizer_us == pytest.approx(OPTIMIZER / 1e3, rel=CLOSE)
    assert point.exposed_us == pytest.approx(EXPOSED / 1e3, rel=CLOSE)
    parts_us = point.forward_us + point.backward_us + point.exposed_us + point.optimizer_us
    assert parts_us == pytest.approx(point.step_us, rel=CLOSE)
    low, high = point.exposed_interval_us
    assert low <= point.exposed_us <= high
    assert point.exposed_share == pytest.approx(
        EXPOSED / (FORWARD + BACKWARD + OPTIMIZER + EXPOSED), rel=CLOSE
    )
    assert point.alone_us == pytest.approx(point.local_us, rel=CLOSE)
    assert point.samples_per_s == pytest.approx(2 * 8 / point.step_us * 1e6)
    # The rank that comes last waits for no other: what it sees is communication alone.
    assert point.overlapped_us == OVERLAPPED / 1e3


def test_points_are_ordered_by_bucket_and_batch_and_the_default_is_last() -> None:
    result = summarise(ABOUT, ranks(plan((8, 32), ("default", "25", "5"))))
    assert result.buckets == ("5", "25", "default")
    assert [(p.bucket, p.batch) for p in result.points][:2] == [("5", 8), ("5", 32)]
    assert [p.batch for p in result.main_points] == [8, 32]


def test_a_block_that_one_rank_lacks_is_left_out_on_all() -> None:
    both = ranks(plan((8,)))
    whole = summarise(ABOUT, both)
    cut = summarise(replace(ABOUT, problem="It was cut."), [both[0], both[1][: len(both[1]) // 2]])
    assert cut.problem == "It was cut."
    assert sum(p.steps for p in cut.points) < sum(p.steps for p in whole.points)
    assert summarise(ABOUT, [both[0], []]).points == ()


def test_one_rank_has_no_communication_to_tell() -> None:
    result = summarise(ABOUT, ranks(plan((8,)), 1))
    assert result.points[0].overlapped_us is None
    assert result.break_even is None
    assert any("One rank sends nothing" in note for note in result.notes)


def test_a_crowded_machine_is_said() -> None:
    crowded = summarise(replace(ABOUT, cores=2), ranks(plan((8,)), 4))
    assert any("4 ranks of 1 threads share 2 cores" in note for note in crowded.notes)
    full = summarise(replace(ABOUT, cores=2), ranks(plan((8,)), 2))
    assert any("none is free for communication" in note for note in full.notes)
    assert not any("cores" in note for note in summarise(ABOUT, ranks(plan((8,)))).notes)


def test_a_budget_that_was_too_small_for_all_rounds_is_said() -> None:
    first = [[b for b in blocks if b["round"] == 0] for blocks in ranks(plan((8,)))]
    assert "enough for 1 of 3 rounds" in " ".join(summarise(ABOUT, first).notes)
    assert "rounds" not in " ".join(summarise(ABOUT, ranks(plan((8,)))).notes)


# -- pieces ----------------------------------------------------------------------------

SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda t: [t[0], t[0] + t[1]])
)


@settings(deadline=None)
@given(SPANS)
def test_communication_that_is_overlapped_is_the_union_of_the_spans_before_the_last_gradient(
    spans: list[list[int]],
) -> None:
    covered = {t for ready, done in spans for t in range(ready, done)}
    last_ready = max((ready for ready, _ in spans), default=0)
    assert overlapped_ns(spans) == len([t for t in covered if t < last_ready])


class Event:
    """A stand-in for CUDA's: its time is known once somebody has waited for it."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.done = False

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: Event) -> float:
        assert end.done, "CUDA raises for an event that is not reached"
        return end.at_ms - self.at_ms


def test_stamps_of_a_gpu_count_from_the_start_of_the_step() -> None:
    spans = [(Event(11.0), Event(14.0)), (Event(12.5), Event(15.0))]
    start = Event(10.0)
    start.done = True
    counted = [since_ns(start, span) for span in spans]
    assert counted == [[1_000_000, 4_000_000], [2_500_000, 5_000_000]]
    assert overlapped_ns(counted) == 1_500_000
    assert since_ns(100, (150, 170)) == [50, 70], "on a CPU a stamp is a number"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1))
def test_the_parts_of_the_middle_fifth_add_up_to_its_mean(steps: list[list[int]]) -> None:
    totals = sorted(map(sum, steps))
    outside = 2 * len(totals) // 5
    middle = totals[outside : len(totals) - outside]
    assert sum(middle_parts(steps)) == pytest.approx(statistics.fmean(middle))


def point(batch: int, efficiency: float, world_size: int = 2) -> StepPoint:
    """A point of that efficiency."""
    return StepPoint(
        batch=batch,
        bucket="default",
        steps=9,
        step_us=1000.0,
        local_us=900.0,
        forward_us=300.0,
        backward_us=500.0,
        optimizer_us=100.0,
        exposed_us=100.0,
        exposed_interval_us=(90.0, 110.0),
        alone_us=1000.0 * efficiency,
        world_size=world_size,
    )


def test_break_even_is_where_all_ranks_do_as_much_as_one_alone() -> None:
    assert break_even([point(8, 0.25), point(32, 0.75)]) == pytest.approx(16)
    assert break_even([point(8, 0.6), point(32, 0.9)]) == 0.0
    assert break_even([point(8, 0.2), point(32, 0.4)]) is None
    assert break_even([point(8, 0.9), point(32, 0.4)]) is None
    assert break_even([]) is None
    assert break_even([point(8, 1.0, 1)]) is None
