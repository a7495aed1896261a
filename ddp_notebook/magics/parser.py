"""The options of a verb, and the parser of its line: bad input ends with a call that works."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.utils.process import arg_split

from ddp_notebook import files
from ddp_notebook.model import DASHES, RankState


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What Tab completion may look at: the notebook's variables, and the state of the ranks."""

    variables: Sequence[str] = ()
    ranks: Sequence[RankState] = ()


_ELSEWHERE = dict.fromkeys(
    ("ranks", "np", "nproc", "nprocs", "nproc-per-node", "num-processes", "num-ranks", "size"),
    "world-size",
)
"""Options of torchrun, mpirun and others, with the names they have here."""
_RANK_SET = re.compile(rf"all|[{DASHES}\d,]*\d")
_RANK_LIST = re.compile(rf"(--ranks[ =])([\[({{]?\d[{DASHES}\d, ]*\d[\])}}]?)(?=\s|$)")
"""Ranks with blanks between them, or in brackets as in Python."""
_CELL_PLACE = re.compile(r"(?<!\S)cell[ :](\d+)[ :,]+(?:line )?(\d+)")
_FILE_PLACE = re.compile(r"(\S+\.py)[ ,]+(?:line )?(\d+)")
_SIMILAR = 0.6
_WORD = re.compile(r"\s*(\S+)")
_LIKE_AN_OPTION = re.compile(r"--[a-z][a-z-]+(=.*)?")
"""Python text that begins like this is a mistyped option."""

_MOST_WORDS = 12
"""Of the name of a file."""
_BEFORE_UNIT = re.compile(r"(?<=\d)\s+(?=(?:s|ms|min|h|[KMG](?:i?B)?)(?:\s|$))", re.IGNORECASE)
_LONG_DASH = re.compile(rf"(?<!\S)[{DASHES}]+(?=[a-z][a-z-])")
_ABOUT_OPTION = re.compile(r"argument (\S+):")
_WITH_UNIT = re.compile(
    r"argument (--timeout): invalid float value: '(\d+(?:\.\d+)?) *(s|sec|seconds?|m|min|minutes?)'"
)
_STRAIGHT = str.maketrans(dict.fromkeys("“”„‟«»″", '"') | dict.fromkeys("‘’‚‛′", "'"))
"""Quotes as they are pasted from pages and text processors."""

Completer = Callable[[str, Surroundings], Sequence[str] | None]
"""The completions of the word typed so far. None leaves it to IPython, which completes files."""


