"""The README names every magic and every option, and none that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.magics.parsing import PARSERS
from ddp_notebook.magics.register import DDPMagics

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"^%%?(ddp\w*)(.*)$", re.MULTILINE)


def table_rows() -> Iterator[tuple[str, list[str]]]:
    """The verb that each row of the table belongs to, and what it says to type."""
    table = README.partition("<!-- verbs -->")[2].partition("<!-- /verbs -->")[0]
    verb = ""
    for row in table.strip().splitlines()[2:]:
        typed = CODE.findall(row.split("|")[1])
        if typed[0].startswith("%"):
            verb = typed[0].lstrip("%").split()[0]
        yield verb, typed


def documented() -> dict[str, set[str]]:
    """Verb to options, as the README's table has them."""
    found: dict[str, set[str]] = {}
    for verb, typed in table_rows():
        found.setdefault(verb, set())
        found[verb].update(each.split()[0] for each in typed if each.startswith("-"))
    return found


def existing() -> dict[str, set[str]]:
    """Verb to options, as the parsers have them."""
    return {
        verb: {option for action in make()._actions for option in action.option_strings}
        - {"-h", "--help"}
        for verb, make in PARSERS.items()
    }


def fenced(text: str) -> Iterator[str]:
    """The contents of the fenced blocks."""
    yield from text.split("```")[1::2]


def calls() -> list[tuple[str, str]]:
    """Every line of a fenced block that calls a magic of ours: the verb and its arguments."""
    return [call for block in fenced(README) for call in CALL.findall(block)]


def test_every_magic_has_a_parser_and_the_other_way_round() -> None:
    registered = {*DDPMagics.magics["line"], *DDPMagics.magics["cell"]}
    assert registered == set(PARSERS)


def test_the_table_names_exactly_the_verbs_that_exist() -> None:
    assert set(documented()) == set(PARSERS)


@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_the_table_names_exactly_the_options_of(verb: str) -> None:
    assert documented().get(verb) == existing()[verb]


def test_no_verb_is_named_that_does_not_exist() -> None:
    assert {name for name in re.findall(r"%(ddp\w*)", README) if name != "ddp_"} <= set(PARSERS)


def test_there_are_examples() -> None:
    assert calls()


@pytest.mark.parametrize(("verb", "arguments"), calls())
def test_every_call_in_an_example_can_be_typed(verb: str, arguments: str) -> None:
    PARSERS[verb]().read(arguments)


def test_defaults_in_the_table_are_the_defaults() -> None:
    for verb, typed in table_rows():
        for option, _, value in (each.partition(" ") for each in typed):
            actions = [a for a in PARSERS[verb]()._actions if option in a.option_strings]
            for action in actions:
                if re.fullmatch(r"[\d.]+[KMG]?|auto|env", value) and option != "--ranks":
                    assert str(action.default).removesuffix(".0") == value, f"{verb} {option}"
