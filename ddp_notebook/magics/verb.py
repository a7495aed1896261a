"""A verb as a value: everything about one magic. `verbs/` has them all."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ddp_notebook.magics.parser import Option, Parser
from ddp_notebook.magics.ui import CallerUi, NotebookUi


@dataclass(frozen=True)
class VerbButton:
    """How a button of the live board runs a verb: the verb's own code, its value as text.

    `moves_ranks`: only one such button at a time, or they would work against each other.
    """

    run: Callable[[CallerUi, argparse.Namespace], Any]
    as_text: Callable[[Any], str]
    moves_ranks: bool = False


@dataclass(frozen=True)
class ValueDisplay:
    """How IPython shows a verb's value, if `views` does not know its type."""

    value_type: type
    show: Callable[[NotebookUi, Any], None]


@dataclass(frozen=True, eq=False)
class Verb:
    """One magic: its texts, its options, what it does.

    `about` is sentences, the first of them a summary. `examples` are calls and what each is for;
    errors end with the first. `run` gets the parsed arguments, with `line` and `cell` as they were
    typed, without a cell None; it returns the value of the magic, and raises UsageMistake
    for a user's mistake. `is_python`: braces and dollars in its line are Python's, so IPython does
    not replace them by variables of the notebook.
    """

    name: str
    about: str
    examples: tuple[tuple[str, str], ...]
    run: Callable[[NotebookUi, argparse.Namespace], Any]
    options: tuple[Option, ...] = ()
    kind: Literal["line", "line_cell"] = "line"
    button: VerbButton | None = None
    value_display: ValueDisplay | None = None
    is_python: bool = False

    @property
    def magic(self) -> str:
        """Its name as it is typed."""
        return f"%%{self.name}" if self.kind == "line_cell" else f"%{self.name}"

    @property
    def summary(self) -> str:
        """Its effect, in a sentence."""
        return self.about.partition(". ")[0].removesuffix(".") + "."

    @cached_property
    def parser(self) -> Parser:
        """The parser of its line, cached: making it takes as long as a short cell."""
        return Parser(self.magic, self.about, self.examples, self.options)

    def help_page(self) -> str:
        """Return the page that `-h` and IPython's ``?`` show."""
        return str(self.parser.format_help())
