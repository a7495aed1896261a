"""Steps at another number of ranks, by a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_results import ABOUT, LATENCY_US, SIZES, US_PER_BYTE, plan, ranks, summarise

from ddp_notebook.bench.steps.predict import (
    Ground,
    calibrated,
    exposed_us,
    predict,
    step_us,
)
from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.session.tools.bench_steps import predicted

GPU = Ground(
    reduce_s=lambda size: (LATENCY_US + size * US_PER_BYTE) / 1e6,
    latency_us=LATENCY_US,
    world_size=2,
    cores=8,
    threads=1,
    busy_cores=1.0,
    shares_cores=False,
)
TIMES = st.lists(st.floats(0, 1e4), min_size=1, max_size=8)


def made_by(ground: Ground, batches: tuple[int, ...] = (8, 32, 128)) -> StepBenchResult:
    """A result whose steps are those of the model on `ground`."""
    result = summarise(ABOUT, ranks(plan(batches)))
    points = tuple(replace(p, step_us=step_us(p, ground, 2)) for p in result.points)
    return replace(result, points=points)


def test_the_model_that_made_the_times_predicts_them() -> None:
    result = made_by(replace(GPU, shares_cores=True, busy_cores=0.5))
    prediction = predicted(result, 8)
    assert not prediction.refused
    assert prediction.world_size == 8
    assert [each.measured_us for each in prediction.checked] == [p.step_us for p in result.points]
    takes = [LATENCY_US + size * US_PER_BYTE for size in SIZES]
    point = result.points[0]
    ready = [0.5 * point.backward_us, point.backward_us]
    tail = max(ready[0] + takes[0], ready[1]) + takes[1] - point.backward_us
    spare = (8 - 2) / (2 * 0.5)
    assert spare > 1, "each rank has a core for its communication"
    assert prediction.checked[0].step_us == pytest.approx(point.local_us + tail, rel=0.05)
    assert prediction.errors == pytest.approx([0, 0, 0], abs=0.01)
    assert prediction.within == 0.2, "8 ranks have a core each"


def test_what_a_bucket_takes_more_beside_computation_is_found_from_the_steps() -> None:
    crowded = replace(GPU, shares_cores=True, cores=2)
    slow = replace(crowded, beside_us=1500.0)
    result = made_by(slow)
    assert calibrated(crowded, result.points, 2).beside_us == pytest.approx(1500)
    prediction = predict(result, crowded, 4)
    assert prediction.errors == pytest.approx([0, 0, 0], abs=1e-6)
    assert prediction.steps[0].step_us == pytest.approx(step_us(result.points[0], slow, 4))
    assert "1.5 ms more than by itself" in " ".join(prediction.assumes)


def test_a_point_is_checked_by_the_others_and_not_by_itself() -> None:
    crowded = replace(GPU, shares_cores=True, cores=2)
    first, *rest = made_by(crowded, (8, 16, 32, 64, 128)).points
    odd = replace(first, step_us=first.step_us * 1.5)
    result = replace(ABOUT, points=(odd, *rest))
    assert predict(result, crowded, 4).errors == pytest.approx([1 / 3, 0, 0, 0, 0])
    alone = replace(result, points=(odd,))
    assert calibrated(crowded, (odd,), 2).beside_us > 0
    assert predict(alone, crowded, 4).refused, "one point cannot both set the model and check it"


def test_a_model_that_is_far_off_where_it_can_be_checked_says_nothing() -> None:
    crowded = replace(GPU, shares_cores=True, cores=2)
    result = made_by(crowded)
    # No latency makes these right: the model is too long already.
    quick = tuple(replace(p, step_us=p.step_us * 0.6) for p in result.points)
    prediction = predict(replace(result, points=quick), crowded, 4)
    assert "off by 67% at half of the points" in prediction.refused
    assert "Off by more than 20% it says nothing" in prediction.refused
    assert "--budget" not in prediction.refused
    vague = tuple(replace(p, exposed_interval_us=(0.0, p.step_us)) for p in quick)
    said = predict(replace(result, points=vague), crowded, 4).refused
    assert "known to ±50% of the step only: a larger --budget may help" in said
    assert prediction.steps == ()


def test_the_stated_error_is_larger_where_ranks_share_cores_that_they_did_not_share() -> None:
    crowded = replace(GPU, shares_cores=True, cores=2)
    first, *rest = made_by(crowded).points
    result = replace(ABOUT, points=(replace(first, step_us=first.step_us * 1.1), *rest))
    prediction = predict(result, crowded, 8)
    assert max(prediction.errors) < 0.2
    assert prediction.within == pytest.approx(4 * 0.2)
    said = "8 ranks on 2 cores: how they take turns on a core cannot be known from 2"
    assert said in " ".join(prediction.assumes)
    here = predict(result, crowded, 2)
    assert here.within == max(here.errors)


def test_times_that_no_fit_explains_give_no_prediction_and_the_reason() -> None:
    result = summarise(ABOUT, ranks(plan((8,))))
    wild = tuple(
        replace(each, each_us=10.0 ** (number % 2 * 3))
        for number, each in enumerate(result.reduces)
    )
    prediction = predicted(replace(result, reduces=wild), 8)
    assert prediction.refused
    assert prediction.steps == ()
    assert predicted(replace(result, reduces=()), 8).refused


def test_what_the_model_takes_for_granted_is_said() -> None:
    result = made_by(GPU)
    said = " ".join(predict(result, GPU, 8).assumes)
    assert "This is a model, not a measurement" in said
    assert "Nothing was measured at that number of ranks" in said
    crowded = replace(GPU, shares_cores=True, cores=2)
    result = made_by(crowded)
    assert "communication takes all of its time from the computation" in " ".join(
        predict(result, crowded, 2).assumes
    )


def test_where_no_core_is_free_nothing_is_hidden() -> None:
    point = summarise(ABOUT, ranks(plan((8,)))).points[0]
    crowded = replace(GPU, shares_cores=True, cores=2)
    whole = sum(crowded.reduce_us(size, 2) for size in SIZES)
    assert step_us(point, crowded, 2) == pytest.approx(point.local_us + whole)
    assert step_us(point, GPU, 2) < step_us(point, crowded, 2)


def test_one_rank_sends_nothing() -> None:
    assert GPU.reduce_us(2**20, 1) == 0


@settings(deadline=None)
@given(st.integers(2, 64), st.integers(2, 64), st.integers(1, 2**28))
def test_more_ranks_never_reduce_faster(few: int, many: int, size: int) -> None:
    few, many = sorted((few, many))
    for ground in (GPU, replace(GPU, shares_cores=True)):
        assert ground.reduce_us(size, few) <= ground.reduce_us(size, many) * (1 + 1e-9)


@settings(deadline=None)
@given(TIMES, TIMES)
def test_exposed_is_between_the_last_bucket_and_all_of_them(
    ready: list[float], takes: list[float]
) -> None:
    count = min(len(ready), len(takes))
    ready, takes = sorted(ready[:count]), takes[:count]
    exposed = exposed_us(ready, takes, ready[-1])
    assert takes[-1] - 1e-6 <= exposed <= sum(takes) + 1e-6


def test_communication_that_ends_before_the_backward_is_not_exposed() -> None:
    assert exposed_us([10.0], [5.0], 100.0) == 0.0
