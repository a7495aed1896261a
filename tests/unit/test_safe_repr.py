"""Values as short texts: nothing of theirs is run, and nothing is too long."""

from __future__ import annotations

import collections
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.rank.inspect import safe_repr


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("its shape was asked for")


class OwnList(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("it was counted")


class Colour(enum.Enum):
    RED = 1

    @property
    def name(self) -> str:
        raise RuntimeError("its name was asked for")

    def __repr__(self) -> str:
        raise RuntimeError("it was written out")


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Reply(enum.StrEnum):
    YES = "yes"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (2**4000, "<int of 4,001 bits>"),
        (None, "None"),
        ({8, 0}, "{0, 8}"),
        ({0, 8}, "{0, 8}"),
        (frozenset("bca"), "frozenset({'a', 'b', 'c'})"),
        (0.5, "0.5"),
        ("a\n", r"'a\n'"),
        ("x" * 5000, f"'{'x' * 60}'… of 5,000"),
        ([1, [2, [3, [4]]]], "[1, [2, […]]]"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, … of 1,000]"),
        ((1,), "(1,)"),
        ({"a": {1}}, "{'a': {1}}"),
        (range(2**200), "range(0, <int of 201 bits>, 1)"),
        (torch.zeros(2, 3), "tensor(2, 3) float32 cpu"),
        (torch.nn.Parameter(torch.zeros(4)), "Parameter(4) float32 cpu"),
        (torch.zeros(3, device="meta").half(), "tensor(3) float16 meta"),
        (torch.zeros(2).numpy(), "array(2) float32"),
        (torch.zeros(1).as_subclass(OwnTensor), "<OwnTensor>"),
        (torch.nn.Linear(1, 1), "<Linear>"),
        (torch.float32, "torch.float32"),
        (Path("data"), f"{type(Path()).__name__}('data')"),
        (collections.Counter("aab"), "<Counter of 2>"),
        (OwnList([1, 2]), "<OwnList of 2>"),
        (Colour.RED, "Colour.RED"),
        ([Colour.RED, Reply.YES], "[Colour.RED, Reply.YES]"),
        (Access.READ | Access.WRITE, "Access.READ|WRITE"),
        (Access(0), "Access(0)"),
        (len, "<function len>"),
        (int, "<class int>"),
        (KeyError("x"), "<KeyError>"),
    ],
)
def test_a_value_is_named(value: Any, text: str) -> None:
    assert safe_repr.of(value) == text


def test_an_object_whose_every_attribute_raises_is_named_by_its_class() -> None:
    class Trap(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(f"{name} was looked at")

    class Hostile(metaclass=Trap):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"{name} was looked at")

        def __repr__(self) -> str:
            raise RuntimeError("it was written out")

    made = type.__call__(Hostile)
    assert safe_repr.of(made) == "<Hostile>"
    assert safe_repr.of(Hostile) == "<Trap>"
    assert safe_repr.of([made, {"k": made}]) == "[<Hostile>, {'k': <Hostile>}]"


def test_what_holds_itself_comes_to_an_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert safe_repr.of(loop) == "[[[…]]]"


plain_values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(plain_values)
def test_no_text_is_longer_than_said(value: Any) -> None:
    assert 0 < len(safe_repr.of(value)) <= safe_repr.LONGEST


def test_a_tensor_without_dimensions_is_its_number_where_no_device_is_asked() -> None:
    assert (
        safe_repr.of((torch.tensor(6.1), torch.tensor(3))) == "(tensor 6.1 float32, tensor 3 int64)"
    )
    assert safe_repr.of(torch.empty((), device="meta")) == "tensor() float32 meta"
