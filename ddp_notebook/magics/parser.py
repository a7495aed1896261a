"""The options of a verb, and the parser of its line: bad input ends with a call that works."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.utils.process import arg_split

from ddp_notebook.model import RankState


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What Tab completion may look at: the notebook's variables, and the state of the ranks."""

    variables: Sequence[str] = ()
    ranks: Sequence[RankState] = ()


Completer = Callable[[str, Surroundings], Sequence[str] | None]
"""What the word typed so far may become. None leaves it to IPython, which completes files."""


class Option:
    """An option of a verb, or an argument of it.

    `typed` is how it is typed: "-n --world-size N" with what stands for its value, "--json" for a
    flag, "script" for an argument that is told by its position. A `default` that is not given is
    False for a flag, the first of `choices`, None with a `type`, or else an empty string. Values
    are of the default's type. `completer` offers them to Tab; without one Tab offers the choices.
    `more` is for `argparse.add_argument`.
    """

    def __init__(
        self,
        typed: str,
        help: str,
        *,
        default: Any = ...,
        choices: Sequence[str] = (),
        completer: Completer | None = None,
        **more: Any,
    ) -> None:
        words = typed.split()
        self.is_positional = not words[0].startswith("-")
        self.names = words if self.is_positional else [w for w in words if w.startswith("-")]
        self.metavar = "".join(words[len(self.names) :])
        self.choices = choices
        self.is_flag = not (self.is_positional or self.metavar or choices)
        self.default = default
        if default is ...:
            text = choices[0] if choices else None if "type" in more else ""
            self.default = False if self.is_flag else text
        self.attribute = more.get("dest", self.names[-1].lstrip("-").replace("-", "_"))
        """Its name in the parsed arguments."""
        self.help = help
        if self.default not in (None, False, "", []) and "default" not in help:
            self.help += f" (default {str(self.default).removesuffix('.0')})"
        self.completer = completer
        self._more = more

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Have `parser` know it."""
        settings: dict[str, Any] = {"help": self.help, "default": self.default, **self._more}
        if self.is_flag:
            settings.setdefault("action", "store_true")
        elif self.choices:
            settings |= {"choices": self.choices, "metavar": self.metavar or None}
        elif not self.is_positional:
            settings["metavar"] = self.metavar
        if type(self.default) in (int, float):
            settings["type"] = type(self.default)
        action = parser.add_argument(*self.names, **settings)
        if action.nargs == argparse.REMAINDER:
            # It may be empty, but argparse would name it when the script before it is missing.
            action.required = False


class HelpShown(Exception):
    """The user asked for help; `str()` of it is the page."""


class _ShowHelp(argparse.Action):
    """Raises HelpShown where -h is an option of ours, not a word of what comes after a script."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise HelpShown(parser.format_help().strip())


HELP = Option("-h --help", "show this help and do nothing", action=_ShowHelp, nargs=0)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, but a % in a text is a %: our texts are full of magics."""

    def _expand_help(self, action: argparse.Action) -> str:
        return action.help or ""


class Parser(MagicArgumentParser):  # type: ignore[misc]  # IPython has no type information
    """argparse for the line of a magic. Errors end with the first of `examples`."""

    def __init__(
        self,
        magic: str,
        about: str,
        examples: Sequence[tuple[str, str]],
        options: Sequence[Option],
    ) -> None:
        width = max(len(call) for call, _ in examples)
        calls = [f"  {call:<{width}}  {purpose}" for call, purpose in examples]
        super().__init__(
            prog=magic,
            description="\n".join([textwrap.fill(about, 79), "", "examples:", *calls]),
            add_help=False,
            formatter_class=_HelpFormatter,  # IPython's own writes reStructuredText
        )
        self.example = examples[0][0]
        for option in (HELP, *options):
            option.add_to(self)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that says what is wrong and what to type."""
        raise UsageError(f"{message}. For example: {self.example}   (all options: {self.prog} -h)")

    def read(self, line: str) -> argparse.Namespace:
        """The arguments of `line`. Raises UsageError, HelpShown."""
        # Quotes are taken off as a shell does; on Windows a backslash is part of a path.
        words = arg_split(line, posix=os.name == "posix", strict=False)
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments
