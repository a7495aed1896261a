"""Answers for Tab and Shift-Tab: on the line of a magic, and in a `%%ddp` cell.

On a magic's line Tab offers its options, and the values they take. In a cell for ranks a rank
answers about its variables. Only an idle rank is asked. Without one, Tab offers IPython's own
completions, and Shift-Tab nothing: a variable of the notebook with the same name is a different
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.utils.tokenutil import token_at_cursor

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.options import starting_with
from ddp_notebook.magics.parser import HELP, HelpShown, Surroundings
from ddp_notebook.magics.ui import NotebookUi, chosen_ranks
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.magics.verbs.run import CELL
from ddp_notebook.rank.calls import NameToInspect

if TYPE_CHECKING:
    from ddp_notebook.model import Ranks

_MAGIC_LINE = re.compile(r"^\s*(?:[\w, ]+=\s*)?%%?(?P<name>ddp\w*)\s+(?P<rest>.*)$")
_OPTIONS = {verb.name: (HELP, *verb.options) for verb in VERBS}
_LINE_MATCHER = "ddp_notebook"
_CELL_MATCHER = "ddp_notebook.ranks"
_FIRST_LINE = re.compile(r"\s*%%ddp(?P<options>[ \t][^\n]*|)\n")
_WORD = re.compile(r"[^\W\d]\w*")


def complete(line: str, around: Surroundings) -> tuple[str, Sequence[str]] | None:
    """The word at the end of `line`, and its completions.

    None where IPython completes: after another magic, for a file, in a script's own arguments.
    """
    match = _MAGIC_LINE.match(line)
    if match is None or match["name"] not in _OPTIONS:
        return None
    options = _OPTIONS[match["name"]]
    *before, word = re.split(r"\s+", match["rest"])
    last = before[-1] if before else ""
    option = next((o for o in options if last in o.names and not o.is_flag), None)
    if option is None and word.startswith("-"):
        unused = (o.names for o in options if not set(o.names) & set(before))
        names = [name for own in unused for name in own if name.startswith("--")]
        return word, starting_with(word, names)
    if option is None:
        option = next((option for option in options if option.is_positional), None)
    if option is None or (option.is_positional and option.completer is None):
        return None
    if option.completer is None:
        return word, starting_with(word, option.choices)
    candidates = option.completer(word, around)
    return None if candidates is None else (word, candidates)


def offer_completion(shell: Any, surroundings: Callable[[], Surroundings]) -> None:
    """Have `shell` complete the lines of these magics, if it has a completer."""

    @context_matcher(identifier=_LINE_MATCHER)
    def matches(context: Any) -> dict[str, Any]:
        line = context.line_with_cursor[: context.cursor_position]
        # Below its first line a cell magic has code, which is not ours to complete here.
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


def withdraw_completion(shell: Any, identifier: str = _LINE_MATCHER) -> None:
    """Undo `offer_completion`, or what another of our matchers offers."""
    matchers = _matchers(shell)
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != identifier]


def _matchers(shell: Any) -> list[Any]:
    """Return the matchers of the shell's completer; without one, a list of no effect."""
    return getattr(getattr(shell, "Completer", None), "custom_matchers", [])


class RankNames:
    """Lets one shell ask the ranks, until it is withdrawn; without a completer it does nothing."""

    def __init__(self, ui: NotebookUi) -> None:
        self._ui = ui
        self._kernel: Any = getattr(ui.shell, "kernel", None)

        @context_matcher(identifier=_CELL_MATCHER)
        def matches(context: Any) -> dict[str, Any]:
            text = context.full_text
            lines = text.split("\n")[: context.cursor_line]
            at = sum(len(line) + 1 for line in lines) + context.cursor_position
            first = _in_cell(text, at)
            if first is None:
                return {"completions": []}
            code, at = text[first.end() :], at - first.end()
            found = ui.session.values.complete(code, at, self._ranks(first["options"]))
            if found is None or not found.texts:
                return {"completions": []}
            known = [SimpleCompletion(name, type=kind) for name, kind in found.texts]
            names = {name for name, _ in found.texts}
            own = (word for word in _words(code, found.start, at) if word not in names)
            return {
                "completions": [*known, *(SimpleCompletion(w, type="statement") for w in own)],
                "matched_fragment": code[found.start : at],
                "suppress": True,
            }

        _matchers(self._ui.shell).append(matches)
        if self._kernel is not None:
            # IPython has matchers for Tab and nothing like them for Shift-Tab: the kernel's method
            # is the only place. It is set on the object, so that to withdraw it is to delete an
            # attribute.
            self._inspect_elsewhere = self._kernel.do_inspect
            self._kernel.do_inspect = self._inspect

    def withdraw(self) -> None:
        """Undo it."""
        withdraw_completion(self._ui.shell, _CELL_MATCHER)
        if self._kernel is not None:
            vars(self._kernel).pop("do_inspect", None)

    def _inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Collection[str] = ()
    ) -> Any:
        """ipykernel's answer to Shift-Tab; in a cell for ranks, a rank's answer."""
        first = _in_cell(code, cursor_pos)
        if first is None:
            return self._inspect_elsewhere(code, cursor_pos, detail_level, omit_sections)
        name = token_at_cursor(code[first.end() :], cursor_pos - first.end())
        # An answer of the notebook's own would be wrong: `x` there is another variable than `x` on
        # the ranks. So without an answer of a rank nothing is shown.
        inspection = self._ui.session.values.describe(
            NameToInspect(name, detail_level, tuple(omit_sections)), self._ranks(first["options"])
        )
        bundle = dict(inspection.bundle) if inspection is not None else {}
        if not getattr(self._ui.shell, "enable_html_pager", False):
            bundle.pop("text/html", None)
        return {"status": "ok", "data": bundle, "metadata": {}, "found": bool(bundle)}

    def _ranks(self, options: str) -> Ranks | None:
        """The ranks that the cell is for; all if its line is not yet valid."""
        try:
            return chosen_ranks(self._ui.session, CELL.parser.read(options))
        except (UsageError, UsageMistake, HelpShown):
            return None


def _in_cell(text: str, at: int) -> re.Match[str] | None:
    """The first line of a cell for ranks; None where the cursor is on it, or of other cells."""
    first = _FIRST_LINE.match(text)
    return first if first is not None and at >= first.end() else None


def _words(code: str, start: int, at: int) -> list[str]:
    """Words elsewhere in the cell with the same beginning: names that it will define."""
    word = code[start:at]
    if not word.isidentifier() or code[:start].rstrip(" ").endswith("."):
        return []
    others = f"{code[:start]}\n{code[at:]}"
    return sorted({w for w in _WORD.findall(others) if w.startswith(word) and w != word})
