"""The core of a runtime: what a rank of a session has, with an engine or without.

It imports neither IPython nor ipykernel. An engine's runtime has one (see `runtime.py`), and so
has a process that is a rank by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_notebook import model
from ddp_notebook.rank import calls, torch_private
from ddp_notebook.rank.component import Component, Lifecycle
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.debugger.elsewhere import Compiled
from ddp_notebook.rank.debugger.expressions import Expressions
from ddp_notebook.rank.debugger.not_finite import NotFinite
from ddp_notebook.rank.inspect.answers import Answers
from ddp_notebook.rank.inspect.frames import main_frame
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.setup.rescue import Rescue
from ddp_notebook.rank.training.held import Held
from ddp_notebook.rank.training.step_times import StepTimer
from ddp_notebook.rank.watched import Watched, shown_by_python

model.load()  # a rank answers on a thread of ours, where nothing is to be imported


class RankCore(Watched):
    """Watches this process as a rank, answers questions about it, and stops it.

    `names` and `show` are as in `Watched`.
    """

    def __init__(
        self,
        process: RankProcess,
        names: GlobalNames | None = None,
        show: Callable[[str], bool] = shown_by_python,
    ) -> None:
        super().__init__(process, names, show)
        self.answers = Answers(self)
        self.debugger = debugger = Debugger(
            self.main_thread, self.gate, self.user_code, process.events, self.names.get
        )
        # A thread that is paused in what torch compiles evaluates as any other.
        torch_private.keep_from_compiler(Debugger._stop)
        self.compiled = Compiled(debugger.breakpoints.canonical)
        debugger.watch_lines = self.compiled.watch
        debugger.breakpoints.never_runs = self.compiled.never_runs
        debugger.breakpoints.elsewhere = self.compiled.not_stopped
        debugger.watch_values = NotFinite(debugger.occurred, self.main_thread).watch
        debugger.armed.tell = self.observer.limits.lift
        expressions = Expressions(process.rank, debugger, self.answers.variables, self.names)
        self.rescue = Rescue(self.main_thread, self.init_calls, self.sockets, self.resolver)
        step_timer = StepTimer(self.marks, self.tracker, self.observer, process.rank)
        held = Held(self.names)
        self.handlers = self.answers.to(Handlers())
        self.questions = ControlSocket(process.questions, self.handlers.answer)
        on = self.handlers.on_question
        on(calls.FREE, lambda _: self.rescue.free())
        on(calls.STEP_TIMES, lambda _: step_timer.times())
        on(calls.LEDGER, lambda _: self.hooks.ledger.report)
        on(calls.HELD, lambda _: held.parameters())
        on(calls.STEP, lambda _: calls.PausedAt(self.gate.step()))
        on(calls.RESUME, lambda _: calls.PausedAt(self.gate.resume()))
        on(calls.EVALUATE, expressions.evaluate)
        on(calls.CHECKSUMS, expressions.checksums)
        on(calls.STANDING, expressions.standing)
        on(calls.MOVE, debugger.move)
        on(calls.SET_BREAKPOINTS, debugger.set_breakpoints)
        on(calls.ARM, lambda _: debugger.arm())
        on(calls.BREAKPOINTS, lambda _: debugger.bounds())

    def lifecycle(self, more: Sequence[Component] = ()) -> Lifecycle:
        """All components in their order, with `more`; questions come when all are attached."""
        stops = self.debugger, self.compiled, self.rescue
        return Lifecycle((*self.components(more, stops), self.questions))

    def doing(self, *, in_run: bool) -> str:
        """Return the main thread's activity; `in_run` it is in the user's code."""
        self.observer.settle()
        if not in_run or self.main_thread.gpu_works:
            return self.main_thread.doing
        if self.main_thread.paused_at:
            return f"paused at {self.main_thread.paused_at}"
        doing = self.user_code.describe(main_frame())
        return doing or self.user_code.describe_task(self.main_thread.task)
