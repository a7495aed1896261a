"""IPython's interactive commands on a rank: exit, quit, the notebook's magics."""

from __future__ import annotations

import builtins
import re
from typing import Any, NoReturn

from IPython.core.autocall import ZMQExitAutocall

from ddp_notebook.rank import engine_private
from ddp_notebook.rank.cells.keyboard import say
from ddp_notebook.rank.component import Component

_NOTEBOOKS_MAGIC = re.compile(r"^\s*(?:[\w, ]+=\s*)?(%%?ddp\w*)", re.MULTILINE)


class Exit(ZMQExitAutocall):  # type: ignore[misc]  # IPython has no type information
    """`exit` and `quit`: they end what runs on this rank, and not the rank."""

    def __call__(self, code: object = None) -> NoReturn:
        """As Python's own."""
        raise SystemExit if code is None else SystemExit(code)

    def __repr__(self) -> str:
        return "Type exit() to end the cell on this rank. To end the ranks: %ddp_shutdown"


class Terminal(Component):
    """Has them do on a rank what they can. `shell` is IPython's."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def attach(self) -> None:
        """Replace exit and quit, and explain the notebook's magics."""
        shell, ours = self._shell, Exit()
        shell.exiter = shell.ask_exit = ours
        for name in ("exit", "quit"):
            shell.user_ns[name] = shell.user_ns_hidden[name] = ours  # %who does not list them
            setattr(builtins, name, ours)
            # IPython hides both while a cell runs, also from modules that the cell calls.
            shell.builtin_trap.auto_builtins.pop(name, None)
        engine_private.do_not_say_how_to_exit()
        show = shell.show_usage_error

        def show_with_hint(error: Any) -> None:
            show(error)
            if match := _NOTEBOOKS_MAGIC.search(shell.history_manager.input_hist_raw[-1]):
                where = "a cell of its own" if match[1] == "%%ddp" else "a cell without %%ddp"
                say(f"{match[1]} belongs to the notebook, not to a rank: type it in {where}")

        shell.show_usage_error = show_with_hint
