"""The line debugger's verbs in a real shell: what is typed, and what the tables say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import shared_shell

Capture = pytest.CaptureFixture[str]

STOPS = """%%ddp
config = {"lr": 0.1, "name": "a  b"}
breakpoint()
for i in range(3):
    if i == 2 and rank == 1:
        raise ValueError("broken")
    dist.all_reduce(torch.ones(1))
last = i
"""


@pytest.fixture(scope="module")
def ranks_up(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A shell with two ranks, shared by the tests below."""
    with shared_shell(2) as made:
        made.run_cell("%%ddp\nimport torch")
        yield made


def shown(shell: Any, capsys: Capture, source: str) -> str:
    """What a cell shows; lines joined, for a table may break them."""
    capsys.readouterr()
    shell.run_cell(source)
    text = capsys.readouterr()
    return " ".join((text.out + text.err).split())


def test_python_text_reaches_the_ranks_as_it_was_typed(ranks_up: Any, capsys: Capture) -> None:
    """Quotes and braces; the notebook's own variables are not put into it."""
    ranks_up.user_ns["i"] = ranks_up.user_ns["rank"] = "the notebook's"
    shown(ranks_up, capsys, STOPS)
    assert "ranks 0-1" in shown(ranks_up, capsys, '%ddp_print config["lr"]')
    assert "'rank 0'" in shown(ranks_up, capsys, "%ddp_print f'rank {rank}'")
    assert "{'a': 0}" in shown(ranks_up, capsys, "%ddp_print {'a': rank}")
    set_ = shown(ranks_up, capsys, '%ddp_set config["name"] = "x  y" --ranks 1')
    assert set_ == 'config["name"] = "x y" → rank 1'
    assert "'x y'" in shown(ranks_up, capsys, "%ddp_print config['name']")
    shown(ranks_up, capsys, '%ddp_break 7 --log "at {i}"')
    moved = shown(ranks_up, capsys, "%ddp_step --to 8")
    assert "at 0 at 1" in moved
    assert "the notebook's" not in moved
    assert "✗ failed raised ValueError: broken (cell line 6)" in moved


def test_a_rank_that_raises_in_a_step_is_not_called_done(ranks_up: Any, capsys: Capture) -> None:
    shown(ranks_up, capsys, "%ddp_abort")
    shown(ranks_up, capsys, "%%ddp\nbreakpoint()\nif rank == 1:\n    raise ValueError('broken')\n")
    refused = shown(ranks_up, capsys, "%%ddp\nrank")
    assert "still in an earlier cell, paused before a line (cell" in refused, refused
    for _ in range(3):
        table = shown(ranks_up, capsys, "%ddp_step")
    assert "The cell has ended: rank 1 failed." in table
    assert "1 0 issued ✗ failed raised ValueError: broken" in table
    assert "0 0 issued ✓ done" in table
    assert "detached" not in shown(ranks_up, capsys, "%ddp_step"), "nobody asked for that"
