"""The timed region: a collective between two clock reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from ddp_notebook.rank.bench.operations import Call


def time_each(calls: Sequence[Call], iterations: int, device: torch.device) -> list[int]:
    """The time of each of `iterations` collectives, in nanoseconds.

    With one call, each is waited for before the next. With several, they are in flight at the same
    time, and an iteration is the time of all of them divided by their number. On a GPU times are
    those of its own clock, for the work queued on its stream.
    """
    if device.type == "cuda":
        return _on_gpu(calls, iterations, device)
    if len(calls) > 1:
        return _pipelined(calls, iterations)
    call, clock = calls[0], time.perf_counter_ns
    stamps = [clock()]
    for _ in range(iterations):
        call()
        stamps.append(clock())
    return [end - start for start, end in pairwise(stamps)]


def _pipelined(calls: Sequence[Call], iterations: int) -> list[int]:
    clock = time.perf_counter_ns
    stamps = [clock()]
    for _ in range(iterations):
        works = [call(async_op=True) for call in calls]
        for work in works:
            work.wait()
        stamps.append(clock())
    return [(end - start) // len(calls) for start, end in pairwise(stamps)]


def _on_gpu(calls: Sequence[Call], iterations: int, device: torch.device) -> list[int]:
    """Timed by the GPU's clock: the host only queues the work and runs ahead."""
    stream = torch.cuda.current_stream(device)
    stamps = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]  # type: ignore[no-untyped-call]
    stamps[0].record(stream)
    for stamp in stamps[1:]:
        if len(calls) > 1:
            for work in [call(async_op=True) for call in calls]:
                work.wait()
        else:
            calls[0]()
        stamp.record(stream)
    stamps[-1].synchronize()
    times_ms = [start.elapsed_time(end) for start, end in pairwise(stamps)]
    return [round(ms * 1e6 / len(calls)) for ms in times_ms]


def time_issue(call: Call, iterations: int) -> list[int]:
    """How long this rank takes to issue its part of each collective, in nanoseconds.

    A collective ends at the same time on every rank, whichever is late. The time to issue it is the
    difference: while the late rank has not begun, the others already wait.
    """
    clock = time.perf_counter_ns
    took = []
    for _ in range(iterations):
        started = clock()
        work = call(async_op=True)
        took.append(clock() - started)
        if work is not None:
            work.wait()
    return took
