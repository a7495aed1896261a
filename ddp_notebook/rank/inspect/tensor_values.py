"""Summarizes the values of tensors in a few numbers, and tells them apart.

Only memory of the host is read, while the main thread stands: reading a GPU's would wait for what
the GPU is at, which may be the collective that hangs. Sparse, quantized and nested tensors are
described, and their values not read.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ddp_notebook.model import TensorFacts
from ddp_notebook.rank.calls import MOST_VALUES
from ddp_notebook.rank.training.digests import short

_WHOLE = 2**20
"""Tensors of up to so many values are read whole, larger ones in part."""
_MOST_COMPARED = 2**25
"""The largest tensor, in values, that gets a digest when it is asked for alone."""
_CHUNK = 2**15
"""Values that are read at a time: few enough for one thread, in about 0.1 ms. Of a tensor that is
read in part, so many in all."""


class TensorReader:
    """Reads tensors until its time is up; after that only their shape, dtype and device.

    Its time is CPU time for all tensors of one answer; those of at most `_CHUNK` values may take as
    long again.
    """

    def __init__(self, values: bool = True, *, full: bool = False) -> None:
        """Without `values` nothing is read: the main thread may change or free them meanwhile.

        `full`: there is time to tell more, and to compare large ones: it is one value alone.
        """
        self._full = full
        self._seconds = (0.06 if full else 0.02) * values
        self._began_s = time.thread_time()

    def _is_time_up(self, size: int) -> bool:
        seconds = self._seconds if size > _CHUNK else 2 * self._seconds
        return not seconds or time.thread_time() - self._began_s > seconds

    def facts(self, tensor: torch.Tensor) -> TensorFacts:
        """Return a summary of `tensor`, of torch's own type. Raises what torch raises."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts = TensorFacts(tuple(tensor.shape), dtype, str(tensor.device))
        if not facts.size or len(facts.shape) > 8 or self._is_time_up(facts.size):
            return facts
        tensor = tensor.detach()
        if tensor.is_complex():
            return self._compared(facts, bytes_of(tensor))
        flat = flattened(tensor)
        if flat is None and _is_held(tensor):
            # Large, and not in one block: some values, at the same indices on each rank.
            step = math.ceil((facts.size / _CHUNK) ** (1 / tensor.dim()))
            flat = tensor[(slice(None, None, step),) * tensor.dim()].reshape(-1)
        return facts if flat is None else self._read(facts, flat)

    def array_facts(self, array: Any) -> TensorFacts:
        """The facts of an array of NumPy's own type."""
        dtype, shape = array.dtype, tuple(map(int, array.shape))
        facts = TensorFacts(shape, str(dtype), "numpy")
        if not array.size or self._is_time_up(facts.size):
            return facts
        if dtype.kind not in "fiub" or not dtype.isnative:
            return self._compared(facts, array_bytes(array))
        if not array.flags.writeable:
            if facts.size > _WHOLE:
                return facts
            array = array.copy()
        return replace(self.facts(torch.from_numpy(array)), dtype=str(dtype), device="numpy")

    def _compared(self, facts: TensorFacts, blocks: Iterable[Any]) -> TensorFacts:
        """`facts` with a digest of values that are no real numbers."""
        digest = self._digest(blocks)
        return replace(facts, read=facts.size, digest=digest) if digest else facts

    def _digest(self, blocks: Iterable[Any]) -> str:
        """The digest of these bytes; empty without any, or without time."""
        crc = 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            if self._is_time_up(_CHUNK + 1):
                return ""
        return f"{crc:08x}" if crc else ""

    def _read(self, facts: TensorFacts, flat: torch.Tensor) -> TensorFacts:
        """`facts` with the values in `flat`, which has one dimension: all, or some of them."""
        size = facts.size
        part = flat if flat.numel() <= _WHOLE else flat[:: -(-size // _CHUNK)]
        # In chunks that torch processes in this thread: larger ones would wake its pool of threads,
        # which the main thread may be using.
        sums = _Sums()
        for begin in range(0, part.numel(), _CHUNK):
            if begin and self._is_time_up(size):
                break
            sums.add(part[begin : begin + _CHUNK])
        digest = f"{sums.crc:08x}" if sums.read == size else ""
        if self._full:
            facts = replace(facts, std=sums.std, infinite=sums.infinite)
            if not digest and size == flat.numel() <= _MOST_COMPARED:
                digest = self._digest(_blocks_of(flat))
        return replace(
            facts,
            read=sums.read,
            mean=sums.mean,
            least=sums.least,
            most=sums.most,
            nans=sums.nans,
            digest=digest,
            sample=sample(flat),
        )


class _Sums:
    """Statistics of a tensor, which is read part by part."""

    def __init__(self) -> None:
        self.read = self.nans = self.crc = self.infinite = 0
        self.ends: list[float] = []
        self._total = self._squares = 0.0
        """`_squares` is the sum of the squared distances from the mean."""

    def add(self, chunk: torch.Tensor) -> None:
        """Add some values, of one dimension."""
        self.crc = zlib.crc32(chunk.contiguous().view(torch.uint8).numpy().data, self.crc)
        wide = chunk.to(torch.float64)
        numbers = wide[~wide.isnan()]
        count, before = numbers.numel(), self.read - self.nans
        self.read, self.nans = self.read + chunk.numel(), self.nans + chunk.numel() - count
        if not count:
            return
        least, most = torch.aminmax(numbers)
        self.ends += [float(least), float(most)]
        if math.isinf(least) or math.isinf(most):
            self.infinite += int(numbers.isinf().sum())
        # The squares of both parts are merged by their means (Chan): it stays exact where values
        # are large and near each other, as a sum of their own squares would not.
        total = float(numbers.sum())
        own = float((numbers - total / count).square().sum())
        apart = (total / count - self._total / before) if before else 0.0
        self._squares += own + apart * apart * before * count / (before + count)
        self._total += total

    @property
    def least(self) -> float | None:
        """The least number; None without numbers."""
        return short(min(self.ends)) if self.ends else None

    @property
    def most(self) -> float | None:
        """The largest number; None without numbers."""
        return short(max(self.ends)) if self.ends else None

    @property
    def std(self) -> float | None:
        """As `torch.std`; None for a single number, and where one is infinite."""
        count = self.read - self.nans
        none = count < 2 or not math.isfinite(self._squares)
        return None if none else short(math.sqrt(self._squares / (count - 1)))

    @property
    def mean(self) -> float | None:
        """The mean without NaNs; None without numbers, and for infinities of both signs."""
        none = not self.ends or math.isnan(self._total)
        return None if none else short(self._total / (self.read - self.nans))


def sample(flat: torch.Tensor) -> tuple[float | None, ...]:
    """Return some values of a one-dimensional tensor, at positions that depend on its length."""
    return _numbers(flat[:: max(1, -(-flat.numel() // 16))])


def values(tensor: torch.Tensor, begin: int, end: int) -> tuple[float | None, ...]:
    """Return the few values from `begin` to `end`; nothing where they are many, or not real."""
    flat = flattened(tensor.detach())
    if flat is None or flat.is_complex():
        return ()
    if not 0 <= begin < end <= min(flat.numel(), begin + MOST_VALUES):
        return ()
    return _numbers(flat[begin:end])


def _numbers(some: torch.Tensor) -> tuple[float | None, ...]:
    """These values; None for one that is NaN or infinite."""
    return tuple(
        short(number) if math.isfinite(number) else None
        for number in some.to(torch.float64).tolist()
    )


def checksums(tensor: torch.Tensor, begin: int, end: int) -> tuple[tuple[int, ...], int]:
    """Return checksums of some hundred equal parts from `begin` to `end`, and the values in each.

    Nothing where the values cannot be read here.
    """
    flat = flattened(tensor.detach())
    if flat is None or not 0 <= begin < end <= flat.numel():
        return (), 0
    step = -(-(end - begin) // 256)
    parts = (flat[at : min(at + step, end)].contiguous() for at in range(begin, end, step))
    return tuple(zlib.crc32(part.view(torch.uint8).numpy().data) for part in parts), step


def bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The bytes of a tensor, block by block; nothing where its values cannot be read here."""
    tensor = tensor.detach()
    if not 0 < tensor.numel() <= _MOST_COMPARED:
        return
    if tensor.is_complex() and _is_held(tensor):
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = flattened(tensor)
    if flat is not None:
        yield from _blocks_of(flat)


def _blocks_of(flat: torch.Tensor) -> Iterator[Any]:
    for begin in range(0, flat.numel(), _WHOLE):
        yield flat[begin : begin + _WHOLE].contiguous().view(torch.uint8).numpy().data


def array_bytes(array: Any) -> tuple[Any, ...]:
    """Return the bytes of an array of NumPy's; nothing where it has objects, or is too large."""
    if array.dtype.hasobject or not 0 < array.nbytes <= _MOST_COMPARED:
        return ()
    return (memoryview(array.tobytes()),)


def flattened(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor` with one dimension; None if its values cannot be read here."""
    if not _is_held(tensor):
        return None
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat.as_strided(flat.shape, (1,))  # one value may have been expanded, by 0
    return tensor.reshape(-1) if tensor.numel() <= _WHOLE else None


def _is_held(tensor: torch.Tensor) -> bool:
    """Return True when its values are in this host's memory, each at its place.

    A shard of FSDP may have given its memory back, and looks as it did before.
    """
    on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not on_host or tensor.is_quantized or tensor.is_nested:
        return False
    # Its last value must be within the storage, whatever its strides are: to read past the end
    # would end the rank.
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed_bytes = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed_bytes
