"""How far a run is believed, what it means in words, and how it stands against another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bench_runs import QUIET, SOCKET, bench_run

from ddp_notebook.bench.baseline import compare
from ddp_notebook.bench.notes import duration, round_bytes
from ddp_notebook.bench.plan import Plan
from ddp_notebook.bench.results import Change, Trust
from ddp_notebook.views.bench.table import table_text

BUSY = {**QUIET, "host_cpu_s": 45.0}
"""The host was busy for 45 core-seconds of 10 s, 10 of which were the two ranks'."""


# -- the badge ---------------------------------------------------------------------------


def test_a_quiet_run_is_good() -> None:
    run = bench_run()
    assert (run.trust, run.reasons) == (Trust.GOOD, ())


def test_load_from_other_processes_lowers_the_badge_and_says_how_much() -> None:
    run = bench_run(answers=(BUSY, BUSY))
    assert run.trust is Trust.NOISY
    assert run.reasons[0] == "other processes kept 3.5 of 8 cores busy meanwhile"
    fair = {**QUIET, "host_cpu_s": 20.0}
    assert bench_run(answers=(fair, fair)).trust is Trust.FAIR


def test_fewer_than_two_cores_per_rank_deserve_a_warning() -> None:
    run = bench_run(cores=2)
    assert run.trust is Trust.FAIR
    assert "2 ranks on 2 cores: with fewer than 2 cores per rank" in run.reasons[0]
    assert bench_run(cores=4).trust is Trust.GOOD
    assert bench_run(cores=0).trust is Trust.GOOD  # not known


def test_wrong_results_make_all_times_meaningless() -> None:
    run = bench_run(wrong={4: 2, 16: 1})
    assert run.trust is Trust.NOISY
    assert run.reasons[0].startswith("results were wrong at 4 B and 16 B")
    assert run.notes[0] == "all_reduce gave wrong results: 10 elements at 4 B, and more at 16 B."


def test_medians_that_are_hardly_known_say_nothing() -> None:
    run = bench_run(drift=0.5, seed=1)
    assert run.trust is Trust.NOISY
    assert any("known no better than" in reason for reason in run.reasons)


def test_medians_that_are_not_known_well_enough_ask_for_more_time() -> None:
    run = bench_run(drift=0.08, seed=1)
    assert run.trust is Trust.FAIR
    assert any("--budget" in reason for reason in run.reasons)


def test_a_long_tail_is_said() -> None:
    plan = Plan(factor=4)
    run = bench_run(plan, noise=0.01)
    assert not any("mean" in reason for reason in run.reasons)
    tailed = bench_run(plan, noise=8.0, seed=2)
    assert any("the mean is more than 2 times the median" in reason for reason in tailed.reasons)


# -- in words ----------------------------------------------------------------------------


def test_a_fit_is_told_in_words() -> None:
    text = bench_run(noise=0.005).notes[0]
    assert text.startswith("Below 64 KiB you pay 30")
    assert "µs however little you send. Large tensors move at " in text
    assert "Half of that speed takes 58" in text or "Half of that speed takes 59" in text


def test_a_straggler_is_named_in_words() -> None:
    notes = bench_run(world_size=4, late={3: 2e-3}).notes
    assert any(n.startswith("Rank 3 brings its part 2 ms after the others") for n in notes)


def test_a_plain_socket_is_what_it_is_measured_against() -> None:
    run = bench_run(floors=[SOCKET])
    assert any("A plain TCP socket here takes 20 µs one way" in note for note in run.notes)
    assert not any("socket" in note for note in bench_run().notes)
    slow = {**SOCKET, "bandwidth_gb_per_s": 0.5}
    assert not any("socket" in note for note in bench_run(floors=[slow]).notes)


def test_gloos_spinning_thread_is_known_by_its_tail_and_its_cpu_time() -> None:
    tailed = bench_run(loop_cpu=0.6, noise=8.0, seed=2)
    assert any("loop thread used 60% of a core" in note for note in tailed.notes)
    even = bench_run(loop_cpu=0.6)
    assert not any("loop thread" in note for note in even.notes)


def test_before_and_after_tuning_is_said() -> None:
    notes = bench_run(Plan(factor=4, tune=True)).notes
    assert any("SCHED_BATCH the mean time is 1.00 times what it was" in note for note in notes)


def test_one_rank_is_told_that_its_times_are_not_of_communication() -> None:
    assert "One rank sends nothing" in bench_run(world_size=1).notes[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(280e-6, "280 µs"), (1.234e-3, "1.23 ms"), (2.0, "2 s"), (0.0, "0 µs"), (0.9999e-3, "1 ms")],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_computed_sizes_are_rounded_for_people() -> None:
    assert round_bytes(525_432.7) == 513 * 1024
    assert round_bytes(0.3) == 1


