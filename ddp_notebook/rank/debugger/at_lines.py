"""The debugger of a process that is watched, with its parts, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_notebook.rank import calls, torch_private
from ddp_notebook.rank.calls import Question
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.debugger.elsewhere import Compiled
from ddp_notebook.rank.debugger.expressions import Expressions
from ddp_notebook.rank.debugger.not_finite import NotFinite
from ddp_notebook.rank.rank_process import Events
from ddp_notebook.rank.variables.scopes import Variables
from ddp_notebook.rank.watched import Watched


class AtLines:
    """Stops the process at lines, moves it on, and evaluates there. `events` take its stops."""

    def __init__(self, watched: Watched, events: Events, variables: Variables) -> None:
        names = watched.names
        self.debugger = debugger = Debugger(
            watched.main_thread, watched.gate, watched.user_code, events, names.get
        )
        # A thread that is paused in what torch compiles evaluates as any other.
        torch_private.keep_from_compiler(Debugger._stop)
        self.compiled = Compiled(debugger.breakpoints.canonical)
        debugger.watch_lines = self.compiled.watch
        debugger.breakpoints.never_runs = self.compiled.never_runs
        debugger.breakpoints.elsewhere = self.compiled.not_stopped
        debugger.watch_values = NotFinite(debugger.occurred).watch
        rank = watched.process.rank
        expressions = Expressions(rank, debugger, variables, names)
        self._answers: dict[str, Callable[[Any], Any]] = {
            calls.EVALUATE.name: expressions.evaluate,
            calls.CHECKSUMS.name: expressions.checksums,
            calls.STANDING.name: expressions.standing,
            calls.MOVE.name: debugger.move,
            calls.SET_BREAKPOINTS.name: debugger.set_breakpoints,
            calls.ARM.name: lambda _: debugger.arm(),
            calls.BREAKPOINTS.name: lambda _: debugger.bounds(),
        }

    def answer(self, question: Question[Any, Any], request: Any) -> Any:
        """The answer to one of `calls.AT_LINES`. Any thread."""
        return self._answers[question.name](request)
