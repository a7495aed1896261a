"""A latency and a bandwidth from times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_notebook.bench.fit import NoFit, fit
from ddp_notebook.bench.result import Fit
from ddp_notebook.model import codec

SIZES = [4**power for power in range(1, 15)]
"""4 B to 256 MiB."""
FINE = [2**power for power in range(2, 29)]


def times(latency_s: float, bytes_per_s: float, sizes: list[int] = SIZES) -> list[float]:
    """What the model itself takes."""
    return [latency_s + size / bytes_per_s for size in sizes]


@settings(deadline=None, max_examples=25)
@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e8, 1e12),
    st.randoms(use_true_random=False),
)
def test_what_follows_the_model_is_found_exactly_in_any_order(
    latency_s: float, bytes_per_s: float, order: random.Random
) -> None:
    points = list(zip(SIZES, times(latency_s, bytes_per_s), strict=True))
    order.shuffle(points)
    # 256 MiB must take more than noise: else no bandwidth can be told.
    if SIZES[-1] / bytes_per_s < latency_s / 100:
        return
    found = fit([p[0] for p in points], [p[1] for p in points])
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert found.bandwidth_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert found.half_bandwidth_bytes == pytest.approx(latency_s * bytes_per_s, rel=1e-5)
    assert found.predict(10**6) == pytest.approx(latency_s + 10**6 / bytes_per_s, rel=1e-6)
    assert found.median_error < 1e-6


def test_the_largest_size_does_not_decide_alone() -> None:
    # By ordinary least squares 10 % on 256 MiB moves the latency by milliseconds.
    measured = times(300e-6, 2e9)
    measured[-1] *= 1.1
    assert fit(SIZES, measured).latency_s == pytest.approx(300e-6, rel=0.02)


def test_a_change_of_algorithm_gets_a_second_line() -> None:
    noise = random.Random(2)
    measured = [
        (t if size < 2**20 else 2e-3 + size / 8e9) * noise.uniform(0.97, 1.03)
        for size, t in zip(FINE, times(100e-6, 1e9, FINE), strict=True)
    ]
    found = fit(FINE, measured)
    assert found.regimes[0].from_bytes == 4
    assert 2**18 <= found.regimes[1].from_bytes <= 2**21
    assert found.latency_s == pytest.approx(100e-6, rel=0.05)
    assert found.bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.05)
    assert found.predict(4096) == pytest.approx(104e-6, rel=0.05)
    assert found.predict(2**28) == pytest.approx(2e-3 + 2**28 / 8e9, rel=0.05)


def test_noise_alone_rarely_gets_a_second_line() -> None:
    noise = random.Random(3)
    lines = [
        len(fit(FINE, [t * noise.gauss(1, 0.05) for t in times(3e-4, 2e9, FINE)]).regimes)
        for _ in range(20)
    ]
    assert lines.count(2) <= 6


def test_half_of_the_bandwidth_of_two_lines_is_where_it_is_first_reached() -> None:
    noise = random.Random(4)
    measured = [
        (100e-6 + size / 1e9 if size < 2**20 else 200e-6 + size / 8e9) * noise.uniform(0.99, 1.01)
        for size in FINE
    ]
    found = fit(FINE, measured)
    size = found.half_bandwidth_bytes
    half = found.bandwidth_bytes_per_s / 2
    assert size / found.predict(size) >= 0.999 * half
    assert all(s / found.predict(s) <= 1.001 * half for s in FINE if s < size)


def test_what_no_model_explains_is_refused() -> None:
    wild = [10.0 ** (power % 3 - 4) for power in range(len(SIZES))]
    with pytest.raises(NoFit, match=r"typical error \d+%"):
        fit(SIZES, wild)


def test_times_that_do_not_grow_tell_no_bandwidth() -> None:
    noise = random.Random(5)
    with pytest.raises(NoFit, match="hardly grow"):
        fit(SIZES[:6], [1e-3 * noise.uniform(0.95, 1.05) for _ in SIZES[:6]])
    with pytest.raises(NoFit, match="hardly grow"):
        fit(SIZES[:6], [1e-3] * 6)


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(NoFit, match="at least 4 sizes, got 3"):
        fit(SIZES[:3], times(1e-4, 1e9)[:3])


def test_times_that_do_not_belong_to_sizes_are_an_error() -> None:
    with pytest.raises(ValueError, match="each size once"):
        fit([4, 4, 8, 16], [1.0] * 4)
    with pytest.raises(ValueError, match="one time"):
        fit([4, 8], [1.0])


def test_a_fit_is_written_and_read_back() -> None:
    found = fit(SIZES, times(1e-4, 1e9))
    assert codec.decode(Fit, codec.encode(found)) == found
