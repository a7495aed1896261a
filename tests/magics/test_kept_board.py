"""What a program that runs a notebook and saves it is told of the board, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from kernels import Kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Two ranks, and no page that watches them."""
    with Kernel() as kernel:
        kernel.init(2)
        kernel.run_well("%%ddp\nx = 1")
        yield kernel


def told_of_the_board(kernel: Kernel, cell: str) -> list[Mapping[str, Any]]:
    """What is said of the board for this cell; the painter speaks for the board's own."""
    messages = list(kernel.listen(kernel.send(cell), timeout_s=60))
    assert messages[-1]["content"] == {"execution_state": "idle"}
    return [m["content"] for m in messages if m["msg_type"] in ("comm_msg", "update_display_data")]


def test_a_cell_that_changes_nothing_on_the_board_says_nothing_of_it(kernel: Kernel) -> None:
    # On a busy machine a painting can fall into a cell that takes its time.
    assert [] in (told_of_the_board(kernel, "%%ddp\nx = 2") for _ in range(5))
    assert [] in (told_of_the_board(kernel, "%%ddp\nprint(x)") for _ in range(5))


def test_a_cell_that_fails_says_so_before_it_ends(kernel: Kernel) -> None:
    told = told_of_the_board(kernel, "%%ddp --ranks 1\n{}['missing']")
    assert "KeyError" in str(told)
    assert told_of_the_board(kernel, "%%ddp\nx = 3") != []  # it has not raised any more
    assert [] in (told_of_the_board(kernel, "%%ddp\nx = 4") for _ in range(5))
