"""Tab completion on the line of a magic: its options, and the values they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from ddp_notebook.magics.parser import HELP, Option, Surroundings
from ddp_notebook.magics.tab.completers import starting_with
from ddp_notebook.magics.verbs import VERBS

_MAGIC_LINE = re.compile(r"^\s*(?:[\w, ]+=\s*)?%%?(?P<name>ddp\w*)\s+(?P<rest>.*)$")
_OPTIONS = {verb.name: (HELP, *verb.options) for verb in VERBS}
_IDENTIFIER = "ddp_notebook"


def complete(line: str, around: Surroundings) -> tuple[str, Sequence[str]] | None:
    """The word at the end of `line`, and its completions.

    None where IPython completes: after another magic, for a file, in a script's own arguments.
    """
    match = _MAGIC_LINE.match(line)
    if match is None or match["name"] not in _OPTIONS:
        return None
    options = _OPTIONS[match["name"]]
    *before, word = re.split(r"\s+", match["rest"])
    option = _awaiting_value(options, before)
    if option is None and word.startswith("-"):
        return word, starting_with(word, _unused(options, before))
    if option is None:
        option = next((option for option in options if option.is_positional), None)
    if option is None or (option.is_positional and option.completer is None):
        return None
    if option.completer is None:
        return word, starting_with(word, option.choices)
    candidates = option.completer(word, around)
    return None if candidates is None else (word, candidates)


def _awaiting_value(options: Sequence[Option], before: Sequence[str]) -> Option | None:
    """The option whose value comes next."""
    last = before[-1] if before else ""
    return next((option for option in options if last in option.names and not option.is_flag), None)


def _unused(options: Sequence[Option], before: Sequence[str]) -> list[str]:
    return [
        name
        for option in options
        for name in option.names
        if name.startswith("--") and not set(option.names) & set(before)
    ]


def offer_completion(shell: Any, surroundings: Callable[[], Surroundings]) -> None:
    """Have `shell` complete the lines of these magics, if it has a completer."""

    @context_matcher(identifier=_IDENTIFIER)
    def matches(context: Any) -> dict[str, Any]:
        line = context.line_with_cursor[: context.cursor_position]
        in_cell = line.lstrip().startswith("%%") and context.cursor_line > 0
        completion = None if in_cell else complete(line, surroundings())
        if completion is None:
            return {"completions": []}
        word, candidates = completion
        return {
            "completions": [SimpleCompletion(text, type="magic") for text in candidates],
            "matched_fragment": word,
            "suppress": bool(candidates),
        }

    withdraw_completion(shell)
    _matchers(shell).append(matches)


def withdraw_completion(shell: Any) -> None:
    """Undo `offer_completion`."""
    matchers = _matchers(shell)
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != _IDENTIFIER]


def _matchers(shell: Any) -> list[Any]:
    """The matchers of the shell's completer; of a shell that has none, a list of no effect."""
    return getattr(getattr(shell, "Completer", None), "custom_matchers", [])
