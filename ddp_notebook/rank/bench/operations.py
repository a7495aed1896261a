"""The operations that are measured: how each is called, and what it must give.

Each operation works on the front of two buffers that are allocated once. Known values are put
in, and what comes out is compared exactly: they are whole numbers small enough that their sum
over all ranks is exact in the dtype, whatever the order of adding.
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
"""Elements filled and checked at a time: bounds the memory the check needs, to a few MiB."""
_SHIFT = 11
"""Each rank's values are shifted by so much against those of the rank before."""
_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1}
"""The largest whole number up to which a dtype holds all; 2**24 for the others, at least."""
_PRIMES = (251, 127, 61, 31, 13, 7, 5, 3, 2)
"""Periods of the values. Primes, so that a piece in a wrong place is seen."""


class Buffers:
    """Memory for the largest size, taken once and seen as any dtype."""

    def __init__(self, sent_bytes: int, received_bytes: int, device: torch.device) -> None:
        self._sent = torch.zeros(sent_bytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(received_bytes, dtype=torch.uint8, device=device)
        self._values: dict[tuple[torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def values(self, dtype: torch.dtype, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What rank 0 sends, and the sum over all ranks, each over and over: `_PIECE` elements
        from any place in a period on."""
        key = dtype, world_size
        if key not in self._values:
            period = _period(dtype, world_size)
            count = torch.arange(_PIECE + period, dtype=torch.int32, device=self._sent.device)
            total = torch.zeros_like(count)
            for rank in range(world_size):
                total += (count + _SHIFT * rank).remainder(period)
            self._values[key] = count.remainder(period).to(dtype), total.to(dtype)
        return self._values[key]

    def sent(self, count: int, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """`count` elements to send; tensors of different `number` do not overlap."""
        return _front(self._sent, count, dtype, number)

    def received(self, count: int, dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """`count` elements to receive into."""
        return _front(self._received, count, dtype, number)


def _front(buffer: torch.Tensor, count: int, dtype: torch.dtype, number: int) -> torch.Tensor:
    size = count * dtype.itemsize
    return buffer[number * size : (number + 1) * size].view(dtype)


class Operation:
    """One operation on tensors of one size, in one group. `rank` is that in the group."""

    def __init__(
        self, plan: CurvePlan, size_bytes: int, buffers: Buffers, group: Any, rank: int
    ) -> None:
        dtype = getattr(torch, plan.dtype)
        self._op, self._rank = plan.op, rank
        self._count = size_bytes // dtype.itemsize
        self._share = self._count // plan.world_size
        number_of = IN_FLIGHT if plan.mode == "pipelined" else 1
        sent, received = self._counts()
        self._sent = [buffers.sent(sent, dtype, n) for n in range(number_of)]
        self._received = [buffers.received(received, dtype, n) for n in range(number_of)]
        self._ramp, self._total = buffers.values(dtype, plan.world_size)
        self._period = _period(dtype, plan.world_size)
        # torch's functions are looked up now: what a user put in their place is measured.
        self.calls = [self._call(group, n) for n in range(number_of)]
        """What is timed, each on tensors of its own. All but one of them only if pipelined."""

    def _counts(self) -> tuple[int, int]:
        if self._op == "all_gather":
            return self._share, self._count
        if self._op == "reduce_scatter":
            return self._count, self._share
        return self._count, self._count if self._op == "all_to_all" else 0

    def _call(self, group: Any, number: int) -> Call:
        sent, received = self._sent[number], self._received[number]
        if self._op == "all_reduce":
            return functools.partial(dist.all_reduce, sent, group=group)
        if self._op == "broadcast":
            return functools.partial(dist.broadcast, sent, group=group, group_src=0)
        if self._op == "all_gather":
            return functools.partial(dist.all_gather_into_tensor, received, sent, group=group)
        if self._op == "reduce_scatter":
            return functools.partial(dist.reduce_scatter_tensor, received, sent, group=group)
        if self._op == "all_to_all":
            return functools.partial(dist.all_to_all_single, received, sent, group=group)
        return functools.partial(dist.barrier, group=group)

    def check(self) -> int:
        """Runs it once on known values; how many elements on this rank are not what they must be.

        Leaves zeros behind: sums in place of anything else would grow until they overflow.
        """
        if self._op == "barrier":
            self.calls[0]()
            return 0
        for piece, start in _pieces(self._sent[0]):
            piece.copy_(self._values(self._rank, start, piece.numel()))
        self.calls[0]()
        wrong = sum(self._wrong(piece, start) for piece, start in _pieces(self._result()))
        self._clear()
        return wrong

    def left(self) -> int:
        """Elements that are not zero, after any number of calls on zeros; they are then."""
        if self._op == "barrier":
            return 0
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

    def _result(self) -> torch.Tensor:
        in_place = self._op in ("all_reduce", "broadcast")
        return self._sent[0] if in_place else self._received[0]

    def _wrong(self, piece: torch.Tensor, start: int) -> int:
        """How many elements of a piece of the result are wrong."""
        if self._op == "all_gather" or self._op == "all_to_all":
            return self._wrong_shares(piece, start)
        if self._op == "broadcast":
            expected = self._values(0, start, piece.numel())
        else:
            if self._op == "reduce_scatter":
                start += self._rank * self._share
            expected = self._total[start % self._period :][: piece.numel()]
        return int(torch.count_nonzero(piece != expected))

    def _wrong_shares(self, piece: torch.Tensor, start: int) -> int:
        """As `_wrong`, where each rank gave its share of the result, one after the other."""
        wrong, at = 0, start
        while at < start + piece.numel():
            source, offset = divmod(at, self._share)
            count = min(self._share - offset, start + piece.numel() - at)
            if self._op == "all_to_all":
                offset += self._rank * self._share
            expected = self._values(source, offset, count)
            wrong += int(torch.count_nonzero(piece[at - start : at - start + count] != expected))
            at += count
        return wrong

    def _values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """What `rank` sends, from element `start` on; at most `_PIECE` elements."""
        at = (start + _SHIFT * rank) % self._period
        return self._ramp[at : at + count]


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensor in pieces of `_PIECE` elements, each with where it starts."""
    for start in range(0, tensor.numel(), _PIECE):
        yield tensor[start : start + _PIECE], start


def _period(dtype: torch.dtype, world_size: int) -> int:
    """How many values there are: as many as a sum over all ranks can hold, at most 251."""
    largest = _EXACT.get(dtype, 2**24)
    return next((p for p in _PRIMES if (p - 1) * world_size <= largest), 2)
