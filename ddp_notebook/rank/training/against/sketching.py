"""Sketches of tensors: a few sums whose distance estimates that of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_notebook.model.against.trail import WIDTH

_SEED = 20011
_EMPTY = (0.0,) * WIDTH


class Sketcher:
    """Sketches tensors, each size with signs of its own that are the same in every process."""

    def __init__(self) -> None:
        self._signs: dict[int, torch.Tensor] = {}
        self._weights: dict[tuple[int, int], torch.Tensor] = {}

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

    def samples(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """A number for each sample of a model's inputs, from all tensors' values at its index.

        Equal samples have equal numbers; what differs by rounding alone has nearly equal ones.
        """
        if not tensors:
            return []
        count = len(tensors[0]) if tensors[0].dim() else 1
        sums = torch.zeros(count, dtype=torch.float64)
        for number, tensor in enumerate(tensors):
            own = tensor.dim() > 0 and len(tensor) == count
            values = tensor.detach().to("cpu", torch.float64)
            values = torch.nan_to_num(values, nan=1e3, posinf=1e4, neginf=-1e4)
            if values.numel():
                rows = values.reshape(count if own else 1, -1)
                # Row by row: a product of matrices rounds otherwise for other numbers of rows.
                weights = self._weights_of(number, rows.shape[1])
                sums += torch.stack([(row * weights).sum() for row in rows])
        found: list[float] = sums.tolist()
        return found

    def _weights_of(self, number: int, size: int) -> torch.Tensor:
        weights = self._weights.get((number, size))
        if weights is None:
            own = torch.Generator().manual_seed(_SEED * (number + 2) + size)
            weights = torch.randn(size, generator=own, dtype=torch.float64)
            self._weights[number, size] = weights
        return weights

    def _of(self, size: int) -> torch.Tensor:
        signs = self._signs.get(size)
        if signs is None:
            own = torch.Generator().manual_seed(_SEED + size)
            drawn = torch.randint(0, 2, (size,), generator=own, dtype=torch.int8)
            signs = self._signs[size] = drawn * 2 - 1
        return signs
