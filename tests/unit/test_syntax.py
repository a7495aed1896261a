"""Trees of source code: threads that make some at once do not disturb each other."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from ddp_notebook import syntax

SOURCE = "\n".join(f"def f{n}(x):\n    return (x + {n}) * [x, {{'a': x}}][0]" for n in range(5))


@pytest.fixture
def collected_often() -> Iterator[None]:
    """The garbage collector runs within each tree, and lets other threads run."""
    before, sleep = gc.get_threshold(), lambda *_: time.sleep(1e-4)
    gc.callbacks.append(sleep)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(sleep)


@pytest.mark.usefixtures("collected_often")
def test_threads_that_parse_at_once_get_their_trees() -> None:
    failed: list[BaseException] = []
    until_s = time.monotonic() + 0.5

    def work() -> None:
        while time.monotonic() < until_s:
            try:
                assert len(syntax.parse(SOURCE).body) == 5
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def test_a_tree_that_another_threads_code_disturbed_is_made_again() -> None:
    results = iter([SystemError("AST constructor recursion depth mismatch"), "a tree"])

    def make() -> str:
        result = next(results)
        if isinstance(result, SystemError):
            raise result
        return result

    assert syntax.alone(make) == "a tree"
