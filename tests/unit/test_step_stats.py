"""From every rank's blocks to where a step's time goes."""

from __future__ import annotations

import random
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
    GRADIENTS,
    MS,
    OPTIMIZER,
    SIZES,
    STEPS,
    plan,
    ranks,
    summarise,
)

from ddp_notebook.bench.steps.arrivals import split_spans, straggler
from ddp_notebook.bench.steps.results import StepPoint
from ddp_notebook.bench.steps.stats import break_even, middle_parts

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
    # Each bucket takes 3 ms; the last one is ready when the backward ends.
    assert point.hook_exposed_us == pytest.approx(3 * MS / 1e3, rel=CLOSE)
    assert point.overlapped_us == pytest.approx(BACKWARD / 2 / 1e3, rel=CLOSE)
    assert point.logger_exposed_us == pytest.approx(3000)
    assert [each.size_bytes for each in point.arrivals] == SIZES
    assert point.ready_us == pytest.approx((2500, 5000), rel=CLOSE)


def test_points_are_ordered_by_bucket_and_batch_and_the_default_is_last() -> None:
    result = summarise(ABOUT, ranks(plan((8, 32), ("default", "25", "5"))))
    assert result.buckets == ("5", "25", "default")
    assert result.main_bucket == "default"
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
    assert result.points[0].arrivals == ()
    assert result.break_even is None
    assert any("One rank sends nothing" in note for note in result.notes)


def test_reducing_all_gradients_is_worked_out_from_a_part_where_they_are_many() -> None:
    first, *_, last = summarise(ABOUT, ranks(plan((8,)))).reduces
    assert (first.scaled, last.scaled) == (True, False)
    assert first.total_us == pytest.approx(first.each_us * GRADIENTS / first.size_bytes)
    assert last.total_us == pytest.approx(last.each_us)


def test_what_hooks_and_the_logger_miss_is_said() -> None:
    notes = " ".join(summarise(ABOUT, ranks(plan((8,)))).notes)
    assert "4.0 ms by no_sync, 3.0 ms by a hook, 1.0 ms too little" in notes
    assert "3.0 ms by DDP's logger, 1.0 ms too little" in notes


def test_a_crowded_machine_is_said() -> None:
    crowded = summarise(replace(ABOUT, cores=2), ranks(plan((8,)), 4))
    assert any("4 ranks of 1 threads share 2 cores" in note for note in crowded.notes)
    full = summarise(replace(ABOUT, cores=2), ranks(plan((8,)), 2))
    assert any("none is free to communicate" in note for note in full.notes)
    assert not any("cores" in note for note in summarise(ABOUT, ranks(plan((8,)))).notes)


def test_a_budget_that_was_too_small_for_all_rounds_is_said() -> None:
    first = [[b for b in blocks if b["round"] == 0] for blocks in ranks(plan((8,)))]
    assert "enough for 1 of 3 rounds" in " ".join(summarise(ABOUT, first).notes)
    assert "rounds" not in " ".join(summarise(ABOUT, ranks(plan((8,)))).notes)


# -- a rank that is late ---------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_rank_that_comes_late_to_each_bucket_is_named(late: int) -> None:
    result = summarise(ABOUT, ranks(plan(), 4, late=late))
    named = result.straggler
    assert named is not None
    assert (named.rank, named.where, named.share) == (late, "backward", 1.0)
    assert named.late_us == pytest.approx(4000, rel=CLOSE)
    assert result.points[0].arrivals[0].late_us[late] == pytest.approx(2000, rel=CLOSE)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_where_all_are_alike(seed: int) -> None:
    assert summarise(ABOUT, ranks(plan(), 4, seed=100 * seed)).straggler is None


def test_nobody_is_named_whose_step_only_begins_late() -> None:
    both = ranks(plan())
    for block in both[1]:
        if block["kind"] == "hooked":
            block["backward_began"] = [at + 5 * MS for at in block["backward_began"]]
            block["buckets"] = [
                [[*(at + 5 * MS for at in bucket[:3]), bucket[3]] for bucket in step]
                for step in block["buckets"]
            ]
    result = summarise(ABOUT, both)
    assert result.points[0].arrivals[0].late_us[1] > 4000, "it does arrive late"
    assert result.straggler is None


def test_nobody_is_named_for_waiting_for_a_core() -> None:
    both = ranks(plan(), late=1)
    for block in both[1]:
        if block["kind"] == "hooked":  # it was in the run queue for all that it is late by
            block["buckets"] = [
                [[*bucket[:3], 2 * MS * (number + 1)] for number, bucket in enumerate(step)]
                for step in block["buckets"]
            ]
    result = summarise(ABOUT, both)
    assert result.points[0].arrivals[-1].late_us[1] > 3000, "it does arrive late"
    assert result.points[0].own_us[1] == pytest.approx(result.points[0].own_us[0], rel=CLOSE)
    assert result.straggler is None


THREE_ROUNDS = [number for number in range(3) for _ in range(10)]


def test_nobody_is_named_for_being_late_in_one_round_only() -> None:
    forward = [[0, 0]] * 30
    late = [[6 * MS, MS]] * 30
    assert straggler(late, forward, THREE_ROUNDS, 10 * MS) is not None
    once_not = [[MS - 9 if r == 0 else 6 * MS, MS] for r in THREE_ROUNDS]
    assert straggler(once_not, forward, THREE_ROUNDS, 10 * MS) is None


def test_a_rank_that_is_late_before_its_backward_loses_the_time_in_its_forward() -> None:
    rounds = [0] * 10
    found = straggler([[MS, 6 * MS]] * 10, [[0, 5 * MS]] * 10, rounds, 20 * MS)
    assert found is not None
    assert (found.rank, found.where) == (1, "forward")
    assert found.low_us < found.late_us == 5000
    still = [[0, 0]] * 10
    assert straggler([[MS, 6 * MS]] * 3, still[:3], [0] * 3, 20 * MS) is None, "too few steps"
    assert straggler([[MS // 9, MS // 4]] * 10, still, rounds, 20 * MS) is None, "too little"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_ranks_that_differ_from_round_to_round_by_chance_are_not_named(
    ranks: int, count: int
) -> None:
    draw = random.Random(ranks * count)

    def run(late_rank: int, late: float) -> int | None:
        own, rounds = [], []
        for number in range(count):
            # Each rank a tenth faster or slower for the whole of a round, each step a little.
            speed = [1 + draw.gauss(0, 0.07) for _ in range(ranks)]
            for _ in range(8):
                times = [10 * MS * s * (1 + draw.gauss(0, 0.03)) for s in speed]
                times[late_rank] += late * 10 * MS
                own.append([int(time) for time in times])
                rounds.append(number)
        found = straggler(own, [[0] * ranks] * len(own), rounds, 30 * MS)
        return found.rank if found is not None else None

    assert sum(run(0, 0.0) is not None for _ in range(200)) <= 3
    assert sum(run(1, 0.8) == 1 for _ in range(50)) >= 48


# -- pieces ----------------------------------------------------------------------------

SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda t: [t[0], t[0], t[0] + t[1]]),
    min_size=1,
)


@settings(deadline=None)
@given(SPANS)
def test_exposed_and_overlapped_are_together_the_union_of_the_spans(
    buckets: list[list[int]],
) -> None:
    after, before = split_spans(buckets)
    covered = {t for ready, _, done in buckets for t in range(ready, done)}
    last_ready = max(bucket[0] for bucket in buckets)
    assert after == len([t for t in covered if t >= last_ready])
    assert before == len([t for t in covered if t < last_ready])


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
