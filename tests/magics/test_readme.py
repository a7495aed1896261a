"""The README names no magic and shows no call that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.magics.verbs import VERBS

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
CALL = re.compile(r"^%%?(ddp\w*)(.*)$", re.MULTILINE)
PARSERS = {verb.name: verb.parser for verb in VERBS}


def fenced(text: str) -> Iterator[str]:
    """The contents of the fenced blocks."""
    yield from text.split("```")[1::2]


def calls() -> list[tuple[str, str]]:
    """Every line of a fenced block that calls a magic of ours: the verb and its arguments."""
    return [call for block in fenced(README) for call in CALL.findall(block)]


def test_no_verb_is_named_that_does_not_exist() -> None:
    assert {name for name in re.findall(r"%(ddp\w*)", README) if name != "ddp_"} <= set(PARSERS)


def test_there_are_examples() -> None:
    assert calls()


@pytest.mark.parametrize(("verb", "arguments"), calls())
def test_every_call_in_an_example_can_be_typed(verb: str, arguments: str) -> None:
    PARSERS[verb].read(arguments)
