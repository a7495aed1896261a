"""Models that no DDP object contains are found at their optimizer's first step, and watched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddp_notebook.rank.training.parallel.plain import PlainModels


class _Nowhere:
    def users_line(self) -> None:
        """No line of a user's is on the way here."""


class _HalfMade(nn.Module):
    """Its parameters cannot be asked for: nn.Module.__init__ was never called."""

    def __init__(self) -> None:
        pass


@pytest.fixture
def models() -> Iterator[PlainModels]:
    models = PlainModels(_Nowhere())  # type: ignore[arg-type]
    yield models
    models.take_out()


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_trained_model_is_watched_until_the_run_is_over(models: PlainModels) -> None:
    told: list[Any] = []
    models.tell = lambda model, _module, _inputs: told.append(model.key)
    (model, optimizer), other = _trained(), nn.Linear(3, 2)
    model(torch.ones(1, 3))
    models.step_begins(optimizer, list)
    assert [each.ref() for each in models.of] == [model] and not told
    for layer in (model, other):
        layer(torch.ones(1, 3))
    assert len(told) == 1 and told[0].startswith("Sequential ")
    models.step_begins(optimizer, list)
    assert models.of[0].steps == 2
    models.take_out()
    model(torch.ones(1, 3))
    assert len(told) == 1 and not model._forward_pre_hooks


def test_a_copy_of_it_tells_nothing(models: PlainModels) -> None:
    told: list[Any] = []
    models.tell = lambda model, _module, _inputs: told.append(model.key)
    model, optimizer = _trained()
    models.step_begins(optimizer, list)
    copy.deepcopy(model)(torch.ones(1, 3))
    assert not told


def test_copies_of_what_ddp_wraps_are_found(models: PlainModels) -> None:
    hooked: list[nn.Module] = []
    models.hook_copy = hooked.append
    inside, optimizer = _trained()
    average = copy.deepcopy(inside)
    holder = nn.ModuleDict({"teacher": copy.deepcopy(inside)})
    unlike = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    models.step_begins(optimizer, lambda: [inside])
    assert set(hooked) >= {average, holder["teacher"]}
    assert inside not in hooked and unlike not in hooked


def test_a_module_that_is_half_made_harms_nothing(models: PlainModels) -> None:
    half = _HalfMade()
    _, optimizer = _trained()
    models.step_begins(optimizer, list)
    models.step_begins(optimizer, list)
    assert half is not None
