"""The debugger of a process that is watched, with its parts, and what it answers."""

from __future__ import annotations

from ddp_notebook.rank import calls, torch_private
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.debugger.elsewhere import Compiled
from ddp_notebook.rank.debugger.expressions import Expressions
from ddp_notebook.rank.debugger.not_finite import NotFinite
from ddp_notebook.rank.inspect.variables import Variables
from ddp_notebook.rank.rank_process import Events
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
        self._expressions = Expressions(watched.process.rank, debugger, variables, names)

    def to(self, handlers: Handlers) -> None:
        """Have `handlers` answer what the session asks of a debugger. Any thread."""
        on, debugger, expressions = handlers.on_question, self.debugger, self._expressions
        on(calls.EVALUATE, expressions.evaluate)
        on(calls.CHECKSUMS, expressions.checksums)
        on(calls.STANDING, expressions.standing)
        on(calls.MOVE, debugger.move)
        on(calls.SET_BREAKPOINTS, debugger.set_breakpoints)
        on(calls.ARM, lambda _: debugger.arm())
        on(calls.BREAKPOINTS, lambda _: debugger.bounds())
