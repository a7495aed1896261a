"""The operations that are measured: how each is called, and its exact result.

Each operation works on the front of two buffers that are allocated once. Its input has known
values, and its result is compared exactly: the values are integers so small that their sum over
all ranks is exact in the dtype, in any order of addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.bench.plan import IN_FLIGHT, CurvePlan

Call = Callable[..., Any]
"""Issues one collective. With ``async_op=True`` it returns torch's work; else it waits."""

_PIECE = 2**18
"""Elements filled and checked at a time: it limits the memory for the check to a few MiB."""
_SHIFT = 11
"""The shift of each rank's values against those of the rank before."""
_PRIMES = (251, 127, 61, 31, 13, 7, 5, 3, 2)
"""Periods of the values: primes, so that misplaced pieces are detected."""


class Buffers:
    """Memory for the largest size, allocated once and viewed as any dtype."""

    def __init__(self, sent_bytes: int, received_bytes: int, device: torch.device) -> None:
        self.sent = torch.zeros(sent_bytes, dtype=torch.uint8, device=device)
        self.received = torch.zeros(received_bytes, dtype=torch.uint8, device=device)
        self._values: dict[tuple[torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def values(self, dtype: torch.dtype, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The values that rank 0 sends, and the sum over all ranks, both repeated: so many that
        `_PIECE` elements can be read from any position of a period."""
        key = dtype, world_size
        if key not in self._values:
            period = _period(dtype, world_size)
            count = torch.arange(_PIECE + period, dtype=torch.int32, device=self.sent.device)
            total = torch.zeros_like(count)
            for rank in range(world_size):
                total += (count + _SHIFT * rank).remainder(period)
            self._values[key] = count.remainder(period).to(dtype), total.to(dtype)
        return self._values[key]


def _front(buffer: torch.Tensor, count: int, dtype: torch.dtype, number: int) -> torch.Tensor:
    """The first `count` elements of a buffer; those of another `number` do not overlap."""
    size = count * dtype.itemsize
    return buffer[number * size : (number + 1) * size].view(dtype)


class Operation:
    """One operation on tensors of one size, in one group. `rank` is that in the group."""

    def __init__(
        self, plan: CurvePlan, size_bytes: int, buffers: Buffers, group: Any, rank: int
    ) -> None:
        dtype = getattr(torch, plan.dtype)
        self._op, self._rank = plan.operation, rank
        count = size_bytes // dtype.itemsize
        self._share = count // plan.world_size
        sent = self._op.sends.elements(count, plan.world_size)
        received = self._op.receives.elements(count, plan.world_size)
        number_of = IN_FLIGHT if plan.mode == "pipelined" else 1
        self._sent = [_front(buffers.sent, sent, dtype, n) for n in range(number_of)]
        self._received = [_front(buffers.received, received, dtype, n) for n in range(number_of)]
        self._ramp, self._total = buffers.values(dtype, plan.world_size)
        self._period = _period(dtype, plan.world_size)
        # torch's functions are looked up now, and not when this module is loaded: whoever replaces
        # one of them, as a test or a user's wrapper does, has the replacement measured.
        function = getattr(dist, self._op.method)
        root = {} if self._op.root is None else {"group_src": self._op.root}
        self.calls: list[Call] = []
        """The calls to time, each on its own tensors; more than one only if pipelined."""
        for sent_to, received_from in zip(self._sent, self._received, strict=True):
            tensors = [] if self._op.in_place else [received_from]
            tensors += [sent_to] if self._op.sized else []
            self.calls.append(functools.partial(function, *tensors, group=group, **root))

    def check(self) -> int:
        """Runs it once on known values; returns how many elements on this rank are wrong.

        Leaves zeros: in-place sums of anything else would grow until they overflow.
        """
        for piece, start in _pieces(self._sent[0]):
            piece.copy_(self._values(self._rank, start, piece.numel()))
        self.calls[0]()
        result = self._sent[0] if self._op.in_place else self._received[0]
        name, own, wrong = self._op.name, self._rank * self._share, 0
        for piece, start in _pieces(result):
            at, end = start, start + piece.numel()
            while at < end:
                # Where element `at` of the result comes from, by what the operation must give: the
                # rank (None for the sum over all), the first of its elements, and how many follow.
                if name in ("all_reduce", "broadcast", "reduce_scatter"):
                    rank = 0 if name == "broadcast" else None
                    first, most = at + (own if name == "reduce_scatter" else 0), _PIECE
                else:
                    # Of all_gather and all_to_all each rank's share lies behind that of the rank
                    # before: the share that it has, or of the exchanged ones that which is meant
                    # for this rank.
                    rank, first = divmod(at, self._share)
                    most = self._share - first
                    first += own if name == "all_to_all" else 0
                count = min(most, end - at)
                got, expected = piece[at - start :][:count], self._values(rank, first, count)
                wrong += int(torch.count_nonzero(got != expected))
                at += count
        self._clear()
        return wrong

    def left(self) -> int:
        """The number of elements that are not zero after calls on zeros; sets them to zero."""
        wrong = sum(
            int(torch.count_nonzero(piece))
            for tensor in (*self._sent, *self._received)
            for piece, _ in _pieces(tensor)
        )
        if wrong:
            self._clear()
        return wrong

    def _clear(self) -> None:
        for tensor in (*self._sent, *self._received):
            tensor.zero_()

    def _values(self, rank: int | None, start: int, count: int) -> torch.Tensor:
        """Return what `rank` sends, or the sum of all, from `start` on; at most `_PIECE`."""
        if rank is None:
            return self._total[start % self._period :][:count]
        return self._ramp[(start + _SHIFT * rank) % self._period :][:count]


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensor in pieces of `_PIECE` elements, each with its first index."""
    for start in range(0, tensor.numel(), _PIECE):
        yield tensor[start : start + _PIECE], start


def _period(dtype: torch.dtype, world_size: int) -> int:
    """The number of different values, at most 251: their sum over all ranks must be exact."""
    # Up to these every integer is exact: a sum that is larger would be rounded, in an order of
    # addition that differs between backends, and be taken for a wrong result.
    exact = {
        torch.float16: 2**11,
        torch.bfloat16: 2**8,
        torch.int8: 2**7 - 1,
        torch.uint8: 2**8 - 1,
    }
    largest = exact.get(dtype, 2**24)
    return next((p for p in _PRIMES if (p - 1) * world_size <= largest), 2)
