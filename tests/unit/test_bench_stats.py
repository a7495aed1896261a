"""From every rank's times to points and curves."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from bench_runs import bench_run, visits
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench import stats
from ddp_notebook.bench.intervals import median_interval, quantile
from ddp_notebook.bench.plan import CurvePlan, Plan, op_named
from ddp_notebook.bench.result import Curve

TWO = CurvePlan("all_reduce", "float32", "blocking", 2)
PLAN = Plan(factor=4)


def curve_of(
    plan: CurvePlan, ranks: Sequence[int], visits: Sequence[Sequence[dict[str, Any]]], whole: Plan
) -> Curve:
    """The curve of visits that are numbered as they come."""
    numbered = [[{"number": n, **each} for n, each in enumerate(mine)] for mine in visits]
    return stats.curve_of(plan, ranks, numbered, whole)


def visit(size: int, *times_ns: int, wrong: int = 0) -> dict[str, Any]:
    """What one rank measured of one size in one round."""
    return {
        "curve": 0,
        "size_bytes": size,
        "times_ns": list(times_ns),
        "issue_ns": [1000],
        "wrong": wrong,
    }


def test_an_iteration_took_as_long_as_on_its_slowest_rank() -> None:
    ranks = [[visit(4, 10_000, 30_000, 10_000)], [visit(4, 20_000, 10_000, 10_000)]]
    (point,) = curve_of(TWO, (0, 1), ranks, PLAN).points
    assert (point.size_bytes, point.count, point.iterations, point.rounds) == (4, 1, 3, 1)
    assert (point.latency_us, point.mean_us) == (20, 20)
    assert point.rank_us == (10, 10)
    assert point.skew_us == 10
    assert [point.p10_us, point.p90_us] == pytest.approx([12, 28])
    assert point.samples is not None
    assert point.samples.times_ns == ((10_000, 30_000, 10_000), (20_000, 10_000, 10_000))


def test_bandwidths_are_in_units_of_a_thousand_million_bytes_per_second() -> None:
    ranks = [[visit(4096, 1000)]] * 4
    (point,) = curve_of(
        CurvePlan("all_reduce", "float32", "blocking", 4), range(4), ranks, PLAN
    ).points
    assert point.algbw_gb_per_s == pytest.approx(4.096)
    assert point.busbw_gb_per_s == pytest.approx(1.5 * 4.096)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("broadcast", 1),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("barrier", 0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(op: str, factor: float) -> None:
    assert op_named(op).bus_factor(4) == factor
    assert op_named(op).bus_factor(1) == 0


def test_a_clock_that_did_not_move_measures_no_bandwidth() -> None:
    (point,) = curve_of(TWO, (0, 1), [[visit(4, 0)]] * 2, PLAN).points
    assert (point.algbw_gb_per_s, point.busbw_gb_per_s) == (0, 0)


def test_sizes_are_in_order_of_size() -> None:
    ranks = [[visit(16, 5), visit(4, 5), visit(1024, 5)]] * 2
    points = curve_of(TWO, (0, 1), ranks, PLAN).points
    assert [p.size_bytes for p in points] == [4, 16, 1024]


def test_wrong_elements_of_all_ranks_and_rounds_are_counted() -> None:
    ranks = [[visit(4, 5, wrong=1), visit(4, 5)], [visit(4, 5), visit(4, 5, wrong=2)]]
    (point,) = curve_of(TWO, (0, 1), ranks, PLAN).points
    assert (point.wrong, point.rounds) == (3, 2)


def test_of_a_rank_that_died_only_what_all_have_counts() -> None:
    ranks = [[visit(4, 5), visit(16, 5), visit(4, 9)], [visit(4, 5), visit(16, 5)]]
    assert [p.rounds for p in curve_of(TWO, (0, 1), ranks, PLAN).points] == [1, 1]
    assert curve_of(TWO, (0, 1), [[visit(4, 5)], []], PLAN).points == ()


def test_what_got_lost_on_the_way_is_left_out_and_shifts_nothing() -> None:
    ranks = [[visit(4, 5), visit(16, 5), visit(64, 5)]] * 2
    numbered = [[{"number": n, **each} for n, each in enumerate(mine)] for mine in ranks]
    del numbered[1][1]
    points = stats.curve_of(TWO, (0, 1), numbered, PLAN).points
    assert [p.size_bytes for p in points] == [4, 64]


def test_ranks_that_measured_different_things_are_not_compared() -> None:
    with pytest.raises(ValueError, match="did not measure the same"):
        curve_of(TWO, (0, 1), [[visit(4, 5)], [visit(16, 5)]], PLAN)
    with pytest.raises(ValueError, match="did not measure the same"):
        curve_of(TWO, (0, 1), [[visit(4, 5)], [visit(4, 5, 6)]], PLAN)


@given(st.lists(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), min_size=1, max_size=6))
def test_an_interval_encloses_the_median(rounds: list[list[int]]) -> None:
    low, median, high = median_interval(rounds)
    assert low <= median <= high
    assert median == statistics.median(t for times in rounds for t in times)


@given(st.lists(st.integers(1, 1000), min_size=1).map(sorted), st.floats(0, 1))
def test_a_quantile_lies_among_the_values(ordered: list[int], share: float) -> None:
    assert ordered[0] <= quantile(ordered, share) <= ordered[-1]


def test_an_interval_holds_the_median_of_the_next_run_about_19_times_in_20() -> None:
    """Also where the rounds differ, which the order of the values alone does not see."""
    chance = random.Random(1)
    for drift in (0.0, 0.1):
        held = sum(_holds_the_next(chance, drift) for _ in range(400))
        assert held >= 0.92 * 400, (drift, held)


def _holds_the_next(chance: random.Random, drift: float) -> bool:
    low, _, high = median_interval(_drawn(chance, drift))
    _, other, _ = median_interval(_drawn(chance, drift))
    return low <= other <= high


def _drawn(chance: random.Random, drift: float) -> list[list[float]]:
    rounds = []
    for _ in range(5):
        moment = chance.gauss(0, drift)
        rounds.append([1000 * math.exp(moment + chance.expovariate(10)) for _ in range(20)])
    return rounds


def test_more_rounds_narrow_the_interval() -> None:
    chance = random.Random(2)
    rounds = [[chance.gauss(1000, 50) for _ in range(20)] for _ in range(12)]
    low, _, high = median_interval(rounds)
    low_few, _, high_few = median_interval(rounds[:3])
    assert high - low < high_few - low_few


def test_one_round_is_never_precise() -> None:
    assert not any(p.precise for p in bench_run(rounds=1, noise=0.001).points)
    assert all(p.precise for p in bench_run(rounds=5, noise=0.01).points)


def test_the_fit_finds_what_the_times_were_made_of() -> None:
    (curve,) = bench_run(noise=0.01).curves
    assert curve.fit is not None
    assert curve.fit.latency_s == pytest.approx(300e-6, rel=0.03)
    assert curve.fit.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.03)
    assert curve.fit.from_bytes == 16  # 4 B is one element: fewer than two for each rank


def test_what_cannot_be_fitted_says_why() -> None:
    (curve,) = bench_run(Plan(max_bytes=64, factor=4)).curves
    assert curve.fit is None
    assert "at least 4 sizes" in curve.no_fit
    (curve,) = bench_run(world_size=1).curves
    assert curve.no_fit == "one rank sends nothing"
    (curve,) = bench_run(Plan(ops=("barrier",))).curves
    assert (curve.fit, curve.no_fit) == (None, "")


def test_a_rank_that_comes_2_ms_late_is_named() -> None:
    (curve,) = bench_run(world_size=4, late={2: 2e-3}).curves
    assert curve.straggler == 2
    assert curve.straggler_late_us == pytest.approx(2000, rel=0.01)


def test_ranks_that_come_together_have_no_straggler() -> None:
    assert bench_run(world_size=4).curves[0].straggler is None
    assert bench_run(world_size=4, late={2: 20e-6}).curves[0].straggler is None
    assert bench_run(world_size=1).curves[0].straggler is None


def test_ranks_of_a_smaller_world_are_its_first() -> None:
    plan = Plan(world_sizes=(2, 3), factor=16)
    run = bench_run(plan, 3)
    assert [curve.ranks for curve in run.curves] == [(0, 1), (0, 1, 2)]
    assert [curve.world_size for curve in run.curves] == [2, 3]


def test_made_up_visits_are_like_those_of_ranks() -> None:
    made = visits(PLAN, 2)
    assert {len(v["times_ns"]) for v in made[0]} == {20}
    assert set(made) == {0, 1}
