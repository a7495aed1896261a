"""From every rank's times to what is shown."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench.stats import bus_factor, quantile, summarise

Times = dict[str, list[int]]


def ranks_with(*times_ns: Times, wrong: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """What each rank's loop returned; `wrong` is rank 0's."""
    return [
        {
            "times_ns": times,
            "wrong": {size: (wrong or {}).get(size, 0) if rank == 0 else 0 for size in times},
            "rank": rank,
            "world_size": len(times_ns),
            "backend": "gloo",
        }
        for rank, times in enumerate(times_ns)
    ]


def steady(size: int = 4096, time_ns: int = 1000, world_size: int = 2) -> list[dict[str, Any]]:
    """Ranks that always take the same time for one size."""
    return ranks_with(*({str(size): [time_ns] * 20} for _ in range(world_size)))


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Ranks that measured the same sizes equally often, in any time."""
    world_size = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 2**20).map(lambda n: 4 * n), min_size=1, unique=True))
    count = draw(st.integers(1, 8))
    times = st.lists(st.integers(1, 10**10), min_size=count, max_size=count)
    return ranks_with(*({str(s): draw(times) for s in sizes[:4]} for _ in range(world_size)))


def test_an_iteration_took_as_long_as_on_its_slowest_rank() -> None:
    ranks = ranks_with({"4": [10_000, 30_000, 10_000]}, {"4": [20_000, 10_000, 10_000]})
    (point,) = summarise(ranks, "cpu").points
    assert (point.size_bytes, point.iterations, point.wrong) == (4, 3, 0)
    assert point.latency_us == 20
    assert point.mean_us == 20
    assert [point.p10_us, point.p90_us] == pytest.approx([12, 28])


def test_the_result_says_what_was_measured() -> None:
    result = summarise(steady(), "cpu")
    assert (result.op, result.dtype, result.backend) == ("all_reduce", "float32", "gloo")
    assert (result.device, result.world_size, result.notes) == ("cpu", 2, ())


def test_bandwidths_are_in_units_of_a_thousand_million_bytes_per_second() -> None:
    (point,) = summarise(steady(size=4_000_000, time_ns=1_000_000, world_size=4), "cpu").points
    assert point.algbw_gb_per_s == pytest.approx(4.0)
    assert point.busbw_gb_per_s == pytest.approx(6.0)


def test_one_rank_has_no_bus_bandwidth() -> None:
    (point,) = summarise(steady(world_size=1), "cpu").points
    assert point.busbw_gb_per_s == 0
    assert point.algbw_gb_per_s > 0


def test_a_clock_that_did_not_move_measures_no_bandwidth() -> None:
    (point,) = summarise(steady(time_ns=0), "cuda").points
    assert (point.latency_us, point.algbw_gb_per_s, point.busbw_gb_per_s) == (0, 0, 0)


def test_sizes_are_in_order_of_size_and_not_of_their_names() -> None:
    ranks = ranks_with(*({"1024": [5], "4": [5], "256": [5]} for _ in range(2)))
    assert [p.size_bytes for p in summarise(ranks, "cpu").points] == [4, 256, 1024]


@given(jobs())
def test_no_rank_was_slower_than_the_slowest(ranks: list[dict[str, Any]]) -> None:
    for point in summarise(ranks, "cpu").points:
        for rank in ranks:
            own = statistics.median(rank["times_ns"][str(point.size_bytes)])
            assert point.latency_us >= own / 1e3


@given(jobs())
def test_the_percentiles_enclose_the_median(ranks: list[dict[str, Any]]) -> None:
    for point in summarise(ranks, "cpu").points:
        assert point.p10_us <= point.latency_us * (1 + 1e-9)
        assert point.latency_us <= point.p90_us * (1 + 1e-9)


@given(jobs())
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor(ranks: list[dict[str, Any]]) -> None:
    for point in summarise(ranks, "cpu").points:
        assert point.busbw_gb_per_s == pytest.approx(
            point.algbw_gb_per_s * 2 * (len(ranks) - 1) / len(ranks)
        )


