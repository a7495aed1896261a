"""How long to wait for a process that starts, on a machine that has more to do than it can."""

from __future__ import annotations

import os

_MOST = 8.0


def stretched(seconds: float) -> float:
    """`seconds` of a quiet machine, on this one as it is now: times the tasks per core.

    From the load average of the last minute (getloadavg(3)), and at most eight times as many.
    A room of learners who start at once gets through; what is dead is seen otherwise.
    """
    if not hasattr(os, "getloadavg"):  # Windows
        return seconds
    return seconds * min(_MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
