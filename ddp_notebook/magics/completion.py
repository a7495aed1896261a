"""Tab completion on the line of a magic: options, their values, rank sets, faults, variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from ddp_notebook.bench.ops import OP_NAMES
from ddp_notebook.bench.plan import DTYPE_BYTES, MODES
from ddp_notebook.magics.parsing import PARSERS, parser_of
from ddp_notebook.model import RankState, name_ranks

_MAGIC_LINE = re.compile(r"^\s*(?:[\w, ]+=\s*)?(?P<verb>%%?ddp\w*)\s+(?P<rest>.*)$")
_LISTS = {"op": OP_NAMES, "dtype": tuple(DTYPE_BYTES), "mode": tuple(MODES)}
"""Options that take several of these, with commas between."""
_FILES = ("baseline", "export", "save", "script")
_MOST_RANKS_LISTED = 16
_IDENTIFIER = "ddp_notebook"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What completion may look at: the notebook's own variables, and the ranks."""

    names: Sequence[str] = ()
    ranks: Sequence[RankState] = ()


def complete(line: str, around: Surroundings) -> tuple[str, list[str]] | None:
    """The word at the end of `line`, and what it may become.

    None where it is not for us to say: another magic, a file, a script's own arguments.
    """
    match = _MAGIC_LINE.match(line)
    if match is None or match["verb"].lstrip("%") not in PARSERS:
        return None
    verb = match["verb"].lstrip("%")
    *before, word = re.split(r"\s+", match["rest"])
    option = _option_before(verb, before)
    if option is None and word.startswith("-"):
        return word, _starting(word, _options_left(verb, before))
    values = _values(verb, option, around)
    if values is None:
        return None
    if option in _LISTS:
        done, _, last = word.rpartition(",")
        return word, [f"{done},{each}" if done else each for each in _starting(last, values)]
    return word, _starting(word, values)


def _starting(word: str, candidates: Iterable[str]) -> list[str]:
    return [each for each in candidates if each.startswith(word)]


def _option_before(verb: str, before: Sequence[str]) -> str | None:
    """The option whose value comes next, by its name in the parsed arguments."""
    action = parser_of(verb).options.get(before[-1]) if before else None
    return None if action is None or action.nargs == 0 else str(action.dest)


def _options_left(verb: str, before: Sequence[str]) -> list[str]:
    return [
        name
        for name, action in parser_of(verb).options.items()
        if name.startswith("--") and not set(action.option_strings) & set(before)
    ]


def _values(verb: str, option: str | None, around: Surroundings) -> Iterable[str] | None:
    if option is None:
        return _words_of(verb, around)
    if option in _FILES:
        return None
    if option in _LISTS and verb == "ddp_bench":
        return _LISTS[option]
    if option == "ranks":
        return _rank_sets(around.ranks)
    choices = {action.dest: action.choices for action in parser_of(verb).options.values()}
    return choices.get(option) or ()


def _words_of(verb: str, around: Surroundings) -> Iterable[str] | None:
    """What may stand where no option is: a fault, a variable of the notebook."""
    if verb == "ddp_fault":
        from ddp_notebook.session.tools import fault_lab

        return fault_lab.names()
    if verb == "ddp_push":
        return around.names
    return None


def _rank_sets(ranks: Sequence[RankState]) -> list[str]:
    """The sets one is likely to mean: all, each alone, and those that are in the same state."""
    together: dict[str, list[int]] = {}
    for state in ranks:
        together.setdefault(state.status.value, []).append(state.rank)
    alike = [name_ranks(each).split()[-1] for each in together.values() if len(each) > 1]
    alone = [str(state.rank) for state in ranks[:_MOST_RANKS_LISTED]]
    return list(dict.fromkeys(["all", *alike, *alone]))


def offer_completion(shell: Any, around: Callable[[], Surroundings]) -> None:
    """Have `shell` complete the lines of our magics. Without a completer: nothing."""

    @context_matcher(identifier=_IDENTIFIER)
    def matches(context: Any) -> dict[str, Any]:
        line = context.line_with_cursor[: context.cursor_position]
        in_cell = line.lstrip().startswith("%%") and context.cursor_line > 0
        found = None if in_cell else complete(line, around())
        if found is None:
            return {"completions": []}
        word, candidates = found
        return {
            "completions": [SimpleCompletion(each, type="magic") for each in candidates],
            "matched_fragment": word,
            "suppress": bool(candidates),
        }

    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is not None:
        others = [m for m in matchers if getattr(m, "matcher_identifier", "") != _IDENTIFIER]
        matchers[:] = [*others, matches]
