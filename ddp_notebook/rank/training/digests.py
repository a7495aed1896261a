"""Tensors in a few bytes, to be compared across ranks. Bounded in time and in number."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from ddp_notebook import model
from ddp_notebook.rank import gpu


class Digester:
    """Digests tensors until the time or number limit is reached; `notes` says what is left out.

    A digest takes about 200 bytes of a rank's answer.
    """

    def __init__(self, seconds: float = 0.25, tensors: int = 900) -> None:
        self._until_s = time.monotonic() + seconds
        self._left = tensors
        self.notes: list[str] = []

    def all(self, what: str, named: Iterable[tuple[str, Any]]) -> tuple[model.TensorDigest, ...]:
        """The digests of these tensors, or of the first ones if there are too many."""
        found: list[model.TensorDigest] = []
        skipped = 0
        for name, tensor in named:
            if not isinstance(tensor, torch.Tensor):
                continue
            if self._left <= 0 or time.monotonic() > self._until_s:
                skipped += 1
                continue
            made = digest(name, tensor)
            if made is not None:
                self._left -= 1
                found.append(made)
        if skipped:
            self.notes.append(f"{what}: {skipped} of {skipped + len(found)} were not compared")
        return tuple(found)


def digest(name: str, tensor: torch.Tensor) -> model.TensorDigest | None:
    """One tensor; None if it cannot be read (sparse, quantised, lazy, on a GPU that is at work)."""
    if not gpu.is_readable(tensor):
        return None
    try:
        tensor = tensor.detach()
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_complex():
            return None
        numel = tensor.numel()
        if not numel:
            return model.TensorDigest(name, 0)
        hashed = ""
        # Larger tensors, and those on a device, are described only by their norm and a sample.
        if tensor.is_cpu and numel * tensor.element_size() <= 64 * 2**20:
            bytes_of = tensor.contiguous().reshape(-1).view(torch.uint8)
            hashed = f"{zlib.crc32(bytes_of.numpy().data):08x}"
        return model.TensorDigest(name, numel, hashed, *_norm_and_sample(tensor))
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None


def spread(tensor: torch.Tensor, most: int) -> list[Any]:
    """At most so many of a contiguous tensor's values, evenly spread over it."""
    values: list[Any] = tensor.view(-1)[:: max(1, tensor.numel() // most)][:most].tolist()
    return values


def _norm_and_sample(
    tensor: torch.Tensor,
) -> tuple[float | None, tuple[float | None, ...], bool]:
    """Return the norm of floating-point values, a few values, and whether all are finite."""
    sample: tuple[float | None, ...] = ()
    if tensor.is_contiguous():  # reshape would copy another
        values = map(float, spread(tensor, 4))
        sample = tuple(short(value) if math.isfinite(value) else None for value in values)
    if not tensor.is_floating_point():
        return None, sample, True
    numel = tensor.numel()
    most = 16 * 2**20
    if numel > most and tensor.is_cpu and tensor.is_contiguous():
        tensor = tensor.view(-1)[:: numel // most]  # all of it would take too long
    wide = torch.float32 if tensor.element_size() < 4 else tensor.dtype
    norm = float(torch.linalg.vector_norm(tensor, dtype=wide))
    if math.isfinite(norm):
        return short(norm), sample, True
    return None, sample, bool(torch.isfinite(tensor).all())  # large values overflow in a norm


def short(number: float) -> float:
    """As exact as a float32, in as few characters."""
    return float(f"{number:.8g}")


def named(groups: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """An optimizer's parameters, named by their places in its groups."""
    return [
        (f"param_groups[{g}]['params'][{i}]", parameter)
        for g, group in enumerate(groups)
        for i, parameter in enumerate(group["params"])
    ]
