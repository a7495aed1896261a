"""Tensors as a few sums whose distance tells that of the tensors."""

from __future__ import annotations

import torch

from ddp_notebook.model.against.trail import WIDTH

_SEED = 20011
_EMPTY = (0.0,) * WIDTH


class Sketcher:
    """Sketches tensors, each size with signs of its own that are the same in every process."""

    def __init__(self) -> None:
        self._signs: dict[int, torch.Tensor] = {}

    def sketch(self, tensor: torch.Tensor | None) -> list[float]:
        """`WIDTH` sums over the tensor; zeros for None."""
        if tensor is None or not tensor.numel():
            return list(_EMPTY)
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        values = tensor.reshape(-1).to("cpu", torch.float64)
        size = values.numel()
        if size > WIDTH:
            values = values * self._of(size)
        short = -size % WIDTH
        if short:
            values = torch.nn.functional.pad(values, (0, short))
        sums: list[float] = values.view(-1, WIDTH).sum(0).tolist()
        return sums

    def _of(self, size: int) -> torch.Tensor:
        signs = self._signs.get(size)
        if signs is None:
            own = torch.Generator().manual_seed(_SEED + size)
            drawn = torch.randint(0, 2, (size,), generator=own, dtype=torch.int8)
            signs = self._signs[size] = drawn * 2 - 1
        return signs
