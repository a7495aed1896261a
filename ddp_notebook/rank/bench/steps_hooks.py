"""When each bucket's all_reduce begins, and when it is done.

Only a communication hook of DDP is called at the moment at which a bucket's last gradient is ready
(``DistributedDataParallel.register_comm_hook``, public API). This hook calls torch's
`allreduce_hook`, which does what DDP does without a hook, and records the times. Two buckets can be
in flight at once, so the time of communication is the union of their spans, not the sum.
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

from ddp_notebook.rank.bench.host_load import RunQueue

_now_ns: Callable[[], int] = time.perf_counter_ns


class Stamps:
    """The buckets of one step, in the order in which they get ready: a list of nanoseconds each.

    An entry is ``[ready, issued, done, waited, bytes]``: when the gradients were ready, when the
    all_reduce was issued, and when its result was there; and the time in the run queue until it was
    issued. Ranks on one host have the same clock.
    """

    def __init__(self, wrapped: DistributedDataParallel, queue: RunQueue) -> None:
        self.buckets: list[list[int]] = []
        self._queue = queue
        wrapped.register_comm_hook(None, self._hook)

    def take(self) -> list[list[int]]:
        """The buckets of the last step; the next step begins with none."""
        taken, self.buckets = self.buckets, []
        return taken

    # Without annotations: torch compares them with its own classes, and here they are strings.
    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]
        entry = [_now_ns(), 0, 0, 0, 0]
        self.buckets.append(entry)
        future = allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group
        entry[1], entry[3] = _now_ns(), self._queue.waited_ns()

        def done(reduced: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            entry[2] = _now_ns()
            value: Any = reduced.value()
            return value  # type: ignore[no-any-return]

        entry[4] = bucket.buffer().nbytes
        return future.then(done)


class Clock:
    """Timestamps between the parts of a step: by the CPU's clock, or events in the GPU's stream."""

    def __init__(self, device: torch.device, queue: RunQueue) -> None:
        self.waited_ns: list[list[int]] = []
        """How long each part of the last steps waited for a core."""
        self._device = device
        self._queue = queue
        self._stamps: list[Any] = []
        self._waited: list[int] = []

    def stamp(self) -> None:
        """Take a timestamp."""
        self._waited.append(self._queue.waited_ns())
        if self._device.type != "cuda":
            self._stamps.append(_now_ns())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._stamps.append(event)

    def take_ns(self, stamps_per_step: int) -> list[list[int]]:
        """The times between the stamps of each step, which has `stamps_per_step` of them."""
        stamps, self._stamps = self._stamps, []
        waited, self._waited = self._waited, []
        if stamps and self._device.type == "cuda":
            stamps[-1].synchronize()
        self.waited_ns = _parts_ns(waited, stamps_per_step)
        return _parts_ns(stamps, stamps_per_step)


def _parts_ns(stamps: Sequence[Any], per_step: int) -> list[list[int]]:
    steps = [stamps[i : i + per_step] for i in range(0, len(stamps), per_step)]
    return [[_between_ns(a, b) for a, b in pairwise(step)] for step in steps]


def _between_ns(start: Any, end: Any) -> int:
    return int(end - start if isinstance(start, int) else start.elapsed_time(end) * 1e6)


def reduce_as_ddp_does(
    gradients: torch.Tensor, bucket: torch.Tensor, size_bytes: int, count: int, ranks: int
) -> None:
    """Reduce `count` pieces of `size_bytes` as a reducer does, all of them in flight at once.

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