@given(jobs(), st.randoms())
def test_the_order_in_which_ranks_answer_does_not_matter(
    ranks: list[dict[str, Any]], order: Any
) -> None:
    shuffled = order.sample(ranks, k=len(ranks))
    assert summarise(shuffled, "cpu") == summarise(ranks, "cpu")


@given(jobs())
def test_the_wire_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert summarise(json.loads(json.dumps(ranks)), "cpu") == summarise(ranks, "cpu")


@given(st.integers(1, 10_000))
def test_the_bus_factor_grows_from_0_towards_2(world_size: int) -> None:
    assert 0 <= bus_factor(world_size) < bus_factor(world_size + 1) < 2


def test_one_rank_is_told_that_its_times_are_not_of_communication() -> None:
    (note,) = summarise(steady(world_size=1), "cpu").notes
    assert note.startswith("One rank sends nothing:")


def test_two_ranks_move_the_tensor_once() -> None:
    assert bus_factor(2) == 1


@given(st.lists(st.integers(0, 10**9), min_size=1).map(sorted), st.floats(0, 1))
def test_a_quantile_lies_among_the_values(ordered: list[int], share: float) -> None:
    assert ordered[0] <= quantile(ordered, share) <= ordered[-1]


def test_wrong_results_of_all_ranks_are_counted_and_said_first() -> None:
    ranks = ranks_with({"4": [5] * 20}, {"4": [5] * 20}, wrong={"4": 2})
    ranks[1]["wrong"]["4"] = 1
    result = summarise(ranks, "cpu", cores=1)
    assert result.points[0].wrong == 3
    assert result.notes[0].startswith("all_reduce gave wrong results at 4 B:")


def test_a_long_tail_is_said_to_be_noise() -> None:
    times = {"1024": [100] * 15 + [2000] * 5, "4096": [100] * 20}
    (note,) = summarise(ranks_with(times, times), "cpu").notes
    assert note.startswith("Noisy at 1 KiB: the mean is more than 2 times the median")


def test_many_noisy_sizes_are_not_named_one_by_one() -> None:
    times = {str(4**n): [100] * 15 + [2000] * 5 for n in range(1, 8)}
    (note,) = summarise(ranks_with(times, times), "cpu").notes
    assert note.startswith("Noisy at 7 sizes from 4 B to 16 KiB:")


def test_a_few_sizes_are_named_one_by_one() -> None:
    times = {str(4**n): [100] * 15 + [2000] * 5 for n in (1, 2, 5)}
    (note,) = summarise(ranks_with(times, times), "cpu").notes
    assert note.startswith("Noisy at 4 B, 16 B and 1 KiB:")


@pytest.mark.parametrize(
    ("cores", "begins"), [(None, None), (4, None), (3, "2 ranks on 3 cores:"), (1, "2 ranks on 1 ")]
)
def test_fewer_than_two_cores_per_rank_deserve_a_warning(
    cores: int | None, begins: str | None
) -> None:
    notes = summarise(steady(), "cpu", cores=cores).notes
    assert [n.startswith(begins or "") for n in notes] == ([True] if begins else [])


def test_percentiles_of_few_iterations_are_said_to_be_rough() -> None:
    (note,) = summarise(ranks_with({"4": [5] * 9}, {"4": [5] * 9}), "cpu").notes
    assert note.startswith("Fewer than 10 iterations at 4 B:")


def test_a_missing_rank_is_an_error_and_not_a_better_result() -> None:
    with pytest.raises(ValueError, match=r"each of 3 ranks once; there are those of \[0, 2\]"):
        summarise([steady(world_size=3)[0], steady(world_size=3)[2]], "cpu")


def test_no_ranks_at_all_are_an_error() -> None:
    with pytest.raises(ValueError, match="A benchmark needs the times"):
        summarise([], "cpu")


@pytest.mark.parametrize("times", [{"4": [5, 5]}, {"8": [5]}, {}])
def test_ranks_that_measured_different_things_are_not_compared(times: Times) -> None:
    with pytest.raises(ValueError, match="Rank 1 did not measure what rank 0 measured"):
        summarise(ranks_with({"4": [5]}, times), "cpu")


def test_a_size_that_was_never_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a single iteration"):
        summarise(ranks_with({"4": []}, {"4": []}), "cpu")
