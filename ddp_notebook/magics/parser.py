"""The options of a verb, and the parser of its line: bad input ends with a call that works."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.utils.process import arg_split

from ddp_notebook.model import DASHES, RankState


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts for Tab completion: the notebook's variables, and the state of the ranks."""

    variables: Sequence[str] = ()
    ranks: Sequence[RankState] = ()


_WORD = re.compile(r"\s*(\S+)")
_LIKE_AN_OPTION = re.compile(r"--[a-z][a-z-]+(=.*)?")
"""Python text that begins like this is a mistyped option."""

_ABOUT_OPTION = re.compile(r"argument (\S+): ")
_ARGPARSE_MISSES = "the following arguments are required: "
_STRAIGHT = str.maketrans(dict.fromkeys("“”„‟«»″", '"') | dict.fromkeys("‘’‚‛′", "'"))
_LONG_DASH = re.compile(rf"(?<!\S)[{DASHES}]+(?=[a-z][a-z-])")
"""Quotes and dashes as they are pasted from pages and text processors."""

Completer = Callable[[str, Surroundings], Sequence[str] | None]
"""The completions of the word typed so far. None leaves it to IPython, which completes files."""


class Option:
    """An option of a verb, or an argument of it.

    `typed` is how it is typed: "-n --world-size N" with a placeholder for its value, "--json" for a
    flag, "script" for a positional argument. Without a `default` it is False for a flag, the first
    of `choices`, None with a `type`, or else an empty string. Values have the default's type.
    `completer` completes them on Tab; without one Tab offers the choices. `is_text`: the text after
    the options, with its quotes, as it was typed. `more` is for `argparse.add_argument`.
    """

    def __init__(
        self,
        typed: str,
        help: str,
        *,
        default: Any = ...,
        choices: Sequence[str] = (),
        completer: Completer | None = None,
        is_text: bool = False,
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
            text = next(iter(choices), None if "type" in more else "")
            self.default = False if self.is_flag else text
        self.attribute = more.get("dest", self.names[-1].lstrip("-").replace("-", "_"))
        """Its name in the parsed arguments."""
        self.help = help
        if self.default not in (None, False, "", []) and "default" not in help:
            self.help += f" (default {str(self.default).removesuffix('.0')})"
        self.completer = completer
        self.is_text = is_text
        self._more = more

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add it to `parser`."""
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
    """argparse's formatter, but a % in a text is a %: the texts name many magics."""

    def _expand_help(self, action: argparse.Action) -> str:
        return action.help or ""


class Parser(MagicArgumentParser):  # type: ignore[misc]  # IPython has no type information
    """argparse for the line of a magic. Errors end with the first of `examples`."""

    def __init__(
        self, magic: str, about: str, examples: Sequence[tuple[str, str]], options: Sequence[Option]
    ) -> None:
        width = max(len(call) for call, _ in examples)
        calls = [f"  {call:<{width}}  {purpose}" for call, purpose in examples]
        super().__init__(
            prog=magic,
            description="\n".join([textwrap.fill(about, 79), "", "examples:", *calls]),
            add_help=False,
            formatter_class=_HelpFormatter,  # IPython's own writes reStructuredText
        )
        self._calls = [call for call, _ in examples]
        self._options = options
        for option in (HELP, *options):
            option.add_to(self)

    def error(self, message: str) -> NoReturn:
        """Raises a UsageError that says what is wrong and what to type."""
        # A call with the option that the message is about, if one has it; else the first.
        about = _ABOUT_OPTION.match(message)
        names = about[1].split("/") if about is not None else []
        own = (call for call in self._calls if {*names} & {*call.split()})
        example = next(own, self._calls[0])
        if about is not None:
            message = f"{names[-1]} {message[about.end() :]}"
        message = message.replace(_ARGPARSE_MISSES, f"{self.prog} needs ")
        raise UsageError(f"{message}. For example: {example}   ({self._all_options})")

    # argparse's own words for these three are a programmer's: "invalid int value: 'four'".

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            kind = "a whole number" if action.type is int else "a number"
            raise argparse.ArgumentError(action, f"needs {kind}, not {text!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            *most, last = action.choices
            words = f"is {', '.join(most)} or {last}, not {value!r}"
            raise argparse.ArgumentError(action, words)

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            count: int = super()._match_argument(action, pattern)
        except argparse.ArgumentError:
            raise argparse.ArgumentError(action, "needs a value") from None
        return count

    @property
    def _all_options(self) -> str:
        return f"all options: {self.prog} -h"

    def read(self, line: str) -> argparse.Namespace:
        """The arguments of `line`. Raises UsageError, HelpShown."""
        # Python text, as of %ddp_print, is not split into words: quotes and spaces are its own.
        # Only the options in front of it are parsed.
        text = next((option for option in self._options if option.is_text), None)
        options, source = self._parted(line) if text is not None else (line, "")
        # Quotes are taken off as a shell does; on Windows a backslash is part of a path.
        words = arg_split(options, posix=os.name == "posix", strict=False)
        arguments, unknown = self.parse_known_args(words)
        if text is not None:
            setattr(arguments, text.attribute, source)
        if unknown:
            what = "has no option" if unknown[0][:1] == "-" else "does not take"
            message = f"{self.prog} {what} {' '.join(unknown)}"
            if meant := self._meant(line, unknown):
                message = f"{message}. Did you mean: {self.prog} {meant}"
            elif self.prog.startswith("%%") and unknown[0][:1] != "-":
                message = f"{message}. Code and comments belong on the lines below {self.prog}"
            else:
                self.error(message)
            raise UsageError(f"{message}   ({self._all_options})")
        return arguments

    def _meant(self, line: str, unknown: Sequence[str]) -> str:
        """Return what was meant; empty if that is not clear.

        The line with quotes and dashes as on a keyboard, or the option most like an unknown one.
        """
        # Text that is pasted from a page or a chat often has curly quotes, and one long dash for
        # two short ones.
        straight = _LONG_DASH.sub("--", line.translate(_STRAIGHT))
        if straight != line and not self.parse_known_args(arg_split(straight, strict=False))[1]:
            return straight.strip()
        word, _, value = unknown[0].lstrip("-").partition("=")
        options = {o.names[-1].lstrip("-"): o for o in self._options if not o.is_positional}
        near = difflib.get_close_matches(word.replace("_", "-"), options, 1)
        if not near or unknown[0][:1] != "-":
            return ""
        option = options[near[0]]
        values = [value, *unknown[1:2], option.metavar] if not option.is_flag else []
        return " ".join([option.names[-1], *list(filter(None, values))[:1]])

    def _parted(self, line: str) -> tuple[str, str]:
        """The options at the beginning of a line, and the text after them."""
        takes_value = {
            name: not option.is_flag for option in self._options for name in option.names
        }
        takes_value |= dict.fromkeys(HELP.names, False)
        at = 0
        while (word := _WORD.match(line, at)) is not None:
            name, equals, _ = word[1].partition("=")
            if name not in takes_value and not _LIKE_AN_OPTION.fullmatch(word[1]):
                break
            at = word.end()
            # argparse allows an option to be shortened: --rank is --ranks.
            takes = any(takes_value[full] for full in takes_value if full.startswith(name))
            if takes and not equals and (value := _WORD.match(line, at)):
                at = value.end()
        return line[:at], line[at:].strip()
