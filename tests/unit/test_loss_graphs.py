"""What the graph of a loss says: by what it was divided, and over how many values it is a mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from ddp_notebook.model import LossFacts
from ddp_notebook.rank.training.gradients import read_loss

_X = torch.arange(12.0).reshape(4, 3).requires_grad_()
_Y = torch.tensor([0, 1, -100, 2])
_WEIGHT = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("loss", "factor", "mean", "count"),
    [
        (F.cross_entropy(_X, _Y), 1.0, True, 3),
        (F.cross_entropy(_X, _Y) / 2, 0.5, True, 3),
        (F.cross_entropy(_X, _Y) * 3 / 2, 1.5, True, 3),
        (F.cross_entropy(_X, _Y, weight=_WEIGHT), 1.0, True, 0),
        (F.cross_entropy(_X, _Y, reduction="sum") / 3, 1 / 3, False, 3),
        (F.mse_loss(_X, torch.zeros(4, 3)), 1.0, True, 4),
        (_X.square().mean() * 0.5, 0.5, True, 4),
        ((_X.square() / 4).mean(), 0.25, True, 4),
        (_X.square().mean() / torch.tensor(4.0), 0.25, True, 4),
        (_X.square().mean() + _X.mean(), 1.0, True, 0),
        (-_X.mean() + 0.5 * F.mse_loss(_X, torch.zeros(4, 3)), 1.0, True, 0),
        ((_X.mean() + _X.mean() - 0.1 * _X.mean()) / 4, 0.25, True, 0),
        (_X.mean() + _X.sum(), 1.0, False, 0),
        (_X.mean() + 1, 1.0, False, 0),
        (_X.square().sum(), 1.0, False, 0),
        (_X.mean() / _X.sum(), 1.0, False, 0),
    ],
)
def test_the_graph_of_a_loss(loss: torch.Tensor, factor: float, mean: bool, count: float) -> None:
    found = read_loss(loss, None)
    assert (found.mean, found.count) == (mean, count)
    assert found.factor == pytest.approx(factor)


def test_a_cross_entropy_says_whether_it_ignored_targets() -> None:
    assert read_loss(F.cross_entropy(_X, _Y), None).ignores
    assert read_loss(F.cross_entropy(_X, _Y) / 2, None).ignores
    assert not read_loss(F.cross_entropy(_X, _Y.clamp(0)), None).ignores
    assert not read_loss(F.cross_entropy(_X, _Y, weight=_WEIGHT), None).ignores


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (_X.square().sum() / torch.tensor(5.0), 5.0),
        (_X.square().sum() * 2 / torch.tensor(5.0), 2.5),
        (F.cross_entropy(_X, _Y, reduction="none").sum() / 3, 3.0),
        (_X.square().sum(), 0.0),
        (_X.square().mean() / 2, 0.0),
        (_X.square().sum() / _X.sum(), 0.0),
        (F.cross_entropy(_X, _Y, reduction="sum") / torch.tensor(5.0), 5.0),
        (F.mse_loss(_X, torch.zeros(4, 3), reduction="sum") / 4, 4.0),
    ],
)
def test_what_a_sum_was_divided_by(loss: torch.Tensor, divisor: float) -> None:
    assert read_loss(loss, None).divisor == pytest.approx(divisor)


@pytest.mark.parametrize(
    ("weight", "divisor", "count"), [(None, 1.0, 3.0), (None, 5.0, 3.0), (_WEIGHT, 5.0, 0.0)]
)
def test_how_many_targets_a_cross_entropy_that_is_a_sum_has(
    weight: torch.Tensor | None, divisor: float, count: float
) -> None:
    loss = F.cross_entropy(_X, _Y, weight=weight, reduction="sum") / divisor
    assert (read_loss(loss, None).mean, read_loss(loss, None).count) == (False, count)


def test_what_was_packed_is_not_unpacked() -> None:
    """To unpack may mean to compute it once more: activation checkpointing."""
    asked: list[torch.Tensor] = []

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        asked.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
        loss = F.cross_entropy(_X, _Y)
    assert read_loss(loss, None) == LossFacts(1.0, True, 0.0) and not asked
