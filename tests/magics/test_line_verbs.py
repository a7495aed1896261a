"""The line debugger's verbs in a real shell: what is typed, and what the tables say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import eventually, session_of, shared_shell

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
    assert "ranks 0 and 1" in shown(ranks_up, capsys, '%ddp_print config["lr"]')
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
    assert "1 0 collectives ✗ failed raised ValueError: broken" in table
    assert "0 0 collectives ✓ done" in table
    assert "detached" not in shown(ranks_up, capsys, "%ddp_step"), "nobody asked for that"


WRONG = {
    "%ddp_break nowhere.py:3": "There is no file nowhere.py",
    "%ddp_break no_function": "its module's name before it: %ddp_break torch.nn.functional.relu",
    "%ddp_break torch.relu": "torch.relu: it is C code",
    "%ddp_break 999": "no code from line 999 on",
    '%ddp_break 2 --if "x ="': "'x =' is no Python expression",
    "%ddp_break 2 --count 0": "--count is 1 or more",
    "%ddp_break 2 --ranks 9": "Rank 9 does not exist",
    "%ddp_break --on nothing": "--on must be one of exception, nan, collective",
    "%ddp_break --clear 77": "There is no breakpoint 77; there are: none",
    "%ddp_step --ranks 9": "Rank 9 does not exist",
    "%ddp_step --to nonsense": "there is no such goal",
    "%ddp_print": "The expression is missing. For example: %ddp_print",
    "%ddp_print x =": "'x =' is not a valid expression",
    "%ddp_print x --up -1": "--up is 0 or more",
    "%ddp_print --ranks 9 x": "Rank 9 does not exist",
    "%ddp_set": "The assignment is missing. For example: %ddp_set",
    "%ddp_set x": "'x' is not a valid assignment",
    "%ddp_frame sideways": "'sideways' is no frame. Type %ddp_frame up",
    "%ddp_frame --ranks 9": "Rank 9 does not exist",
    "%ddp_where --ranks 9": "Rank 9 does not exist",
}
NONE_PAUSED = "No rank is paused at a line. Write breakpoint() in a %%ddp cell"
NO_CODE = "No rank is in your code. A rank is there at a breakpoint"
RUNS = "it runs and is not paused, so its variables change meanwhile. Stop it: %ddp_break LINE"
IN = {
    "idle": (
        "%%ddp\nx = 5",
        {
            "%ddp_step": "There is nothing to step: no rank is paused at a line, no cell runs",
            "%ddp_step --into": NONE_PAUSED,
            "%ddp_frame": NO_CODE,
            "%ddp_print nope": "raised NameError: name 'nope' is not defined",
            "%ddp_print x --up 3": "it has no frames of yours, none 3 up. Show them: %ddp_frame",
            "%ddp_set x = nope": "raised NameError",
        },
    ),
    "running": (
        "%%ddp --detach\nx = 5\nwhile True:\n    x = 5",
        {
            "%ddp_step": " "
            "is still running on ranks 0 and 1, and no rank is paused. What they wait for: ",
            "%ddp_step --out": NONE_PAUSED,
            "%ddp_frame": NO_CODE,
            "%ddp_print x": RUNS,
            "%ddp_set x = 6": RUNS,
        },
    ),
    "paused": (
        "%%ddp\nx = 5\ndef f(n):\n    breakpoint()\n    return n\nf(3)",
        {
            "%ddp_step --to 57": "line 57 is not in f, where it is paused; elsewhere a breakpoint",
            "%ddp_frame 9": "There is no frame 9: they are 0 (innermost) to 1",
            "%ddp_frame down": "There is no frame below 0",
            "%ddp_print nope": "raised NameError: name 'nope' is not defined",
            "%ddp_print n --up 1": "raised NameError: name 'n' is not defined",
            "%ddp_set nope = 1": "f has no variable nope",
            "%%ddp\ny = 1": "paused",
        },
    ),
    "blocked": (
        "%%ddp\nx = 5\nif rank:\n    dist.barrier()",
        {
            "%ddp_step": "is still running on rank 1, and no rank is paused. What they wait for: ",
            "%ddp_step --to 3": NONE_PAUSED,
            "%ddp_frame up": "There is no frame 1: there is only 0",
            "%ddp_print x --up 3": "rank 1: it has 1 frame of yours, none 3 up",
            "%ddp_print dist.barrier()": "not evaluated: it may issue a collective (barrier)",
        },
    ),
    "post-mortem": (
        "%%ddp\nx = 5\ndef f(n):\n    return n / 0\nf(3)",
        {
            "%ddp_step": "There is nothing to step: no rank is paused at a line, no cell runs",
            "%ddp_step --into": NONE_PAUSED,
            "%ddp_frame 2": "There is no frame 2: they are 0 (innermost) to 1",
            "%ddp_print m": "raised NameError: name 'm' is not defined",
            "%ddp_print n --up 5": "ranks 0 and 1: it has 2 frames of yours, none 5 up",
        },
    ),
}
"""By what the ranks are at: the cell that brings them there, and what is said of wrong input."""


@pytest.mark.parametrize("state", IN)
def test_wrong_input_is_answered_with_what_to_type_and_nothing_moves(
    ranks_up: Any, capsys: Capture, state: str
) -> None:
    shown(ranks_up, capsys, "%ddp_abort")
    shown(ranks_up, capsys, "%ddp_break --clear")
    cell, wrong = IN[state]
    shown(ranks_up, capsys, cell)
    run = session_of(ranks_up).runs.all[-1]
    eventually(lambda: run.events.started >= {0, 1})
    stops = dict(run.stops)
    for line, expected in {**WRONG, **wrong}.items():
        text = shown(ranks_up, capsys, line)
        assert expected in text, f"{state}, {line}: {text}"
        assert "Traceback" not in text, f"{state}, {line}: {text}"
    assert "There are no breakpoints" in shown(ranks_up, capsys, "%ddp_break")
    assert (run.stops, session_of(ranks_up).runs.all[-1]) == (stops, run)
    assert "5" in shown(ranks_up, capsys, "%ddp_print x") or state == "running"
    shown(ranks_up, capsys, "%ddp_abort")
