"""Gloo's loop threads: what they cost, and their scheduling policy. Linux only.

Gloo moves bytes on a thread of its own, named ``gloo_tcp_loop``. With fewer cores than runnable
threads it spins on a lock for whole time slices; as a batch job (SCHED_BATCH, which needs no
privilege) it yields sooner. See sched(7).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")

Policies = dict[int, int]
"""The scheduler's policy of each thread, by thread id."""


def threads() -> list[int]:
    """The thread ids of gloo's loops in this process; empty if not known."""
    numbers = []
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().strip() == _NAME:
                    numbers.append(int(task.name))
    return numbers


def cpu_s() -> float | None:
    """CPU seconds of gloo's loops in this process so far; None without such a thread."""
    seconds = []
    for thread in threads():
        with contextlib.suppress(OSError, ValueError, IndexError):
            seconds.append(int((_TASKS / str(thread) / "schedstat").read_text().split()[0]) / 1e9)
    return sum(seconds) if seconds else None


def policies() -> Policies:
    """Their present policies."""
    by_thread = {}
    for thread in threads():
        with contextlib.suppress(OSError, AttributeError):
            by_thread[thread] = os.sched_getscheduler(thread)
    return by_thread


def batch() -> None:
    """Make them batch jobs."""
    _set({thread: getattr(os, "SCHED_BATCH", 0) for thread in threads()})


def restore(before: Policies) -> None:
    """Set them back to `policies`."""
    now = policies()
    _set({thread: policy for thread, policy in before.items() if now.get(thread) != policy})


def _set(wanted: Policies) -> None:
    for thread, policy in wanted.items():
        # A thread may have ended meanwhile, and not every system has these policies.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
