"""What a notebook's kernel holds does not grow with the number of starts, boards and runs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from kernels import Kernel

STARTS = 5
COUNTS = """
def counts():
    import collections, gc, json
    from ipywidgets.widgets.widget import _instances
    get_ipython().run_line_magic("reset", "-f out")  # IPython keeps the values of cells
    gc.collect()
    types = collections.Counter(type(each) for each in gc.get_objects())
    ours = {t.__qualname__: n for t, n in types.items() if "ddp_notebook." in str(t.__module__)}
    print(json.dumps({**ours, "models of widgets": len(_instances)}))
"""


@pytest.fixture
def kernel() -> Any:
    """One rank."""
    with Kernel() as kernel:
        kernel.init(1)
        kernel.run_well(COUNTS)
        yield kernel


def counted(kernel: Kernel) -> Counter[str]:
    """How many objects of each of our types are alive, and how many models of widgets."""
    lines = kernel.run_well("counts()").text.splitlines()
    return Counter(json.loads(next(line for line in lines if line.startswith("{"))))


def test_parts_of_sessions_that_have_ended_and_of_old_boards_are_let_go(kernel: Kernel) -> None:
    def start() -> None:
        kernel.run_well("%ddp_shutdown")
        kernel.run_well("%ddp_init --world-size 1 --device cpu")

    kernel.run_well("from ddp_notebook.magics import live_board; live_board._MOST_EARLIER = 2")
    for _ in range(3):
        start()
    found = [counted(kernel)]
    for _ in range(2):
        for _ in range(STARTS):
            start()
        found.append(counted(kernel))
    before, between, after = found
    # What varies from one start to the next may be more once, and not twice.
    grown = {
        name: (more, again)
        for name, more in (between - before).items()
        if min(more, again := (after - between)[name]) >= STARTS
    }
    assert not grown, (grown, before)
    assert after["LiveBoard"] == 3, "one that is live, and those that still answer pages"
