"""Objects of a class are found, and what other threads build meanwhile stays whole."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch  # noqa: F401  # a heap as large as a rank's: else the list is made too fast

from ddp_notebook.rank.inspect.objects import objects_of

_ROUNDS = 10


@pytest.fixture(autouse=True)
def whole_heap() -> Iterator[None]:
    """With all that a test run has loaded, which is put aside for other tests."""
    gc.unfreeze()
    yield
    gc.freeze()


class Base:
    """A class with instances."""


class Made(Base):
    """A class made from it."""


def test_instances_of_a_class_and_of_those_made_from_it_are_found_once() -> None:
    there = [Base(), Made()]
    found = [each for each in objects_of(Base) if each in there]
    assert sorted(map(id, found)) == sorted(map(id, there))
    assert objects_of in _functions()
    assert all(type(each) is FunctionType for each in _functions())
    assert gc.isenabled()


def _functions() -> list[FunctionType]:
    return objects_of(FunctionType)


def test_no_other_object_has_a_reference_more_afterwards() -> None:
    young: list[object] = []
    before = sys.getrefcount(young)
    objects_of(Base)
    assert sys.getrefcount(young) == before


def test_tuples_that_another_thread_builds_meanwhile_are_built() -> None:
    over, errors = threading.Event(), []

    def build() -> None:
        while not over.is_set():
            try:
                tuple(_numbers())
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(_ROUNDS):
        objects_of(FunctionType)
    over.set()
    thread.join()
    assert not errors


def _numbers() -> Iterator[int]:
    yield from range(3)
