"""`%ddp_where` in a real shell: what it gives, what it shows, and every wrong input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from results import shown_by

from ddp_notebook.model import StackTree, codec

Capture = pytest.CaptureFixture[str]


def test_without_ranks_it_says_how_to_start_them(shell: Any, capsys: Capture) -> None:
    _, shown = shown_by(shell, capsys, "%ddp_where --ranks 1")
    assert shown == (
        "UsageError: %ddp_where needs ranks, and none are running. Start them first: "
        "%ddp_init --world-size 4"
    )
    _, shown = shown_by(shell, capsys, "%ddp_where -h")
    assert shown.startswith("usage: %ddp_where [-h] [--ranks RANKS] [--locals] [--json]")
    assert "%ddp_where --ranks 0,2 --locals" in " ".join(shown.split())


def test_a_cell_that_lacks_a_variable_of_the_ranks_is_told_where_it_is(
    shell2: Any, capsys: Capture
) -> None:
    shown_by(shell2, capsys, "%%ddp\nweights = 3")
    for name in ("weights", "rank"):
        _, shown = shown_by(shell2, capsys, f"print({name})")
        assert f"{name} is a variable of the ranks, not of the notebook. Write %%ddp on" in shown
        assert f"%ddp_pull {name}" in shown
    shown = shown_by(shell2, capsys, "dist.barrier()")[1]
    assert "Write %%ddp on" in shown and "%ddp_pull" not in shown, "a module cannot be pulled"
    assert "of the ranks" not in shown_by(shell2, capsys, "print(wieghts)")[1]
    assert "of the ranks" not in shown_by(shell2, capsys, "%%ddp\nwieghts")[1]


def test_wrong_input_says_what_to_type(shell2: Any, capsys: Capture) -> None:
    for call, expected in (
        ("%ddp_where now", "%ddp_where does not take now. For example: %ddp_where "),
        ("%ddp_where --ranks 2", "Rank 2 does not exist: world size is 2, so ranks are 0 to 1."),
        ("%ddp_where --ranks one", "'one' is not a set of ranks: write 0, 0,2, 1-3 or all."),
    ):
        result, shown = shown_by(shell2, capsys, call)
        assert not result.success
        assert shown.startswith(f"UsageError: {expected}"), shown
        assert "Traceback" not in shown


def test_it_gives_a_tree_that_is_shown_and_can_be_had_as_json(shell2: Any, capsys: Capture) -> None:
    shown_by(shell2, capsys, "%%ddp\npass")
    result, shown = shown_by(shell2, capsys, "%ddp_where")
    assert isinstance(result.result, StackTree)
    assert shown.endswith("ranks 0 and 1  idle")
    result, shown = shown_by(shell2, capsys, "%ddp_where --ranks 1 --locals --json")
    assert result.result is None
    assert codec.decode(StackTree, json.loads(shown)).ranks == (1,)
