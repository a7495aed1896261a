"""Values that are written alike and are not: their digests differ, and no code of theirs runs."""

from __future__ import annotations

import argparse
import io
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pytest
import torch

from ddp_notebook.rank.inspect.value_digests import Digester


class Config:
    """As users have them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Name(str):
    """A text of the user's class."""


class Buffer(io.BytesIO):
    """Of a class in C, with nothing of its own."""


class Hostile:
    """Whatever is called counts."""

    called = 0

    def _count(self, *_: Any) -> Any:
        Hostile.called += 1
        return 1

    __repr__ = __eq__ = __hash__ = __len__ = __iter__ = __getattr__ = __bool__ = _count  # type: ignore[assignment]
    value = __class__ = property(_count)  # type: ignore[assignment]


def deep(end: Any) -> Any:
    """`end` in ten containers."""
    value = end
    for number in range(10):
        value = {"in": value} if number % 2 else [0, value]
    return value


def changed(tensor: Any) -> Any:
    """With another last value."""
    tensor[-1] = 7
    return tensor


MAKES: list[Callable[[Any], Any]] = [
    lambda end: "a" * 5_000 + str(end),
    lambda end: b"a" * 5_000 + bytes([end]),
    lambda end: [*range(50_000), end],
    lambda end: (*range(700), end),
    lambda end: [[number, [number] * 9] for number in (*range(700), end)],
    lambda end: {f"key {number}": number for number in range(5_000)} | {"last": end},
    lambda end: {(number, "x"): number for number in range(300)} | {(9, "last"): end},
    lambda end: {*range(3_000), -end},
    lambda end: frozenset({*map(str, range(3_000)), str(-end)}),
    deep,
    lambda end: 10**5_000 + end,
    lambda end: Name(f"{'a' * 300}{end}"),
    lambda end: OrderedDict(a=1, b=end),
    lambda end: Config(lr=0.1, inner=Config(names=["a", "b", end])),
    lambda end: argparse.Namespace(lr=0.1, steps=end),
    lambda end: [torch.zeros(5), changed(torch.zeros(5_000)) * end],
    lambda end: {"x": np.arange(5_000) + end},
    lambda end: [np.bool_(end == 1), np.datetime64(end, "s")],
    lambda end: {"z": torch.tensor([end * 1j])},
    lambda end: [Fraction(1, end), UUID(int=end)],
    lambda end: [None, True, 1.5, 2j, ..., "é\ud800", end],
]


@pytest.mark.parametrize("make", MAKES)
def test_equal_values_have_one_digest_and_others_another(make: Callable[[Any], Any]) -> None:
    one, same, other = (Digester(objects=True, seconds=5).of(make(end)) for end in (1, 1, 2))
    assert one and one == same != other


def test_the_order_of_keys_does_not_count_and_that_of_items_does() -> None:
    keys = [str(number) for number in range(50)]
    both = (dict.fromkeys(keys, 1), dict.fromkeys(reversed(keys), 1))
    one, other = (Digester(objects=False).of(value) for value in both)
    assert one == other
    assert Digester(objects=False).of([1, 2]) != Digester(objects=False).of([2, 1])


def test_no_code_of_the_users_runs() -> None:
    hostile = Hostile()
    for value in (hostile, [hostile] * 3, {1: hostile}, {"a": (hostile,)}):
        assert Digester(objects=True).of(value)
    assert Hostile.called == 0


def test_what_is_not_read_to_its_end_has_none() -> None:
    looped: list[Any] = [1]
    looped.append(looped)
    assert Digester(objects=True).of(looped)
    assert Digester(objects=True, seconds=-1).of([1]) == ""
    assert Digester(objects=False).of(Config(a=1)) == ""
    many = [object() for _ in itertools.repeat(None, 200_000)]
    assert Digester(objects=True, seconds=0.001).of(many) == ""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "value",
    [
        pd.Timestamp("2020-01-01"),
        Buffer(b"what it holds is in C"),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        np.array([object()]),
    ],
)
def test_of_what_cannot_be_looked_into_nothing_is_proved(value: Any) -> None:
    digester = Digester(objects=True)
    digester.of([value])
    assert digester.opaque


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda: dict.fromkeys(map(str, range(1_000_000)), 1), sorted),
        (lambda: set(map(str, range(1_000_000))), sorted),
        (lambda: "é" * 200_000_000, Digester(objects=True, seconds=3_600).of),
        (lambda: bytes(400_000_000), Digester(objects=True, seconds=3_600).of),
    ],
    ids=["dict", "set", "text", "bytes"],
)
def test_large_ones_are_left_when_the_time_is_up(
    make: Callable[[], Any], whole: Callable[[Any], Any]
) -> None:
    """No clock is read while keys are sorted, or while one part of a text is encoded."""
    large = make()
    limited_s = min(_thread_time_of(Digester(objects=True).of, large) for _ in range(3))
    assert limited_s < 0.5 * _thread_time_of(whole, large)


def _thread_time_of(function: Callable[[Any], Any], value: Any) -> float:
    began_s = time.thread_time()
    function(value)
    return time.thread_time() - began_s
