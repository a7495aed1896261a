"""What `check` says of answers to the exercises of notebook 7."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from answers import assert_right, assert_wrong

from ddp_notebook.bench.fit import fit
from ddp_notebook.bench.result import BenchPoint, Curve

ALPHA_US, GB_PER_S = 300.0, 2.0
SIZES = tuple(4**power for power in range(1, 13))


def point(size_bytes: int) -> BenchPoint:
    """A size as the two numbers say it."""
    time_us = ALPHA_US + size_bytes / GB_PER_S / 1e3
    times: dict[str, float] = dict.fromkeys(
        ("mean_us", "p10_us", "p90_us", "p99_us", "algbw_gb_per_s", "busbw_gb_per_s"), 1.0
    )
    return BenchPoint(
        size_bytes=size_bytes,
        count=size_bytes // 4,
        iterations=9,
        rounds=3,
        latency_us=time_us,
        latency_interval_us=(time_us, time_us),
        wrong=0,
        rank_us=(),
        issue_us=(),
        skew_us=0.0,
        precise=True,
        **times,
    )


BARE = Curve("all_reduce", "float32", "blocking", (0, 1), points=tuple(map(point, SIZES)))
CURVE = replace(BARE, fit=fit(SIZES, [p.latency_us / 1e6 for p in BARE.points]))
SHORT = replace(BARE, points=BARE.points[:5])


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("7.1", (300, 2.0, CURVE), "The fit over all sizes says 300 µs and 2 GB/s"),
        ("7.1", (400, 1.5, CURVE), "right: 400 µs"),
        ("7.1", (300, 2.0, BARE), "No line was fitted here"),
        ("7.2", (50.3, ALPHA_US, GB_PER_S), "the latency is 0.6%"),
        ("7.3", (35, 43.75), "35 and 43.75 GB/s"),
        ("7.4", 2, "takes 1.3 ms"),
        ("7.5", 50, "24 ms for 100"),
        ("7.6", (0.75, 6), "75 %, and 6 times"),
    ],
)
def test_right_answers_pass_and_say_why(name: str, answer: Any, says: str) -> None:
    assert_right(name, answer, says)


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("7.1", (0.3, 2.0, CURVE), "the latency is off: 0.3 µs. It is less"),
        ("7.1", (9000, 2.0, CURVE), "It is more than the small sizes take"),
        ("7.1", (300, 2000, CURVE), "the bandwidth is off: 2e+03 GB/s. It is more"),
        ("7.1", (300, -2, BARE), "the bandwidth is off: -2 GB/s. It is less"),
        ("7.1", (300, float("inf"), CURVE), "expected a finite number"),
        ("7.1", (300, 2.0, SHORT), "the curve has other sizes"),
        ("7.1", (300, 2.0), "it passes all that is needed"),
        ("7.2", (12.8, ALPHA_US, GB_PER_S), "a float32 has four bytes"),
        ("7.2", (400.3, ALPHA_US, GB_PER_S), "bytes, not bits"),
        ("7.2", (0.0503, ALPHA_US, GB_PER_S), "these seem to be seconds"),
        ("7.2", (50300, ALPHA_US, GB_PER_S), "these seem to be microseconds"),
        ("7.2", (350, ALPHA_US, GB_PER_S), "α is in microseconds"),
        ("7.2", (77, ALPHA_US, GB_PER_S), "not 77 ms"),
        ("7.2", (50.3, ALPHA_US, 0), "solve exercise 7.1 first"),
        ("7.3", (20, 50), "that is the algbw"),
        ("7.3", (35, 87.5), "the all_reduce is right, but the all_gather is not 87.5"),
        ("7.3", (17.5, 43.75), "all_gather is right, but the all_reduce is not 17.5"),
        ("7.3", (1, 2), "First the size over the time"),
        ("7.4", 0.1, "640 times"),
        ("7.4", 16, "with 16 MB all together"),
        ("7.4", 64, "with 64 MB all together"),
        ("7.4", 25, "25 MB is not in the table"),
        ("7.5", 100, "the batch of each rank"),
        ("7.5", 60, "count as well"),
        ("7.5", 10, "one rank processes 2.5 samples per ms, and two process 1.25"),
        ("7.5", 0, "at least one sample"),
        ("7.6", (75, 6), "from 0 to 1"),
        ("7.6", (0.25, 6), "what is left"),
        ("7.6", (4 / 3, 6), "at most 1"),
        ("7.6", (0.5, 6), "the efficiency is not 0.5"),
        ("7.6", (0.75, 8), "an efficiency of 1"),
        ("7.6", (0.75, 5), "not 5 times"),
    ],
)
def test_each_wrong_answer_is_told_what_is_wrong(name: str, answer: Any, says: str) -> None:
    assert_wrong(name, answer, says)
