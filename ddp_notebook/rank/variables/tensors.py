"""Summarizes the values of tensors in a few numbers.

Only memory of the host is read, while the main thread stands: reading a GPU's would wait for what
the GPU is at, which may be the collective that hangs.
"""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ddp_notebook.model import TensorFacts
from ddp_notebook.rank.calls import MOST_VALUES
from ddp_notebook.rank.training.digests import short

SECONDS = 0.02
"""CPU time for all tensors of one answer; those of at most `_CHUNK` values may take as long once
more."""
_WHOLE = 2**20
"""Tensors of up to so many values are read whole, larger ones in part."""
_MOST_COMPARED = 2**25
"""The largest tensor, in values, that gets a digest when it is asked for alone."""
_PART = 2**15
_CHUNK = 2**15
"""Values that are read at a time: few enough for one thread, in about 0.1 ms."""
_SAMPLE = 16
_FULL_SECONDS = 0.06
_BLOCK = 2**20
_LONGEST_SHAPE = 8
_PARTS = 256


class TensorReader:
    """Reads tensors until its time is up; after that only their shape, dtype and device."""

    def __init__(self, values: bool = True, *, full: bool = False) -> None:
        """Without `values` nothing is read: the main thread may change or free them meanwhile.

        `full`: there is time to tell more, and to compare large ones: it is one value alone.
        """
        self._full = full
        seconds = _FULL_SECONDS if full else SECONDS
        self._seconds = seconds if values else 0.0
        self._began_s = time.thread_time()

    def _is_time_up(self, size: int) -> bool:
        seconds = self._seconds if size > _CHUNK else 2 * self._seconds
        return not seconds or time.thread_time() - self._began_s > seconds

    def facts(self, tensor: torch.Tensor) -> TensorFacts:
        """What is known of `tensor`, which is of torch's own type. Raises what torch raises."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts = TensorFacts(tuple(tensor.shape), dtype, str(tensor.device))
        if not facts.size or len(facts.shape) > _LONGEST_SHAPE or self._is_time_up(facts.size):
            return facts
        tensor = tensor.detach()
        parts = _parts(tensor)
        if parts:
            kind = f"{tensor.layout} ".removeprefix("torch.").removeprefix("strided ")
            return self._compared(replace(facts, dtype=kind + dtype), map(bytes_of, parts))
        flat = _flat(tensor)
        if flat is None and _is_held(tensor):
            flat = _thinned(tensor)
        return facts if flat is None else self._read(facts, flat)

    def array_facts(self, array: Any) -> TensorFacts:
        """The facts of an array of NumPy's own type."""
        dtype, shape = array.dtype, tuple(map(int, array.shape))
        facts = TensorFacts(shape, str(dtype), "numpy")
        if not array.size or self._is_time_up(facts.size):
            return facts
        if dtype.kind not in "fiub" or not dtype.isnative:
            return self._compared(facts, (array_bytes(array),))
        if not array.flags.writeable:
            if facts.size > _WHOLE:
                return facts
            array = array.copy()
        return replace(self.facts(torch.from_numpy(array)), dtype=str(dtype), device="numpy")

    def _compared(self, facts: TensorFacts, parts: Iterable[Iterable[Any]]) -> TensorFacts:
        """`facts` with a digest of values that are no real numbers, or not in one block."""
        crc = 0
        for block in itertools.chain.from_iterable(parts):
            crc = zlib.crc32(block, crc)
            if self._is_time_up(_CHUNK + 1):
                return facts
        return replace(facts, read=facts.size, digest=f"{crc:08x}") if crc else facts

    def _read(self, facts: TensorFacts, flat: torch.Tensor) -> TensorFacts:
        """`facts` with the values in `flat`, which has one dimension: all, or some of them."""
        size = facts.size
        part = flat if flat.numel() <= _WHOLE else flat[:: -(-size // _PART)]
        sums = _Sums()
        for begin in range(0, part.numel(), _CHUNK):
            if begin and self._is_time_up(size):
                break
            sums.add(part[begin : begin + _CHUNK])
        digest = f"{sums.crc:08x}" if sums.read == size else ""
        if self._full:
            facts = replace(facts, std=sums.std, infinite=sums.infinite)
            digest = digest or self._digest(flat, size)
        return replace(
            facts,
            read=sums.read,
            mean=sums.mean,
            least=short(min(sums.ends)) if sums.ends else None,
            most=short(max(sums.ends)) if sums.ends else None,
            nans=sums.nans,
            digest=digest,
            sample=sample(flat),
        )

    def _digest(self, flat: torch.Tensor, size: int) -> str:
        """The digest of a large tensor; empty where there was no time, or `flat` is not all."""
        if not size == flat.numel() <= _MOST_COMPARED:
            return ""
        crc = 0
        for block in blocks_of(flat):
            crc = zlib.crc32(block, crc)
            if self._is_time_up(flat.numel()):
                return ""
        return f"{crc:08x}"


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
        is_nan = wide.isnan()
        nans = int(is_nan.sum())
        numbers = wide[~is_nan] if nans else wide
        self.read, self.nans = self.read + chunk.numel(), self.nans + nans
        if numbers.numel():
            least, most = torch.aminmax(numbers)
            self.ends += [float(least), float(most)]
            if math.isinf(least) or math.isinf(most):
                self.infinite += int(numbers.isinf().sum())
            self._add(float(numbers.sum()), numbers)

    def _add(self, total: float, numbers: torch.Tensor) -> None:
        """Merge the mean and squares of another part; stays exact where values are large."""
        count, before = numbers.numel(), self.read - self.nans - numbers.numel()
        own = float((numbers - total / count).square().sum())
        apart = (total / count - self._total / before) if before else 0.0
        self._squares += own + apart * apart * before * count / (before + count)
        self._total += total

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
    """Some values of a one-dimensional tensor, at positions that depend on its length alone."""
    some = flat[:: max(1, -(-flat.numel() // _SAMPLE))].to(torch.float64).tolist()
    return tuple(short(number) if abs(number) < float("inf") else None for number in some)


def blocks_of(flat: torch.Tensor) -> Iterator[Any]:
    """The bytes of a one-dimensional tensor, block by block."""
    for begin in range(0, flat.numel(), _BLOCK):
        yield flat[begin : begin + _BLOCK].contiguous().view(torch.uint8).numpy().data


def bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The bytes of any tensor, block by block; nothing where its values cannot be read here."""
    tensor = tensor.detach()
    if parts := _parts(tensor):
        return itertools.chain.from_iterable(map(bytes_of, parts))
    flat = _flat(tensor) if 0 < tensor.numel() <= _MOST_COMPARED else None
    return blocks_of(flat) if flat is not None else iter(())


def array_bytes(array: Any) -> tuple[Any, ...]:
    """The bytes of an array of NumPy's own type; nothing where objects are in it, or too many."""
    if array.dtype.hasobject or not 0 < array.nbytes <= _MOST_COMPARED:
        return ()
    return (memoryview(array.tobytes()),)


def values(tensor: torch.Tensor, begin: int, end: int) -> tuple[float | None, ...]:
    """The few values from `begin` to `end`; None for one that is NaN or infinite."""
    flat = _flat(tensor.detach())
    if flat is None or flat.is_complex():
        return ()
    if not 0 <= begin < end <= min(flat.numel(), begin + MOST_VALUES):
        return ()
    some = flat[begin:end].to(torch.float64).tolist()
    return tuple(short(number) if abs(number) < float("inf") else None for number in some)


def checksums(tensor: torch.Tensor, begin: int, end: int) -> tuple[tuple[int, ...], int]:
    """Checksums of some hundred equal parts from `begin` to `end`, and the values in each part.

    Nothing where the values cannot be read here.
    """
    flat = _flat(tensor.detach())
    if flat is None or not 0 <= begin < end <= flat.numel():
        return (), 0
    step = -(-(end - begin) // _PARTS)
    parts = (flat[at : min(at + step, end)].contiguous() for at in range(begin, end, step))
    return tuple(zlib.crc32(part.view(torch.uint8).numpy().data) for part in parts), step


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor` with one dimension; None if its values cannot be read here."""
    if not _is_held(tensor):
        return None
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat.as_strided(flat.shape, (1,))  # one value may have been expanded, by 0
    return tensor.reshape(-1) if tensor.numel() <= _WHOLE else None


def _thinned(tensor: torch.Tensor) -> torch.Tensor:
    """Some values of a large tensor that is not in one block: at the same indices on each rank."""
    step = math.ceil((tensor.numel() / _PART) ** (1 / tensor.dim()))
    return tensor[(slice(None, None, step),) * tensor.dim()].reshape(-1)


def _is_held(tensor: torch.Tensor) -> bool:
    """Whether its values are in this host's memory, each at its place.

    A shard of FSDP may have given its memory back, and looks as it did before.
    """
    on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not on_host or tensor.is_quantized or tensor.is_nested:
        return False
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed_bytes = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed_bytes


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of real numbers that a complex, sparse or quantized one consists of.

    Nothing for any other; and of a sparse one whose indices are in no order, as equal ones differ.
    """
    if tensor.device.type != "cpu" or tensor.numel() > _MOST_COMPARED:
        return ()
    if tensor.layout in _OF_LAYOUT:
        in_order = tensor.layout is not torch.sparse_coo or tensor.is_coalesced()
        return tuple(of(tensor).detach() for of in _OF_LAYOUT[tensor.layout] if in_order)
    if tensor.is_quantized:
        return _quantized(tensor)
    if tensor.is_complex() and _is_held(tensor):
        return (torch.view_as_real(tensor.resolve_conj()),)
    return ()


def _quantized(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scale and the whole numbers of a tensor that has one scale and is not large."""
    if tensor.qscheme() is not torch.per_tensor_affine or tensor.numel() > _WHOLE:
        return ()
    scale = torch.tensor([tensor.q_scale(), float(tensor.q_zero_point())], dtype=torch.float64)
    return scale, tensor.int_repr()


_OF_LAYOUT: Mapping[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor.indices, torch.Tensor.values),
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr),
        (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc),
        (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    ),
}
