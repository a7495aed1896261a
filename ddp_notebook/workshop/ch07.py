"""The exercises of notebook 7: what communication costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from ddp_notebook.bench.result import BenchPoint, Curve
from ddp_notebook.workshop.answers import AS_IT_IS, near, number, number_in, parts, shown
from ddp_notebook.workshop.check import WrongAnswer, exercise

_FACTOR = 2.0
"""Two ways to find a latency agree to this factor, on a machine that does other things too."""
_SMALL_BYTES = (16, 4096)
_FROM_BYTES, _TO_BYTES = 2**20, 2**24
_GRADIENTS_BYTES = 25e6 * 4


def _numbers(count: int) -> Callable[[Any], list[float]]:
    """So many finite numbers."""

    def read(answer: Any) -> list[float]:
        if not isinstance(answer, (tuple, list)) or len(answer) != count:
            raise WrongAnswer(AS_IT_IS)
        values = [number(each) for each in answer]
        for value in values:
            if not math.isfinite(value):
                raise WrongAnswer(f"expected a finite number, got {shown(value)}.")
        return values

    return read


def _alpha_and_bandwidth(answer: Any) -> tuple[float, float, Curve]:
    *_, curve = parts(answer, 3)
    if not isinstance(curve, Curve):
        raise WrongAnswer(AS_IT_IS)
    sizes = [point.size_bytes for point in curve.points]
    if not {_FROM_BYTES, _TO_BYTES} <= set(sizes) or not _small(curve):
        raise WrongAnswer("the curve has other sizes: measure as above, --max 16M --step 4.")
    alpha_us, gb_per_s = _numbers(2)(answer[:2])
    return alpha_us, gb_per_s, curve


def _small(curve: Curve) -> list[float]:
    low, high = _SMALL_BYTES
    return [point.latency_us for point in curve.points if low <= point.size_bytes <= high]


def _by_hand(curve: Curve) -> tuple[float, float]:
    """Latency in microseconds and bandwidth in GB/s, as the exercise says to find them."""
    at: dict[int, BenchPoint] = {point.size_bytes: point for point in curve.points}
    more_us = at[_TO_BYTES].latency_us - at[_FROM_BYTES].latency_us
    gb_per_s = (_TO_BYTES - _FROM_BYTES) / more_us / 1e3 if more_us > 0 else math.inf
    return statistics.median(_small(curve)), gb_per_s


@exercise("7.1", _alpha_and_bandwidth)
def latency_and_bandwidth(answer: tuple[float, float, Curve]) -> str:
    """Near to what the table gives by hand, or to what the fit says."""
    alpha_us, gb_per_s, curve = answer
    alphas_us, bandwidths = ([value] for value in _by_hand(curve))
    if curve.fit is not None:
        alphas_us.append(curve.fit.latency_s * 1e6)
        bandwidths.append(curve.fit.bandwidth_bytes_per_s / 1e9)
    if not _like_one_of(alpha_us, alphas_us):
        raise WrongAnswer(
            f"the latency is off: {alpha_us:.3g} µs. {_too_much(alpha_us, alphas_us[0])} than the "
            "small sizes take. It is a time, in microseconds, as the table has them."
        )
    if not _like_one_of(gb_per_s, bandwidths):
        raise WrongAnswer(
            f"the latency is right, but the bandwidth is off: {gb_per_s:.3g} GB/s. "
            f"{_too_much(gb_per_s, bandwidths[0])} than the two large sizes give. Divide bytes by "
            "time: a byte per nanosecond is 1 GB/s, a byte per microsecond a thousandth of that."
        )
    said = (
        f"The fit over all sizes says {alphas_us[1]:.3g} µs and {bandwidths[1]:.3g} GB/s."
        if curve.fit is not None
        else "No line was fitted here: the times were too uneven for that."
    )
    return f"right: {alpha_us:.3g} µs and {gb_per_s:.3g} GB/s. {said}"


def _like_one_of(value: float, wanted: list[float]) -> bool:
    return any(value > 0 and each / _FACTOR <= value <= each * _FACTOR for each in wanted)


def _too_much(value: float, wanted: float) -> str:
    return "It is more" if value > wanted else "It is less"


@exercise("7.2", _numbers(3))
def time_of_all_gradients(answer: list[float]) -> str:
    """The latency once, and 100 MB at the bandwidth."""
    milliseconds, alpha_us, gb_per_s = answer
    if not gb_per_s > 0:
        raise WrongAnswer("solve exercise 7.1 first: the bandwidth must be more than 0.")
    bytes_ms = _GRADIENTS_BYTES / gb_per_s / 1e6
    wanted = alpha_us / 1e3 + bytes_ms
    if near(milliseconds, wanted):
        return (
            f"right: {wanted:.4g} ms; the latency is {alpha_us / 1e3 / wanted:.1%} of that. For "
            "a message of this size it does not matter at all."
        )
    for factor, why in (
        (1 / 4, "a float32 has four bytes"),
        (8, "these are bytes, not bits"),
        (1e-3, "expected milliseconds; these seem to be seconds"),
        (1e3, "expected milliseconds; these seem to be microseconds"),
    ):
        if near(milliseconds, bytes_ms * factor + alpha_us / 1e3) or near(
            milliseconds, wanted * factor
        ):
            raise WrongAnswer(f"{milliseconds:.4g} is off by a factor: {why}.")
    if near(milliseconds, alpha_us + bytes_ms):
        raise WrongAnswer("α is in microseconds, and the rest in milliseconds: convert it.")
    raise WrongAnswer(
        f"not {milliseconds:.4g} ms. How many bytes are 25 million float32, and how many of them "
        "flow in a millisecond? Add the latency once."
    )


@exercise("7.3", _numbers(2))
def bus_bandwidths(answer: list[float]) -> str:
    """20 and 50 GB/s times 14/8 and 7/8."""
    all_reduce, all_gather = answer
    if near(all_reduce, 20) or near(all_gather, 50):
        raise WrongAnswer(
            "that is the algbw, the size over the time. Multiply by the factor for 8."
        )
    if not near(all_reduce, 35):
        raise WrongAnswer(
            f"all_gather is right, but the all_reduce is not {all_reduce:.4g}."
            if near(all_gather, 43.75)
            else f"not {all_reduce:.4g} and {all_gather:.4g}. First the size over the time, in "
            "GB/s, then the factor for n = 8."
        )
    if not near(all_gather, 43.75):
        raise WrongAnswer(
            f"the all_reduce is right, but the all_gather is not {all_gather:.4g}: it sends half "
            "of what an all_reduce sends, and takes 20 ms."
        )
    return (
        "right: 35 and 43.75 GB/s. The busbw is what to hold against the speed of a link; with "
        "many ranks an all_reduce sends everything twice."
    )


@exercise("7.4", number_in("MB", "MiB", "megabytes"))
def bucket_size(size: float) -> str:
    """2 MB: fewer pay too much latency, more leave too much for the end."""
    if size == 2:
        return (
            "right. All together they take less than the backward pass, so all but the last are "
            "hidden, and that one takes 1.3 ms."
        )
    if size == 0.1:
        raise WrongAnswer(
            "the last bucket is over at once, but all together they take far longer than the "
            "backward pass: most of it is latency, 640 times."
        )
    if size in (16, 64):
        raise WrongAnswer(
            f"with {size:g} MB all together take the least, but how long does the step wait for "
            "the last bucket, when the backward pass is over?"
        )
    raise WrongAnswer(f"{size:g} MB is not in the table: choose one of its four sizes.")


@exercise("7.5", number)
def break_even_batch(batch: float) -> str:
    """2b / (14 + 0.2b) = b / (2 + 0.2b) at 50."""
    if 50 <= batch <= 51:  # as many, or the first at which it is more
        return (
            "right. At 50 one rank takes 12 ms for 50 samples, and two take 24 ms for 100. Below "
            "it, the second rank does harm."
        )
    if near(batch, 100):
        raise WrongAnswer("100 samples is what both process then: b is the batch of each rank.")
    if near(batch, 60):
        raise WrongAnswer(
            "at 60 the samples alone take as long as the communication. The 2 ms that a step "
            "takes without any sample count as well."
        )
    one, two = batch, 2 * batch
    if batch > 0:
        raise WrongAnswer(
            f"not {batch:g}: there one rank processes {one / (2 + 0.2 * batch):.3g} samples per "
            f"ms, and two process {two / (14 + 0.2 * batch):.3g}. Where are they equal?"
        )
    raise WrongAnswer("a batch has at least one sample.")


@exercise("7.6", _numbers(2))
def efficiency_and_speedup(answer: list[float]) -> str:
    """15 of 20 ms, and 8 times that."""
    efficiency, speedup = answer
    if near(efficiency, 75):
        raise WrongAnswer("expected the efficiency as a number from 0 to 1.")
    if near(efficiency, 0.25):
        raise WrongAnswer("a quarter of the step is lost. The efficiency is what is left.")
    if near(efficiency, 20 / 15):
        raise WrongAnswer("that is how much longer a step takes; the efficiency is at most 1.")
    if not near(efficiency, 0.75):
        raise WrongAnswer(
            f"the efficiency is not {efficiency:.4g}: with the same batch on each, hold the time "
            "of a step on one GPU against that on 8."
        )
    if near(speedup, 8):
        raise WrongAnswer("8 times as many would be an efficiency of 1.")
    if not near(speedup, 6):
        raise WrongAnswer(
            f"the efficiency is right, but not {speedup:.4g} times: 8 batches are done in the "
            "time of a step of 20 ms."
        )
    return (
        "right: 75 %, and 6 times as many. Two of the eight GPUs are paid for communication, "
        "and a larger batch would get them back."
    )
