"""When each bucket of gradients comes to its all_reduce, and what its communication spans.

A communication hook of DDP's is the one place that sees a bucket when its last gradient is
ready (``DistributedDataParallel.register_comm_hook``, public API). Ours does what DDP does by
itself, torch's `allreduce_hook`, and notes the time around it. Two buckets can be under way at
once, so the time of communication is the union of their spans and not their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.bench.steps_models import told

_now_ns: Callable[[], int] = time.perf_counter_ns


class Stamps:
    """The buckets of one step, in the order they are ready: a list of nanoseconds each.

    An entry is ``[ready, issued, done, bytes]``: when the gradients are ready, when the
    all_reduce was handed to the backend, and when its result was there. Clocks of ranks on one
    host are the same clock.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.buckets: list[list[int]] = []
        wrapped.register_comm_hook(None, self._hook)

    def take(self) -> list[list[int]]:
        """The buckets of the step that is over; the next step begins with none."""
        taken, self.buckets = self.buckets, []
        return taken

    # Without annotations: torch compares them with its own classes, and ours are texts.
    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]
        entry = [_now_ns(), 0, 0, 0]
        self.buckets.append(entry)
        future = allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group
        entry[1] = _now_ns()

        def done(reduced: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            entry[2] = _now_ns()
            value: Any = reduced.value()
            return value  # type: ignore[no-any-return]

        entry[3] = bucket.buffer().nbytes
        return future.then(done)


class Clock:
    """Stamps between the parts of a step: of the CPU, or events in the GPU's own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[Any] = []

    def stamp(self) -> None:
        """Now."""
        if self._device.type != "cuda":
            self._stamps.append(_now_ns())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._stamps.append(event)

    def take_ns(self, each: int) -> list[list[int]]:
        """The times between the stamps of each step, which has `each` of them."""
        stamps, self._stamps = self._stamps, []
        if stamps and self._device.type == "cuda":
            stamps[-1].synchronize()
        steps = [stamps[i : i + each] for i in range(0, len(stamps), each)]
        return [[_between_ns(a, b) for a, b in pairwise(step)] for step in steps]


def _between_ns(start: Any, end: Any) -> int:
    return int(end - start if isinstance(start, int) else start.elapsed_time(end) * 1e6)


def reduce_as_ddp_does(
    gradients: torch.Tensor, bucket: torch.Tensor, size_bytes: int, count: int, ranks: int
) -> None:
    """Reduce `count` pieces of `size_bytes` as a reducer does, all of them under way at once.

    Each is copied into its bucket and divided, reduced, and copied back.
    """
    length = size_bytes // gradients.element_size()
    works: list[tuple[slice, Any]] = []
    for start in range(0, count * length, length):
        piece = slice(start, start + length)
        bucket[piece].copy_(gradients[piece]).div_(ranks)
        works.append((piece, dist.all_reduce(bucket[piece], async_op=True)))
    for piece, work in works:
        work.wait()
        gradients[piece].copy_(bucket[piece])


class Failed(Exception):
    """What the user's model raised, and with which batch. `stage` says where."""

    def __init__(self, error: BaseException, batch: int) -> None:
        super().__init__(f"{told(error)} (batch {batch})")
        self.error = error


def sizes_of(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Bytes of each bucket, in the order they are ready."""
    return [bucket[3] for bucket in steps[-1]] if steps else []
