"""Answers Tab, Shift-Tab and `obj?` about this rank's variables, with IPython's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from IPython.core.completer import provisionalcompleter, rectify_completions

from ddp_notebook.rank import engine_private
from ddp_notebook.rank.calls import CodeToComplete, Completions, Inspection, NameToInspect
from ddp_notebook.rank.component import Component


class Names(Component):
    """Asks the shell on this rank. On the main thread, while nothing else runs there."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def attach(self) -> None:
        """Have `obj?` print: a rank has no pager. And have Tab take no second for Jedi."""

        def show(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
            # What goes to a pager: a text, or a MIME bundle with one.
            text = data.get("text/plain", "") if isinstance(data, Mapping) else data
            print("\n".join(str(text).splitlines()[start:]))  # noqa: T201  # the cell's output

        self._shell.set_hook("show_in_pager", show, priority=0)
        self._shell.Completer.use_jedi = False
        engine_private.complete_inside(torch.nn.Module)  # it looks into three dicts

    def complete(self, cursor: CodeToComplete) -> Completions:
        """Return IPython's completions. It evaluates no property and calls no function for it."""
        code, at = cursor.code, cursor.at
        with provisionalcompleter():
            found = self._shell.Completer.completions(code, at)
            # The most completions that are sent.
            completions = list(rectify_completions(code, found))[:500]
        start = completions[0].start if completions else at
        return Completions(
            start, tuple((completion.text, completion.type or "") for completion in completions)
        )

    def inspect(self, named: NameToInspect) -> Inspection:
        """Return IPython's description of the object, or nothing."""
        try:
            bundle = self._shell.object_inspect_mime(named.name, named.detail, set(named.leave_out))
        except KeyError:
            return Inspection()
        return Inspection({kind: text for kind, text in bundle.items() if isinstance(text, str)})