# -- against a baseline ------------------------------------------------------------------


def test_an_unchanged_run_is_not_judged_to_be_changed_20_of_20() -> None:
    chance = random.Random(5)
    for _ in range(20):
        first, second = (bench_run(drift=0.05, seed=chance.randrange(10**6)) for _ in range(2))
        (change,) = compare(second, first)
        assert change.change is Change.SAME


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, Change.SLOWER), (1 / 1.2, Change.FASTER)])
def test_a_slowdown_of_a_fifth_is_judged_as_such(factor: float, verdict: Change) -> None:
    before = bench_run(drift=0.02, seed=1)
    (change,) = compare(bench_run(drift=0.02, seed=2, slower=factor), before)
    assert change.change is verdict
    assert change.ratio == pytest.approx(factor, rel=0.05)
    assert len(change.points) == len(before.points)


@pytest.mark.parametrize("drift", [0.1, 0.2])
def test_sizes_that_are_known_badly_decide_together(drift: float) -> None:
    plan = Plan(max_bytes=2**24, factor=4)
    chance = random.Random(3)
    found, alone = [], []
    for _ in range(20):
        before, same, slower = (
            bench_run(plan, drift=drift, rounds=9, slower=factor, seed=chance.randrange(10**6))
            for factor in (1, 1, 1.4)
        )
        assert compare(same, before)[0].change in (Change.SAME, Change.UNDECIDED)
        (change,) = compare(slower, before)
        found.append(change.change is Change.SLOWER)
        alone.append(sum(point.change is Change.SLOWER for point in change.points))
        if change.together is not None:
            assert change.together[0] < change.ratio < change.together[1]
            assert "over all sizes together" in table_text(slower, [change])
    assert sum(found) >= 19
    assert min(alone) < len(before.points), "a size alone would not have been enough"


def test_a_busy_machine_decides_nothing_however_far_apart_two_runs_are() -> None:
    before = bench_run(answers=(BUSY, BUSY), rounds=9)
    (change,) = compare(bench_run(slower=3, rounds=9), before)
    assert change.change is Change.UNDECIDED


def test_a_twentieth_is_not_enough_however_well_it_is_known() -> None:
    (change,) = compare(bench_run(noise=0.001, slower=1.04), bench_run(noise=0.001))
    assert change.change is Change.SAME


def test_a_difference_to_a_noisy_run_may_be_the_machines() -> None:
    before, slower = bench_run(answers=(BUSY, BUSY)), bench_run(slower=1.5)
    (change,) = compare(slower, before)
    assert change.change is Change.UNDECIDED
    assert "one of the two runs is too noisy" in table_text(slower, [change])
    assert {point.change for point in change.points} == {Change.UNDECIDED}
    assert all(point.ratio > 1.3 for point in change.points), "how far apart they are is kept"
    (change,) = compare(bench_run(seed=1), before)
    assert change.change is Change.SAME


def test_no_size_of_a_noisy_run_is_said_to_have_changed_where_the_whole_has_not() -> None:
    before = replace(bench_run(noise=0.01), trust=Trust.NOISY)
    now = bench_run(noise=0.01, seed=1)
    first, *rest = now.curves[0].points
    low, high = first.latency_interval_us
    odd = replace(
        first,
        latency_us=first.latency_us * 2,
        latency_interval_us=(low * 2, high * 2),
        samples=None,
    )
    now = replace(now, curves=(replace(now.curves[0], points=(odd, *rest)),))
    (change,) = compare(now, before)
    assert change.change is Change.SAME
    assert change.points[0].change is Change.UNDECIDED
    assert f"(1 of {len(change.points)} sizes are too noisy to say)" in table_text(now, [change])
    (trusted,) = compare(now, replace(before, trust=Trust.GOOD))
    assert trusted.points[0].change is Change.SLOWER


def test_only_curves_and_sizes_that_both_have_are_compared() -> None:
    before = bench_run(Plan(factor=4, ops=("all_reduce", "broadcast")))
    (change,) = compare(bench_run(Plan(factor=16)), before)
    assert change.curve.op == "all_reduce"
    assert [p.size_bytes for p in change.points] == list(Plan(factor=16).sizes())


def test_runs_that_have_nothing_in_common_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the baseline has no size of an operation"):
        compare(bench_run(world_size=2), bench_run(world_size=3))
