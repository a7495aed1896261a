"""The line debugger's verbs: options behind Python text, and what a page may ask for."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest
from IPython.core.error import UsageError

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.verbs.debug import BREAK, PRINT, source_of
from ddp_notebook.session.tools.looking import check_source


@pytest.mark.parametrize(
    ("line", "source", "ranks", "up"),
    [
        ("x = 3 --ranks 1", "x = 3", "1", None),
        ("y + 1 --up 2 --ranks 0,2-3", "y + 1", "0,2-3", 2),
        ("a --b", "a --b", None, None),  # Python: a - (-b)
        ("a --each", "a --each", None, None),  # no option of this verb
        ("x = 'a' --ranks dp=1", "x = 'a'", "dp=1", None),
        ("a - -1", "a - -1", None, None),
        ("f('--ranks 1')", "f('--ranks 1')", None, None),
    ],
)
def test_options_behind_the_text_count_as_those_before_it(
    line: str, source: str, ranks: str | None, up: int | None
) -> None:
    args = argparse.Namespace(ranks=None, up=None)
    assert source_of(line, args) == source
    assert (args.ranks, args.up) == (ranks, up)


@pytest.mark.parametrize(
    ("line", "source", "ranks", "each"),
    [
        ('config["lr"]', 'config["lr"]', None, False),
        ("--ranks 0,2 f'{a  }' + \"it's\"", "f'{a  }' + \"it's\"", "0,2", False),
        ("--each --ranks=1 'a  b'", "'a  b'", "1", True),
        ("-x", "-x", None, False),
        ("--up 1 --x", "--x", None, False),
        ("$HOME \\ {a}", "$HOME \\ {a}", None, False),
        ("x --each", "x", None, True),
        ("", "", None, False),
    ],
)
def test_python_text_is_taken_as_it_was_typed(
    line: str, source: str, ranks: str | None, each: bool
) -> None:
    args = PRINT.parser.read(line)
    assert source_of(args.expression, args) == source
    assert (args.ranks, args.each) == (ranks, each)


def test_a_mistyped_option_before_python_text_is_told() -> None:
    with pytest.raises(UsageError, match="Did you mean: %ddp_print --ranks"):
        PRINT.parser.read("--rnaks 1 loss")
    assert PRINT.parser.read("--rank 1 loss").expression == "loss"


@pytest.mark.parametrize(
    ("source", "assign", "said"),
    [
        ("", True, "The assignment is missing. For example: %ddp_set x = 3"),
        (" ", False, "The expression is missing. For example: %ddp_print loss.item()"),
        ("x = 3", False, r"'x = 3' is not a valid expression.* To assign: %ddp_set x = 3"),
        (
            "a +",
            False,
            r"'a \+' is not a valid expression, such as loss.item\(\) \(invalid syntax\)\.$",
        ),
        ("a", True, "'a' is not a valid assignment, such as x = 3."),
        ("3 = 4", True, "'3 = 4' is not a valid assignment"),
    ],
)
def test_what_is_no_expression_is_said_with_what_to_type(
    source: str, assign: bool, said: str
) -> None:
    with pytest.raises(UsageMistake, match=said):
        check_source(source, assign=assign)


@pytest.mark.parametrize("line", ['7 --if "f()"', "7 --log '{f()}'"])
def test_a_page_cannot_have_code_run_on_ranks(line: str) -> None:
    assert BREAK.button is not None
    with pytest.raises(UsageMistake, match="plain breakpoints"):
        BREAK.button.run(cast(Any, None), BREAK.parser.parse_argstring(line))
