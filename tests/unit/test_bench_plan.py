"""What a benchmark will run, and how its sizes are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench.plan import Plan, parse_bytes
from ddp_notebook.model import format_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4", 4),
        ("4096", 4096),
        ("4 B", 4),
        ("64K", 64 * 2**10),
        ("64k", 64 * 2**10),
        ("64KiB", 64 * 2**10),
        (" 64 MiB ", 64 * 2**20),
        ("1.5M", 3 * 2**19),
        ("1G", 2**30),
        (512, 512),
    ],
)
def test_a_number_of_bytes_can_be_written_in_these_ways(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "M", "64MB", "64 Mib/s", "-4", "4e6", "1,000", "lots", "٤"])
def test_what_is_not_a_number_of_bytes_is_refused_with_what_to_type(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes: write 4096, 64K, 16M or 1G"):
        parse_bytes(text)


def test_a_fraction_of_a_byte_is_refused_with_the_nearest_whole_number() -> None:
    with pytest.raises(ValueError, match=r"'1\.3K' is not a whole number of bytes: write 1331\."):
        parse_bytes("1.3K")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**10, "64 KiB"),
        (2**20 - 1, "1 MiB"),
        (64 * 2**20, "64 MiB"),
        (2**30, "1 GiB"),
        (2**42, "4096 GiB"),
    ],
)
def test_a_number_of_bytes_is_shown_in_the_largest_unit_that_suits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1023), st.sampled_from([1, 2**10, 2**20, 2**30]))
def test_a_round_number_of_bytes_is_read_back_as_it_was_shown(number: int, unit: int) -> None:
    assert parse_bytes(format_bytes(number * unit)) == number * unit


@given(st.integers(1, 2**45))
def test_what_is_shown_is_never_more_than_a_twentieth_off(count: int) -> None:
    shown, unit = format_bytes(count).split()
    worth = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert float(shown) * worth == pytest.approx(count, rel=0.05)


def test_the_sizes_run_from_4_bytes_to_64_mebibytes_by_factors_of_4() -> None:
    sizes = Plan().sizes()
    assert (len(sizes), sizes[0], sizes[1], sizes[-1]) == (13, 4, 16, 64 * 2**20)


def test_no_size_is_larger_than_the_largest_asked_for() -> None:
    assert Plan(min_bytes=1024, max_bytes=5000, factor=2).sizes() == (1024, 2048, 4096)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_every_round_measures_every_size_once(rounds: int, seed: int) -> None:
    plan = Plan(rounds=rounds, seed=seed)
    count = len(plan.sizes())
    schedule = plan.schedule()
    assert len(schedule) == rounds * count
    for start in range(0, len(schedule), count):
        assert tuple(sorted(schedule[start : start + count])) == plan.sizes()


def test_rounds_differ_in_order_and_all_ranks_have_the_same() -> None:
    plan = Plan()
    count = len(plan.sizes())
    assert plan.schedule()[:count] != plan.schedule()[count : 2 * count]
    assert plan.schedule() == Plan().schedule()
    assert plan.schedule() != Plan(seed=1).schedule()


def test_a_plan_survives_the_wire() -> None:
    plan = Plan(min_bytes=8, max_bytes=2**20, factor=2, budget_s=1.5, rounds=2, seed=7)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_something_else_is_not_taken_for_a_plan() -> None:
    with pytest.raises(ValueError, match="not a benchmark plan"):
        Plan.from_json({"sizes": [4]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_bytes": 0}, "min_bytes is 0: it must be at least 4"),
        ({"min_bytes": 6}, "smallest size is 6 B: it must be a multiple of 4 bytes"),
        ({"min_bytes": 64, "max_bytes": 16}, "max_bytes is 16, less than min_bytes, 64"),
        ({"factor": 1}, "factor is 1: it must be at least 2"),
        ({"rounds": 0}, "rounds is 0: it must be at least 1"),
        ({"budget_s": float("nan")}, "budget_s is nan: it must be at least 0"),
        ({"max_iterations": 1}, "max_iterations is 1, less than min_iterations, 3"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(fields)


def test_warm_up_ends_when_its_last_iterations_agree() -> None:
    plan = Plan(warmup=2, max_warmup=6)
    assert not plan.has_settled([900, 100])
    assert plan.has_settled([900, 100, 110, 100])


def test_warm_up_ends_even_if_it_never_settles() -> None:
    plan = Plan(warmup=2, max_warmup=6)
    assert not plan.has_settled([100, 900] * 2)
    assert plan.has_settled([100, 900] * 3)


def test_the_budget_is_shared_among_the_measurements_that_are_left() -> None:
    plan = Plan(min_iterations=3, max_iterations=200)
    assert plan.iterations(each_ns=1e6, left_ns=1e9, measurements=10) == 100


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 100))
def test_there_are_always_some_iterations_and_never_too_many(
    each_ns: float, left_ns: float, measurements: int
) -> None:
    plan = Plan()
    iterations = plan.iterations(each_ns, left_ns, measurements)
    assert plan.min_iterations <= iterations <= plan.max_iterations
