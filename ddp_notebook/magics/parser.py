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
    """An option or argument of a verb, as `argparse.add_argument` takes it.

    `completer` offers its values to Tab; without one Tab offers `choices`, if there are any.
    """

    def __init__(
        self, *names: str, help: str, completer: Completer | None = None, **settings: Any
    ) -> None:
        self.names = names
        self.help = help
        self.completer = completer
        self.settings = settings

    @property
    def is_positional(self) -> bool:
        """True for an argument that is told by its position."""
        return not self.names[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        """False for a flag."""
        return self.settings.get("action", "store") in ("store", "append")

    @property
    def attribute(self) -> str:
        """Its name in the parsed arguments."""
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        return str(self.settings.get("dest") or long.lstrip("-").replace("-", "_"))

    @property
    def explanation(self) -> str:
        """Its help, with the default where the help does not speak of one."""
        default = self.settings.get("default")
        if default in (None, "", []) or "default" in self.help:
            return self.help
        return (
            f"{self.help} (default {default:g})"
            if isinstance(default, float)
            else (f"{self.help} (default {default})")
        )


class HelpShown(Exception):
    """The user asked for help; `str()` of it is the page."""


class _ShowHelp(argparse.Action):
    """Raises HelpShown where -h is an option of ours, not a word of what comes after a script."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise HelpShown(parser.format_help().strip())


HELP = Option("-h", "--help", action=_ShowHelp, nargs=0, help="show this help and do nothing")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, but a % in a text is a %: our texts are full of magics."""

    def _expand_help(self, action: argparse.Action) -> str:
        return action.help or ""


class Parser(MagicArgumentParser):  # type: ignore[misc]  # IPython has no type information
    """argparse for the line of a magic. `example` is a call that works."""

    def __init__(
        self,
        magic: str,
        example: str,
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
        self.example = example
        for option in (HELP, *options):
            action = self.add_argument(*option.names, help=option.explanation, **option.settings)
            if action.nargs == argparse.REMAINDER:
                # It may be empty, but argparse would name it when the script before it is missing.
                action.required = False

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
