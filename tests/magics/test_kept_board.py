"""What a program that runs a notebook and saves it is told of the board, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kernels import Kernel, execute
from support import eventually

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Two ranks, and no page that watches them."""
    with Kernel() as kernel:
        kernel.init(2)
        kernel.run_well("%%ddp\nx = 1")
        yield kernel


def told_of_the_board(kernel: Kernel, cell: str) -> list[Mapping[str, Any]]:
    """What is said of the board for this cell; the drawing thread speaks for the board's own."""
    messages = list(kernel.listen(kernel.send(cell), timeout_s=60))
    assert messages[-1]["content"] == {"execution_state": "idle"}
    return [m["content"] for m in messages if m["msg_type"] in ("comm_msg", "update_display_data")]


def test_a_cell_that_changes_nothing_on_the_board_says_nothing_of_it(kernel: Kernel) -> None:
    # On a busy machine a drawing can fall into a cell that takes its time.
    assert [] in (told_of_the_board(kernel, "%%ddp\nx = 2") for _ in range(5))
    assert [] in (told_of_the_board(kernel, "%%ddp\nprint(x)") for _ in range(5))


def test_a_cell_that_fails_is_told_to_pages_and_changes_nothing_that_is_saved(
    kernel: Kernel,
) -> None:
    told = told_of_the_board(kernel, "%%ddp --ranks 1\n{}['missing']")
    told += told_of_the_board(kernel, "%%ddp\nx = 3")
    boards = [each for each in told if each.get("data", {}).get("method") != "custom"]
    assert not [each for each in boards if "KeyError" in str(each) and "ddp-still" in str(each)]
    assert not [each for each in boards if each.get("data", {}).get("method") == "update"]


def test_what_a_page_changes_in_a_widget_of_a_rank_reaches_the_rank(kernel: Kernel) -> None:
    shown = kernel.run_well(
        "%%ddp --ranks 1\nfrom ipywidgets import IntSlider\ns = IntSlider(7)\ns"
    )
    bundles = [message["content"].get("data", {}) for message in shown.messages]
    (model,) = [each[WIDGET]["model_id"] for each in bundles if WIDGET in each]
    data = {"method": "update", "state": {"value": 12}, "buffer_paths": []}
    message = kernel.client.session.msg("comm_msg", {"comm_id": model, "data": data})
    kernel.client.shell_channel.send(message)
    asked = "%%ddp --ranks 1\ns.value"
    eventually(lambda: "12" in kernel.run_well(asked).text, 30, "the rank has the page's value")


def test_a_saved_board_shows_the_end_of_its_own_cell_not_of_the_session(tmp_path: Path) -> None:
    cells = [
        "%load_ext ddp_notebook",
        "%ddp_init --world-size 2 --device cpu\nstill_this_cell = %ddp_status",
        "%%ddp --ranks 1\n{}['missing']",
        "%ddp_restart",
        "%ddp_shutdown",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    execute(notebook, tmp_path, 120, allow_errors=True)
    for index in (1, 3):
        (picture,) = [
            each["data"]
            for each in notebook.cells[index].outputs
            if "ddp-still" in each.get("data", {}).get("text/html", "")
        ]
        assert "6/6 verified  ready" in picture["text/plain"]
        assert "As it was when this cell ended" in picture["text/html"]
        assert "KeyError" not in str(picture) and "ended  " not in picture["text/plain"]
    models = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    states = [each["state"] for each in models.values() if "still" in each["state"]]
    assert [[row["role"] for row in each["board"]["rows"]] for each in states] == [
        ["ready", "ready"]
    ] * 2
    assert not [each for each in states if each["board"].get("closed")]