class Option:
    """An option of a verb, or an argument of it.

    `typed` is how it is typed: "-n --world-size N" with a placeholder for its value, "--json" for a
    flag, "script" for a positional argument. Without a `default` it is False for a flag, the first
    of `choices`, None with a `type`, or else an empty string. Values have the default's type.
    `completer` completes them on Tab; without one Tab offers the choices. `is_text`: the text after
    the options, with its quotes, as it was typed. `is_path`: a file or a folder, whose name may
    have spaces. `more` is for `argparse.add_argument`.
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
        is_path: bool = False,
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
        self.is_text, self.is_path = is_text, is_path
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
        self._calls = [call for call, _ in examples]
        self._options = options
        for option in (HELP, *options):
            option.add_to(self)

    def error(self, message: str) -> NoReturn:
        """Raises a UsageError that says what is wrong and what to type."""
        if (number := _WITH_UNIT.fullmatch(message)) is not None:
            name, digits, minutes = number[1], number[2], number[3].startswith("m")
            seconds = float(digits) * (60 if minutes else 1)
            raise UsageError(
                f"{name} is in seconds, without a unit. Type: {name} {seconds:g}   "
                f"({self._all_options})"
            )
        raise UsageError(
            f"{message}. For example: {self._example(message)}   ({self._all_options})"
        )

    def _example(self, message: str) -> str:
        """A call with the option that `message` is about, if there is one; else the first."""
        about = _ABOUT_OPTION.match(message)
        names = set(about[1].split("/")) if about is not None else set()
        own = (call for call in self._calls if names & set(call.split()))
        return next(own, self._calls[0])

    @property
    def _all_options(self) -> str:
        return f"all options: {self.prog} -h"

    def read(self, line: str) -> argparse.Namespace:
        """The arguments of `line`. Raises UsageError, HelpShown."""
        text = next((option for option in self._options if option.is_text), None)
        options, source = self._parted(line) if text is not None else (line, "")
        # Quotes are taken off as a shell does; on Windows a backslash is part of a path.
        words = arg_split(options, posix=os.name == "posix", strict=False)
        arguments, unknown = self.parse_known_args(words)
        if text is not None:
            setattr(arguments, text.attribute, source)
        if unknown:
            meant = self._meant(line, unknown)
            message = f"unrecognized arguments: {' '.join(unknown)}"
            if not meant and (below := self._below(unknown[0])):
                raise UsageError(f"{message}. {below}   ({self._all_options})")
            if not meant:
                self.error(message)
            raise UsageError(
                f"{message}. Did you mean: {self.prog} {meant}   ({self._all_options})"
            )
        return arguments

    def _below(self, word: str) -> str:
        """Where code and comments belong, if `word` begins such; else empty."""
        if self.prog.startswith("%%"):
            return (
                ""
                if word[:1] == "-"
                else f"Code and comments belong on the lines below {self.prog}"
            )
        return "A comment belongs on a line of its own." if word[:1] == "#" else ""

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
            takes = any(takes_value[full] for full in takes_value if full.startswith(name))
            if takes and not equals and (value := _WORD.match(line, at)):
                at = value.end()
        return line[:at], line[at:].strip()

    def _meant(self, line: str, unknown: Sequence[str]) -> str:
        """What the unknown words may have meant; empty if that is not clear."""
        straight = _LONG_DASH.sub("--", line.translate(_STRAIGHT))
        listed = _RANK_LIST.sub(_as_rank_set, straight)  # --ranks (0, 1)
        joined = _BEFORE_UNIT.sub("", straight)  # --budget 10 s
        place = _CELL_PLACE.sub(r'"cell \1:\2"', _FILE_PLACE.sub(r"\1:\2", straight))
        for likely in (straight, listed, joined, place, self._with_known_name(line)):
            if likely not in (line, "") and self._is_read(likely):
                return likely.strip()
        first, equals, value = unknown[0].strip("(,)").partition("=")  # called as a function
        option, values = self._named(first.strip(DASHES).replace("_", "-")), unknown[1:2]
        if equals:
            values = [value]
        elif option is None:
            option, values = self._taking(first), unknown[:1]
        if option is None:
            return self._with_new_name(line)
        if type(option.default) is int:
            values = list(filter(str.isdecimal, values))
        needed = [] if option.is_flag else [*values, option.metavar][:1]
        return " ".join([option.names[-1], *needed])

    def _is_read(self, line: str) -> bool:
        return not self.parse_known_args(arg_split(line, strict=False))[1]

    def about_spaces(self, line: str) -> str:
        """A sentence to end an error with: which name in `line` needs quotes; empty for none."""
        quoted = self._with_known_name(line)
        return f" A name with spaces needs quotes: {self.prog} {quoted}" if quoted else ""

    def _with_known_name(self, line: str) -> str:
        """The line with quotes around the longest file's name that has spaces; empty for none."""
        if not any(option.is_path for option in self._options):
            return ""
        words = arg_split(line, posix=os.name == "posix", strict=False)
        for count in range(min(len(words), _MOST_WORDS), 1, -1):
            for at in range(len(words) - count + 1):
                name = " ".join(words[at : at + count])
                if files.exists(Path(os.path.expanduser(name))):  # noqa: PTH111  # never raises
                    return _with_name(words, at, count)
        return ""

    def _with_new_name(self, line: str) -> str:
        """The line with all words that are no options as one name, where it takes one alone."""
        words = arg_split(line, posix=os.name == "posix", strict=False)
        plain = [word for word in words if word[:1] != "-"]
        positional = [option for option in self._options if option.is_positional]
        if [option.is_path for option in positional] != [True] or any("#" in w for w in plain):
            return ""
        others = [word for word in words if word[:1] == "-"]
        quoted = _with_name([*plain, *others], 0, len(plain)) if len(plain) > 1 else ""
        return quoted if self._is_read(quoted) else ""

    def _named(self, name: str) -> Option | None:
        """The option that `name` is like, one of torchrun's among them."""
        options = {o.names[-1].lstrip("-"): o for o in self._options if not o.is_positional}
        name = name if name in options else _ELSEWHERE.get(name, name)
        near = [o for o in options if len(name) == 1 and o.startswith(name)]
        near = near or difflib.get_close_matches(name, options, 1, _SIMILAR)
        return options[near[0]] if near else None

    def _taking(self, word: str) -> Option | None:
        """The option that has `word` as a value: ranks, how many there are, one of its choices."""
        options = {option.names[-1]: option for option in self._options}
        if _RANK_SET.fullmatch(word):
            if any(option.is_positional for option in self._options):
                return None  # train.py 42: a line, or an argument of a script
            return options.get("--ranks") or (
                options.get("--world-size") if word.isdecimal() else None
            )
        return next((option for option in self._options if word in option.choices), None)


def _with_name(words: Sequence[str], at: int, count: int) -> str:
    """The words of a line as it is typed, with `count` of them from `at` on as one name."""
    name = " ".join(words[at : at + count])
    quoted = shlex.quote(name) if '"' in name else f'"{name}"'
    return " ".join([*map(_as_typed, words[:at]), quoted, *map(_as_typed, words[at + count :])])


def _as_typed(word: str) -> str:
    return word if _WORD.fullmatch(word) and not {"'", '"'} & {*word} else shlex.quote(word)


def _as_rank_set(match: re.Match[str]) -> str:
    """`--ranks 0,1` for what `_RANK_LIST` has found."""
    return match[1] + ",".join(re.split(r"[,\s]+", match[2].strip("[](){} ")))
