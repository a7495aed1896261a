"""The line debugger's verbs: options behind Python text, and what a page may ask for."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.verbs.debug import BREAK, source_of


@pytest.mark.parametrize(
    ("line", "source", "ranks", "up"),
    [
        ("x = 3 --ranks 1", "x = 3", "1", None),
        ("y + 1 --up 2 --ranks 0,2-3", "y + 1", "0,2-3", 2),
        ("a --b", "a --b", None, None),  # Python: a - (-b)
        ("a - -1", "a - -1", None, None),
        ("f('--ranks 1')", "f('--ranks 1')", None, None),
    ],
)
def test_options_behind_the_text_count_as_those_before_it(
    line: str, source: str, ranks: str | None, up: int | None
) -> None:
    args = argparse.Namespace(ranks=None, up=None)
    assert source_of(line.split(" "), args) == source
    assert (args.ranks, args.up) == (ranks, up)


@pytest.mark.parametrize("line", ['7 --if "f()"', "7 --log '{f()}'"])
def test_a_page_cannot_have_code_run_on_ranks(line: str) -> None:
    assert BREAK.button is not None
    with pytest.raises(UsageMistake, match="plain breakpoints"):
        BREAK.button.run(cast(Any, None), BREAK.parser.parse_argstring(line))
