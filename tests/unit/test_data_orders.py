"""What a data set has, in whatever order, and in which: lists, tensors, parts of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.training.inputs import Samplers, order_of


class Files(Dataset[Any]):
    """Has a list of files with their classes, as ImageFolder, and more that is no data."""

    def __init__(self, samples: list[Any], transform: object = None) -> None:
        self.samples, self.transform, self.root = samples, transform, Path("/data")

    def __len__(self) -> int:
        return len(self.samples)


class Augmented(Dataset[Any]):
    """Changes the samples of another data set."""

    def __init__(self, base: Any, valid: Any = ()) -> None:
        self.base, self.valid = base, valid

    def __len__(self) -> int:
        return len(self.base)


_X = torch.arange(600.0).reshape(100, 6)
_FILES = [(f"{i}.jpg", i % 10) for i in range(100)]
_OTHER = random.Random(3).sample(range(100), 100)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_FILES, [_FILES[i] for i in _OTHER]),
        (Files(_FILES), Files([_FILES[i] for i in _OTHER], transform=print)),
        (TensorDataset(_X, _X[:, 0]), TensorDataset(_X[_OTHER], _X[_OTHER][:, 0])),
        (Subset(Files(_FILES), range(50)), Subset(Files(_FILES), range(50, 100))),
        (Subset(_FILES, _OTHER[:80]), Subset(_FILES, _OTHER[20:])),
        ([_X[0], _X[1], _X[2]], [_X[1], _X[0], _X[2]]),
        (Augmented(Subset(_FILES, _OTHER[:80])), Augmented(Subset(_FILES, _OTHER[20:]), [1])),
    ],
)
def test_the_same_data_in_another_order(one: Any, other: Any) -> None:
    assert order_of(one)[0] == order_of(other)[0] != ""
    assert order_of(one)[1] != order_of(other)[1]
    assert order_of(one) == order_of(one)


def test_a_data_set_that_has_two_others_of_its_length_or_itself_is_not_known() -> None:
    half = Subset(_FILES, range(50))
    assert order_of(Augmented(half, half)) == ("", "")
    endless = Augmented([])
    endless.base, endless.valid = Files([0]), endless
    assert len(endless) == 1 and order_of(endless) == ("", "")
    endless.base = endless.valid = [endless]
    assert order_of(endless) == ("", "")


def test_a_list_that_is_the_same_everywhere_has_no_order() -> None:
    weights = [1.0] * 100
    plain = order_of(Files(_FILES))[1]
    assert order_of(TensorDataset(torch.ones(5, 2))) == ("", "")
    beside = Files(_FILES)
    beside.weights = weights  # type: ignore[attr-defined]
    assert order_of(beside)[1] == plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_FILES, [*_FILES[1:], ("more.jpg", 1)]),
        (TensorDataset(_X), TensorDataset(torch.rand_like(_X))),  # made at random on each rank
        (Subset(TensorDataset(_X), [1]), Subset(TensorDataset(_X + 1), [2])),
    ],
)
def test_other_data_are_no_other_order(one: Any, other: Any) -> None:
    assert order_of(one)[0] != order_of(other)[0]


def test_large_tensors_are_the_same_data_only_in_the_same_order() -> None:
    large = torch.arange(1_000_000.0).reshape(50_000, 20)
    assert order_of(TensorDataset(large)) == order_of(TensorDataset(large.clone()))
    assert order_of(TensorDataset(large))[0] != order_of(TensorDataset(large.flip(0)))[0]


@pytest.mark.parametrize("dataset", [range(5), [], [object()], Files([object()]), None])
def test_what_cannot_be_read_is_not_known(dataset: Any) -> None:
    assert order_of(dataset) == ("", "")


class _Own:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "SequentialSampler"),
        ({"shuffle": True}, "RandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 100, 100)}, "WeightedRandomSampler"),
        ({"batch_sampler": _Own()}, "_Own"),
        ({"sampler": DistributedSampler(_X, 2, 1)}, None),  # it is looked at by itself
    ],
)
def test_what_a_loader_draws_its_samples_by(options: dict[str, Any], name: str | None) -> None:
    samplers = Samplers(CallSites(UserCode()))
    samplers.loaded(DataLoader(TensorDataset(_X), **options))
    assert [source.seen["sampler"] for source in samplers.loaders.values()] == [name] * bool(name)
