"""Timeouts that grow with the machine's load: how long to wait for a process that starts."""

from __future__ import annotations

import os
from datetime import timedelta

GROUP_TIMEOUT = timedelta(hours=24)
"""Timeout of collectives: long, because when torch's timeout fires the group is dead, and a
blocked cell can be interrupted instead."""


def scaled_for_load(seconds: float) -> float:
    """Scale a timeout, in seconds, meant for an idle machine: times the tasks per core, up to 8.

    The load is the average of the last minute (getloadavg(3)). So setup succeeds even when a whole
    class starts at once; this costs nothing, because a dead process is detected by its exit and not
    by the timeout.
    """
    load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(8.0, max(1.0, load_per_core))
