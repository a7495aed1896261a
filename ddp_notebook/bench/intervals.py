"""Medians with the intervals in which the next run's will lie."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95 %, by degrees of freedom from 1."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the sorted values lie below, linearly interpolated."""
    position = share * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def median_interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the median of all values, between the ends of its 95 % interval: low, median, high.

    It is a prediction interval: the median of a second run lies in it 95 times of 100. Since that
    run has an error of its own, it is wider than the usual confidence interval of the median by
    the square root of two: only 83 % of the usual 95 % intervals contain the next run's median
    (G. Cumming and R. Maillardet, "Confidence Intervals and Replication", Psychological Methods
    11, 2006).
    """
    # It is the wider of two. The first is distribution-free: from the order of the values alone.
    ordered = sorted(value for values in rounds for value in values)
    count = len(ordered)
    median = statistics.median(ordered)
    reach = math.sqrt(2) * 1.96 * math.sqrt(count) / 2
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach) - 1)]
    # The second is by Student's t on the logarithms of the medians of the rounds: values of one
    # round were measured at about the same time, and a machine is not the same a second later. To
    # take all values for independent ones would give intervals that the next run often misses.
    medians = [statistics.median(values) for values in rounds if values]
    if len(medians) > 1 and min(medians) > 0:
        logs = [math.log(m) for m in medians]
        free = len(logs) - 1
        t = _T[free - 1] if free <= len(_T) else 1.96 + 2.4 / free
        half = math.sqrt(2) * t * statistics.stdev(logs) / math.sqrt(len(logs))
        # Two rounds that differ much would give an interval too wide to be useful.
        half = min(half, math.log(3))
        low, high = min(low, median * math.exp(-half)), max(high, median * math.exp(half))
    return min(low, median), median, max(high, median)
