"""Frames, watched expressions and numbers of ranks that stand at lines, as lines of text."""

from __future__ import annotations

import math

import pytest

from ddp_notebook.model import (
    Frame,
    LineStopped,
    RankVariables,
    Scope,
    StepRow,
    StepTable,
    Unread,
    Variable,
)
from ddp_notebook.session.tools.breakpoints import moved
from ddp_notebook.session.tools.looking import unravelled
from ddp_notebook.views.step_rows import frames_text, line_table, names_of, watched
from ddp_notebook.views.variable_table import fold, spark

FRAMES = (
    Frame("cell 3", 4, "inner", "y = x"),
    Frame("/home/me/train.py", 7, "<module>", "inner(2)"),
)


def test_frames_are_in_the_order_of_a_traceback_numbered_and_the_chosen_one_is_marked() -> None:
    assert frames_text((0, 2, 3), FRAMES, 1) == (
        "ranks 0, 2 and 3:",
        "→  1  train.py, line 7: inner(2)",
        "   0  cell 3, line 4, in inner: y = x",
    )
    assert frames_text((1,), (), 0, "does not answer") == ("rank 1: does not answer",)


def test_a_watched_expression_is_one_line_with_who_has_what() -> None:
    answers = [
        RankVariables(rank, (Scope("", "", (Variable("j", str(rank), float(rank)),)),))
        for rank in range(3)
    ]
    line = watched("j", fold(answers, [Unread((3,), "dead")], 4, evaluated=True))
    assert line.startswith("j: 0 (rank 0), 1 (rank 1), 2 (rank 2), rank 3: dead; min 0, ")
    assert line.endswith("▁▅█")


def test_what_gives_up_although_others_are_paused_says_when() -> None:
    stop = LineStopped(rank=0, cell=1, stop=1, file="cell 1", line=1, function="")

    def told(limit_s: float, since_s: float) -> str:
        row = StepRow((1,), "0 issued", "waiting", "barrier", (0,), since_s, limit_s)
        return line_table({0: stop}, StepTable("", (row,))).rows[-1].text

    assert told(0.0, 3.0) == "barrier"
    assert told(5.0, 3.0) == "barrier; its group's timeout (5 s) ends it in 2 s"
    assert told(1800.0, 60.0) == "barrier; its group's timeout (30 min) ends it in 29 min"
    assert told(5.0, 8.0) == "barrier; its group's timeout (5 s) ends it in 0 s"


def test_a_bar_for_each_number_and_a_dot_for_what_is_none() -> None:
    assert spark([0.0, 1.0]) == "▁█"
    assert spark([5.0, 5.0, math.nan]) == "▁▁·"
    assert spark([math.inf, -1.0]) == "·▁"


def test_an_index_into_values_is_one_into_the_tensor() -> None:
    assert unravelled(0, (2, 3)) == [0, 0]
    assert unravelled(5, (2, 3)) == [1, 2]
    assert unravelled(123 * 700 + 456, (300, 700)) == [123, 456]


CELL = "\nfor i in range(3):\n    v = i\n    w = v\nz = 1\n"


@pytest.mark.parametrize(
    ("after", "line", "now"),
    [
        (CELL, 4, 4),
        (CELL.replace("\nfor", "\n# new\nfor"), 4, 5),
        (CELL.replace("w = v", "w = v * 2"), 4, 4),
        (CELL.replace("    w = v\n", ""), 4, 0),
        (CELL.replace("    w = v\n", ""), 5, 4),
        ("\nprint('another cell')\n", 4, None),
        ("", 4, None),
    ],
)
def test_a_line_of_a_cell_is_found_in_its_new_version(
    after: str, line: int, now: int | None
) -> None:
    assert moved(CELL, line, after) == now


def test_files_of_one_name_are_shown_with_their_folders() -> None:
    known = names_of(["/a/x/util.py", "/a/y/util.py", "/a/train.py", "cell 3"])
    assert list(known.values()) == ["x/util.py", "y/util.py", "train.py", "cell 3"]
