"""Additions to IPython's answers: the verb that was meant, values, and %debug."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from ddp_notebook.errors import CellFailed, DDPError, Stuck
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.model import Status
from ddp_notebook.rank.calls import NameToInspect
from ddp_notebook.session.guards import CODE_FROM_SET_UP

if TYPE_CHECKING:
    from collections.abc import Callable

_MAGIC_OF = {verb.name: verb.magic for verb in VERBS}
_CALLS = re.compile(r"^\s*(?:[\w, ]+=\s*)?%%?([\w-]+)", re.MULTILINE)
_EMPTY = re.compile(r"\s*%%ddp\b[^\n]*\s*")
"""A cell for the ranks without its code; IPython would suggest a line magic, which has no cell."""
_BELOW = re.compile(r"\s*(?!\s|%%)[^\n]*\n(?:[^\n]*\n)*?\s*(%%ddp)\b")
"""A cell whose %%ddp has something above it that is no magic of cells."""
_REPLACED = ("show_usage_error", "debugger")
"""The methods of a shell that are replaced while the extension is loaded."""
_SHOW = "_ddp_notebook_show"
"""The attribute of a shell that shows the value of a verb in the middle of a cell."""


def unknown_magic(cell: str, known: Callable[[str], bool]) -> str:
    """The message for a cell that calls one of these magics by a wrong name; empty if none does.

    `known` returns true for the names of all existing magics.
    """
    for name in _CALLS.findall(cell):
        if known(name):
            continue
        # What may be a misspelling of a verb; the prefix would make all of them similar.
        word = name.replace("-", "_").lower()
        prefix = "ddp_" if word.startswith("ddp_") else ""
        stems = [verb.removeprefix(prefix) for verb in _MAGIC_OF if verb.startswith(prefix)]
        if near := difflib.get_close_matches(word.removeprefix(prefix), stems, 2):
            return f"Did you mean {' or '.join(_MAGIC_OF[prefix + stem] for stem in near)}?"
        if name.startswith("ddp_"):
            return f"There are {', '.join(_MAGIC_OF.values())}"
    if _BELOW.match(cell):
        return "%%ddp belongs on the first line of its cell: not even a comment may be above it."
    return ""


def after(error: Exception, ended: frozenset[int]) -> str:
    """Say what to type instead of `%debug` after `error`; `ended` are ranks without a process."""
    first = "There is nothing for a debugger in the notebook: "
    if isinstance(error, Stuck):
        return (
            f"{first}ranks wait. The frames of all ranks: %ddp_frame, and then %ddp_print "
            "EXPRESSION; with variables: %ddp_where --locals"
        )
    if not isinstance(error, CellFailed):
        return f"{first}{error}"
    raised = [rank for rank in error.ranks if rank not in ended]
    if not raised:
        return f"{first}the ranks that failed have ended. What they wrote last: %ddp_output"
    return (
        f"{first}the error was raised on rank {raised[0]}. The frames that it left, of all ranks "
        "at once: %ddp_frame, and then %ddp_print EXPRESSION. Or run a cell there:\n"
        f"%%ddp --ranks {raised[0]}\n%debug"
    )


class ShowsValues(ast.NodeTransformer):
    """Has each verb show its value, also above the cell's last line and in its loops.

    IPython shows the value of the last line only, so that of two verbs in a cell the first one
    would seem to have done nothing.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """A cell. IPython shows its last line, or all of its lines."""
        # IPython shows the value of the last expression itself, or with "all" every one: those are
        # left alone, or they would be shown twice.
        shown = len(node.body) if self._shell.ast_node_interactivity == "all" else 1
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and statement in node.body[-shown:]):
                self.visit(statement)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """An expression whose value would be lost."""
        match node.value:
            # IPython's transformer has turned `%ddp_why` into
            # `get_ipython().run_line_magic("ddp_why", "")` before this sees the tree.
            case ast.Call(ast.Attribute(shell, "run_line_magic"), [ast.Constant(name), _]):
                if name in _MAGIC_OF:
                    node.value = ast.Call(ast.Attribute(shell, _SHOW, ast.Load()), [node.value], [])
                    ast.fix_missing_locations(node)
        return node


class Hints:
    """Adds these messages in a notebook's shell, until it is withdrawn."""

    def __init__(self, ui: NotebookUi) -> None:
        self._ui = ui
        self._shell = ui.shell
        self._show_usage_error = self._shell.show_usage_error
        self._debugger = self._shell.debugger
        self._cell = ""
        """The source of the cell that runs, or ran last."""
        self._shell.events.register("pre_run_cell", self._remember)
        self._shell.events.register("post_run_cell", self._on_end)
        self._shell.show_usage_error, self._shell.debugger = self._on_usage_error, self._on_debug
        self._values = ShowsValues(self._shell)
        self._shell.ast_transformers.append(self._values)
        setattr(self._shell, _SHOW, self._show)

    def withdraw(self) -> None:
        """Restore IPython's own messages."""
        self._shell.events.unregister("pre_run_cell", self._remember)
        self._shell.events.unregister("post_run_cell", self._on_end)
        if self._values in self._shell.ast_transformers:  # IPython removes one that fails
            self._shell.ast_transformers.remove(self._values)
        for name in (*_REPLACED, _SHOW):
            vars(self._shell).pop(name, None)

    def _remember(self, info: Any) -> None:
        self._cell = str(info.raw_cell)

    def _on_end(self, result: Any) -> None:
        """Say so if a cell uses a variable that only the ranks have, or is a program for ranks."""
        error = result.error_in_exec
        spawns = type(error).__module__ == "torch.multiprocessing.spawn"
        unset = "environment variable RANK expected" in str(error)
        if (spawns or unset) and not isinstance(error, DDPError):
            self._ui.say(
                "This cell ran in the notebook, which is no rank and starts none. Write %%ddp on "
                "its first line, and call what is to run on each rank, as main(rank, world_size). "
                "Or put the program into a file: %ddp_run train.py, or %ddp_run --python train.py "
                "if it starts its ranks itself"
            )
        name = error.name if isinstance(error, NameError) else None
        inspection = self._ui.session.values.describe(NameToInspect(name)) if name else None
        if inspection is not None and inspection.bundle:
            pull = "" if name in CODE_FROM_SET_UP else f", or get it: %ddp_pull {name}"
            self._ui.say(
                f"{name} is a variable of the ranks, not of the notebook. Write %%ddp on the first "
                f"line of the cell{pull}"
            )

    def _on_usage_error(self, error: Any) -> None:
        if _EMPTY.fullmatch(self._cell):
            error = "The cell is empty: write what the ranks are to run below %%ddp. Help: %ddp -h"
        line, cell = self._shell.find_line_magic, self._shell.find_cell_magic
        if hint := unknown_magic(self._cell, lambda name: bool(line(name) or cell(name))):
            error = f"{error} {hint}"
        self._show_usage_error(error)

    def _show(self, value: object) -> None:
        if value is not None:
            data, metadata = self._shell.display_formatter.format(value)
            if data:  # else it has shown itself
                self._shell.display_pub.publish(data=data, metadata=metadata)

    def _on_debug(self, force: bool = False) -> None:
        # `%debug` looks at the last error of the notebook. Ours was raised on a rank, and its
        # frames in the notebook are of this package alone, which would only confuse.
        error = getattr(sys, "last_value", None)
        if not isinstance(error, DDPError | UsageError):
            self._debugger(force)
        elif force or self._shell.call_pdb:
            states = self._ui.session.record.snapshot.ranks
            ended = frozenset(state.rank for state in states if state.status is Status.DEAD)
            self._ui.say(after(error, ended))
