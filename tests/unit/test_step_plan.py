"""What a benchmark of training steps will run."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_notebook.bench.steps import (
    Memory,
    StepPlan,
    parse_batches,
    parse_buckets,
)
from ddp_notebook.model import codec


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_batches_are_read_as_they_are_written_smallest_first(batches: list[int]) -> None:
    assert parse_batches(" , ".join(map(str, batches))) == tuple(sorted(set(batches)))


@pytest.mark.parametrize("text", ["", ",", "8,x", "0", "-8", "8.5", "8 16"])
def test_what_is_no_batch_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 8,16,32\."):
        parse_batches(text)


def test_buckets_keep_their_order_and_may_be_the_default() -> None:
    assert parse_buckets("25, 1,default,0.5,1") == ("25", "1", "default", "0.5")
    plan = StepPlan(buckets=("default", "0.5"))
    assert [plan.bucket_mb(each) for each in plan.buckets] == [None, 0.5]


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e9", "one", "1 MB"])
def test_what_is_no_bucket_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 1,5,25,default\."):
        parse_buckets(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget_s": 0.0},
        {"budget_s": float("nan")},
        {"batches": ()},
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        StepPlan(**wrong)  # type: ignore[arg-type]


def test_a_plan_survives_the_way_to_the_ranks() -> None:
    plan = StepPlan(model="net", batches=(4, 8), buckets=("1", "default"), budget_s=3.5)
    assert codec.decode(StepPlan, json.loads(json.dumps(codec.encode(plan)))) == plan


@settings(deadline=None)
@given(
    st.sets(st.integers(1, 999), min_size=1, max_size=4),
    st.sets(st.sampled_from(["1", "5", "25", "default"]), min_size=1),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_every_kind_of_block_comes_once_in_every_round(
    batches: set[int], buckets: set[str], world_size: int, seed: int
) -> None:
    plan = StepPlan(batches=tuple(sorted(batches)), buckets=tuple(buckets), seed=seed)
    blocks = plan.schedule(world_size)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert [block.round for block in blocks] == sorted(block.round for block in blocks)
    seen = Counter((b.round, b.kind, b.batch, b.bucket) for b in blocks)
    assert set(seen.values()) == {1}
    kinds = 2 if world_size > 1 else 1
    each = len(batches) * len(buckets) * kinds + len(batches)
    assert len(blocks) == plan.rounds * each
    assert blocks == plan.schedule(world_size), "alike on all ranks"
    steps = len(batches) * len(buckets)
    assert {block.kind for block in blocks[:steps]} == {"plain"}, "the steps themselves first"


@settings(deadline=None)
@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(0, 500), st.integers(1, 2))
def test_at_least_the_least_and_at_most_the_most_steps_are_timed(
    each_ns: float, left_ns: float, blocks_left: int, kinds: int
) -> None:
    plan = StepPlan()
    steps = plan.steps(each_ns, left_ns, blocks_left, kinds)
    assert plan.min_steps <= steps <= plan.max_steps


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 2**40), st.floats(1, 2**30), st.integers(1, 10**6))
def test_the_batch_that_is_said_to_fit_does(
    available: int, fixed: int, sample: float, batch: int
) -> None:
    memory = Memory(available, fixed, sample)
    refusal = memory.refusal((1, batch))
    assert bool(refusal) == (memory.needs(batch) > available)
    if refusal.endswith(" fits.") and "No batch" not in refusal:
        fits = int(refusal.rsplit("A batch of ", 1)[1].removesuffix(" fits.").replace(",", ""))
        assert 0 < fits < batch
        assert memory.needs(fits) <= available < memory.needs(fits + 1) + 2 * sample


def test_the_time_left_is_at_most_the_rest_of_the_budget() -> None:
    """A first block of many is slow, and by it alone the rest would seem to take for ever."""
    plan = StepPlan(budget_s=30.0)
    assert plan.left_s(13.0, 0.07) == 17.0
    assert plan.left_s(1.0, 0.5) == 1.0, "a small model is done before"
    assert plan.left_s(31.0, 0.5) is None
