"""What a benchmark will run, and how its sizes are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.bench.plan import (
    DTYPE_BYTES,
    OP_NAMES,
    CurvePlan,
    Plan,
    parse_bytes,
    parse_names,
    parse_seconds,
)
from ddp_notebook.model import codec, format_bytes
from ddp_notebook.model.codec import DecodeError


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


def test_the_sizes_are_the_powers_of_two_from_4_bytes_to_64_mebibytes() -> None:
    sizes = Plan().sizes()
    assert (len(sizes), sizes[0], sizes[1], sizes[-1]) == (25, 4, 8, 64 * 2**20)


def test_no_size_is_larger_than_the_largest_asked_for() -> None:
    assert Plan(min_bytes=1024, max_bytes=5000, factor=2).sizes() == (1024, 2048, 4096)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("2m", 120), ("0.5 s", 0.5), (15, 15), (".5", 0.5)],
)
def test_a_time_can_be_written_in_these_ways(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "fast", "-3s", "1h", "3 minutes", "nan", "inf"])
def test_what_is_not_a_time_is_refused_with_what_to_type(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time: write 30s or 2m"):
        parse_seconds(text)


def test_names_are_listed_with_commas_each_once() -> None:
    assert parse_names("broadcast, all_reduce,broadcast", OP_NAMES, "operation") == (
        "broadcast",
        "all_reduce",
    )
    with pytest.raises(ValueError, match="'allreduce' is no operation: there are all_reduce, "):
        parse_names("allreduce", OP_NAMES, "operation")
    with pytest.raises(ValueError, match="no operation is named"):
        parse_names(" , ", OP_NAMES, "operation")


def test_every_combination_is_a_curve_and_the_barrier_is_one() -> None:
    plan = Plan(
        ops=("all_reduce", "barrier"),
        dtypes=("float32", "bfloat16"),
        modes=("blocking", "pipelined"),
        world_sizes=(2, 4),
    )
    curves = plan.curves(4)
    assert len(curves) == 8 + 2
    assert [c.world_size for c in curves if c.op == "barrier"] == [2, 4]
    assert [c.world_size for c in Plan().curves(3)] == [3]


@given(
    st.sampled_from(OP_NAMES),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.integers(1, 9),
    st.lists(st.integers(1, 10_000), min_size=1).map(sorted),
)
def test_a_size_is_shared_equally_and_is_none_that_was_not_asked_for(
    op: str, dtype: str, world_size: int, wanted: list[int]
) -> None:
    sizes = CurvePlan(op, dtype, "blocking", world_size).sizes(tuple(wanted))
    if op == "barrier":
        assert sizes == (0,)
        return
    shares = world_size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1
    assert list(sizes) == sorted(set(sizes))
    for size in sizes:
        assert size > 0
        assert size % (shares * DTYPE_BYTES[dtype]) == 0
        assert any(0 <= asked - size < shares * DTYPE_BYTES[dtype] for asked in wanted)


def test_memory_is_counted_before_it_is_taken() -> None:
    assert Plan(max_bytes=2**20).memory_bytes(2) == 2 * 2**20
    assert Plan(max_bytes=2**20, modes=("pipelined",)).memory_bytes(2) == 5 * 2**20
    assert Plan(max_bytes=2**20, ops=("all_reduce", "all_to_all")).memory_bytes(2) == 3 * 2**20


@given(st.integers(0, 2**40))
def test_the_largest_size_that_fits_fits_and_twice_it_does_not(memory_bytes: int) -> None:
    plan = Plan()
    fits = plan.largest_that_fits(2, memory_bytes)
    assert plan.memory_bytes(2, fits) <= memory_bytes
    assert plan.memory_bytes(2, max(1, 2 * fits)) > memory_bytes


def test_a_plan_survives_the_wire() -> None:
    plan = Plan(min_bytes=8, max_bytes=2**20, factor=2, budget_s=1.5, rounds=2, seed=7)
    assert codec.decode(Plan, json.loads(json.dumps(codec.encode(plan)))) == plan


def test_something_else_is_not_taken_for_a_plan() -> None:
    with pytest.raises(DecodeError, match="expected `object`"):
        codec.decode(Plan, [4])
    with pytest.raises(DecodeError, match="ops: expected `array`"):
        codec.decode(Plan, {"ops": "all_reduce"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_bytes": 0}, "smallest size is 0 B: it must be at least 1 B"),
        ({"min_bytes": 6}, "smallest size is 6 B: it must be a multiple of 4 bytes"),
        ({"min_bytes": 64, "max_bytes": 16}, "largest size, 16 B, is less than the smallest, 64 B"),
        ({"factor": 1}, "--step is 1: it must be at least 2"),
        ({"budget_s": float("nan")}, "budget is nan s: it must be"),
        ({"budget_s": float("inf")}, "budget is inf s: it must be"),
        ({"ops": ["reduce"]}, "'reduce' is no operation"),
        ({"dtypes": ["float8"]}, "'float8' is no dtype"),
        ({"modes": ["async"]}, "'async' is no mode"),
        ({"dtypes": ["float64"]}, "smallest size is 4 B: it must be a multiple of 8 bytes"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.decode(Plan, fields)


def test_warm_up_ends_when_its_last_iterations_agree() -> None:
    plan = Plan(warmup=2, max_warmup=6)
    assert not plan.has_settled([900, 100])
    assert plan.has_settled([900, 100, 110, 100])


def test_warm_up_ends_even_if_it_never_settles() -> None:
    plan = Plan(warmup=2, max_warmup=6)
    assert not plan.has_settled([100, 900] * 2)
    assert plan.has_settled([100, 900] * 3)
