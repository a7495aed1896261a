"""What a rank's last cell raised stays in view until the next: in the state, and in every view."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest
from msgspec import structs
from test_fold import life

from ddp_notebook.board import model
from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Event,
    RankState,
    Role,
    Snapshot,
    Stage,
    StageStarted,
    Status,
)
from ddp_notebook.model.fold import fold
from ddp_notebook.rank.cells.raised import in_thread, without_ours, wrapped
from ddp_notebook.rank.cells.threads import ThreadErrors
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.main_thread import Aborted
from ddp_notebook.views import board as view
from ddp_notebook.views.board_rows import board

HOSTILE = "<script>alert(1)</script>"


def ended(
    rank: int, outcome: str = "error", ename: str = "KeyError", evalue: str = "'x'"
) -> CellFinished:
    """The end of a rank's second cell."""
    return CellFinished(rank=rank, cell=2, outcome=outcome, ename=ename, evalue=evalue)


def after(*last: Event, world_size: int = 4) -> Snapshot:
    """Ranks that have run a first cell, and `last` in another."""
    start = Snapshot(ranks=tuple(RankState(rank) for rank in range(world_size)))
    events = [each for rank in range(world_size) for each in life(rank)]
    begun = [CellStarted(rank=each.rank, cell=2) for each in last]
    return fold(start, [*events, *begun, *last])


def test_it_is_said_until_the_next_cell_and_no_rank_that_raised_is_green() -> None:
    raised = after(ended(3))
    assert raised.ready
    assert "ranks 0-2 ready; rank 3 raised" in board(raised).headline
    assert "rank 3 refused" in board(after(ended(3, ename="Mismatch"))).headline
    assert [row.text for row in board(raised).rows] == [
        *[""] * 3,
        "its last cell raised KeyError: 'x'",
    ]
    again = fold(raised, [CellStarted(rank=3, cell=3)])
    assert again.ranks[3].status is Status.RUNNING and not again.ranks[3].raised
    well = fold(again, [CellFinished(rank=3, cell=3, outcome="ok")])
    assert not board(well).rows[3].text


def test_a_rank_without_a_group_has_no_stage_behind_it_until_it_has_one() -> None:
    lacking = after(structs.replace(ended(3, outcome="ok", ename=""), no_group=True))
    row = board(lacking).rows[3]
    assert (row.role, row.word, row.stage) == (Role.GROUPLESS, "no group", Stage.LAUNCHED)
    assert "Rank 3 has no process group" in board(lacking).notes[-1]
    again = fold(lacking, [StageStarted(rank=3, stage=Stage.STORE)])
    assert not again.groupless

    def abort(snapshot: Snapshot) -> str:
        buttons = model.actions(board(snapshot).rows, running=True, in_run=False)
        return next(each.why_not for each in buttons if each.name == "abort")

    assert abort(after(ended(3))) and not abort(lacking)
    both = after(structs.replace(ended(3), no_group=True))
    assert board(both).rows[3].role is Role.RAISED and "Rank 3" in board(both).notes[-1]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (ended(0, ename="StopIteration", evalue=""), "StopIteration"),
        (ended(0, evalue="one\nand more"), "KeyError: one …"),
        (
            ended(0, ename="Mismatch", evalue="one\nWhich: %ddp_why"),
            "Mismatch: one Which: %ddp_why",
        ),
        (ended(0, "interrupted", "KeyboardInterrupt", ""), ""),
        (ended(0, ename="", evalue=""), ""),  # a benchmark's, which says so itself
    ],
)
def test_it_is_one_line_and_an_interrupt_is_not_told(event: Event, said: str) -> None:
    assert after(event).ranks[0].raised == said


def test_ranks_that_raised_the_same_share_a_row() -> None:
    raised = after(*map(ended, range(5)), ended(6, evalue="'y'"), world_size=8)
    folded = [(0, 1, 2, 3, 4), (5, 7), (6,)]
    assert [row.ranks for row in board(raised).rows] == folded


def test_every_view_says_it_and_none_runs_it() -> None:
    raised = after(ended(3, evalue=HOSTILE))
    said = f"its last cell raised KeyError: {HOSTILE}"
    assert said in view.text(board(raised))
    page = view.html(board(raised))
    assert "its last cell raised KeyError: &lt;script&gt;" in page and HOSTILE not in page
    assert board(raised).rows[3].role is Role.RAISED
    shown = model.board_json(board(raised), 0)
    assert [row["text"] for row in shown["rows"]] == ["", "", "", f"KeyError: {HOSTILE}"]


def test_of_an_endless_recursion_the_top_and_the_bottom_are_formatted() -> None:
    """All its thousands of frames took seconds."""

    def endless(number: int) -> int:
        return endless(number + 1)

    with pytest.raises(RecursionError) as caught:
        endless(0)
    everything = traceback.extract_tb(caught.tb)
    kept = traceback.extract_tb(without_ours(caught.tb, UserCode())[0])
    assert len(kept) < 100 < len(everything)
    assert (kept[0], kept[-1]) == (everything[0], everything[-1])


LIBRARY = """
def step(forward):
    try:
        return forward()
    except Exception as error:
        raise RuntimeError("failed to run forward") from error
"""
OWN = """
def forward():
    raise ValueError("out of range")
def shows():
    try:
        forward()
    except ValueError as error:
        raise KeyError("own") from error
def unknown():
    return int("x", base="y")
"""


@pytest.mark.parametrize(
    ("call", "kind", "functions"),
    [
        ("forward", "ValueError", ["forward"]),
        ("shows", "KeyError", ["shows"]),  # the user's own wrapping says what the user means
        ("unknown", "TypeError", ["unknown"]),
    ],
)
def test_of_what_a_library_wraps_the_users_own_error_is_told(
    call: str, kind: str, functions: list[str]
) -> None:
    user: dict[str, Any] = {}
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "/usr/lib/python3/site-packages/torch/stage.py", "exec"), library)
    exec(compile(OWN, "/home/me/train.py", "exec"), user)
    with pytest.raises(RuntimeError) as caught:
        library["step"](user[call])
    told = in_thread("main", caught.value, UserCode())
    assert (told.type, [place.function for place in told.path][-1:]) == (kind, functions)
    assert [type(each).__name__ for each in wrapped(caught.value, UserCode())] == [
        "RuntimeError",
        kind,
    ]


def test_an_error_that_a_library_raised_from_its_own_is_told_as_it_is() -> None:
    library: dict[str, Any] = {}
    code = "def fails():\n    raise OSError('closed')\n" + LIBRARY
    exec(compile(code, "/usr/lib/python3/site-packages/torch/stage.py", "exec"), library)
    with pytest.raises(RuntimeError) as caught:
        library["step"](library["fails"])
    assert in_thread("main", caught.value, UserCode()).type == "RuntimeError"
    assert in_thread("main", RuntimeError("not raised"), UserCode()).type == "RuntimeError"


@pytest.mark.parametrize(("error", "is_shown"), [(Aborted("aborted"), False), (KeyError(1), True)])
def test_a_thread_that_an_abort_ended_has_raised_nothing(
    error: Exception, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    errors = ThreadErrors(lambda text: not shown.append(text), UserCode())
    errors.attach()

    def fails() -> None:
        raise error

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert bool(shown) == is_shown == bool(errors.of_run)
