"""The core of a runtime: what any rank's process can have, with an engine or without.

It imports neither IPython nor ipykernel. An engine's runtime has one (see `runtime.py`), and so
has a process that is a rank by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_notebook.rank import calls
from ddp_notebook.rank.cells.threads import ThreadErrors
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Component, Lifecycle
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.debugger.expressions import Expressions
from ddp_notebook.rank.debugger.not_finite import NotFinite
from ddp_notebook.rank.editor.editor import Editor
from ddp_notebook.rank.inspect import elsewhere, facts
from ddp_notebook.rank.inspect.case import Reporter
from ddp_notebook.rank.inspect.data_workers import DataWorkers
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.reachability import Reachability, Resolver
from ddp_notebook.rank.inspect.stacks import Stacks
from ddp_notebook.rank.inspect.store_keys import StoreKeys
from ddp_notebook.rank.inspect.waiting import Waiting
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.setup.rendezvous import InitCalls
from ddp_notebook.rank.setup.rescue import Rescue
from ddp_notebook.rank.setup.sockets import TorchSockets
from ddp_notebook.rank.setup.subgroups import Subgroups
from ddp_notebook.rank.training.data_parallel import DataParallelTracking
from ddp_notebook.rank.training.facts import RunSummary
from ddp_notebook.rank.training.hooks import TrainingHooks
from ddp_notebook.rank.training.parallel.held import Held
from ddp_notebook.rank.training.replicas import Tracker
from ddp_notebook.rank.training.samplers import Samplers
from ddp_notebook.rank.training.saves import Saves
from ddp_notebook.rank.training.step_marks import StepMarks
from ddp_notebook.rank.training.step_times import StepTimer
from ddp_notebook.rank.variables.global_names import GlobalNames
from ddp_notebook.rank.variables.scopes import Variables


def of_main() -> Mapping[str, Any]:
    """The global variables of a program: those of its `__main__`, which can change."""
    return vars(sys.modules.get("__main__", sys))


def shown_by_python(_: str) -> bool:
    """What ends a thread is shown by Python itself."""
    return False


class RankCore:
    """Observes what this process does as a rank, and answers questions about it.

    `names` are the user's global variables. `show` shows why a thread of the user's ended, unless
    it returns False: then Python does.
    """

    def __init__(
        self,
        process: RankProcess,
        names: GlobalNames | None = None,
        show: Callable[[str], bool] = shown_by_python,
    ) -> None:
        self.process = process
        self.events = process.events
        names = names or GlobalNames(of_main)
        self.main_thread = main_thread = MainThread()
        self.user_code = user_code = UserCode()
        self.call_sites = call_sites = CallSites(user_code)
        self.gate = gate = PauseGate(main_thread)
        self.debugger = Debugger(main_thread, gate, user_code, self.events, names.get)
        self.debugger.breakpoints.never_runs = elsewhere.never_runs
        self.debugger.breakpoints.elsewhere = elsewhere.run_by_workers

        self.editor = Editor(self.debugger, gate, main_thread)

        self.sockets = sockets = TorchSockets()
        self.subgroups = subgroups = Subgroups()
        self.resolver = resolver = Resolver()
        self.reachability = Reachability(resolver, sockets)
        self.init_calls = init_calls = InitCalls(main_thread, sockets, resolver)
        self.rescue = Rescue(main_thread, init_calls, sockets, resolver)

        self.tracker = tracker = Tracker(call_sites)
        self.samplers = samplers = Samplers(call_sites)
        self.data_parallel = parallel = DataParallelTracking(tracker, call_sites)
        self.observer = observer = Observer(process, call_sites, gate, tracker, sockets, subgroups)
        saves = Saves(call_sites, observer.issued)
        self.summary = RunSummary(process, observer, tracker, samplers, parallel, saves, names)
        marks = StepMarks(call_sites)
        self.hooks = TrainingHooks(
            observer, call_sites, tracker, samplers, parallel, saves, self.summary, subgroups, marks
        )
        self.debugger.armed.tell = observer.limits.lift
        self.debugger.watch_values = NotFinite(self.debugger.occurred).watch
        self.step_timer = StepTimer(marks, tracker, observer, process.rank)
        self.thread_errors = ThreadErrors(show, user_code)
        self.data_workers = DataWorkers(process, user_code)

        waiting = Waiting(main_thread, gate, observer, user_code)
        self.stacks = Stacks(process, main_thread, waiting, user_code)
        self.variables = Variables(process, waiting, main_thread, user_code, names)
        self.expressions = Expressions(process.rank, self.debugger, self.variables, names)
        self.held = Held(names)
        self.reporter = self._make_reporter(waiting)
        self.handlers = Handlers()
        self.questions = ControlSocket(process.questions, self.handlers.answer)
        self._answer_questions()

    def lifecycle(self, more: Sequence[Component] = ()) -> Lifecycle:
        """The order in which components are attached and hear of what begins, with `more`.

        What is read while something runs comes before what can make it run. Sockets come last in
        a set-up, when everything of the one before is closed; questions when all are attached.
        """
        return Lifecycle(
            (
                self.main_thread,
                self.thread_errors,
                *more,
                self.gate,
                self.debugger,
                self.editor,
                self.init_calls,
                self.observer,
                self.hooks,
                self.data_workers,
                StoreKeys(),
                self.subgroups,
                self.rescue,
                self.sockets,
                self.questions,
            )
        )

    def doing(self, *, in_run: bool) -> str:
        """What the main thread does, for a sign of life; `in_run` it is in the user's code."""
        self.observer.settle()
        if not in_run:
            return self.main_thread.doing
        if self.main_thread.paused_at:
            return f"paused at {self.main_thread.paused_at}"
        doing = self.user_code.describe_main_thread()
        return doing or self.user_code.describe_task(self.main_thread.task)

    def _make_reporter(self, waiting: Waiting) -> Reporter:
        return Reporter(
            self.process,
            self.main_thread,
            waiting,
            self.observer,
            self.call_sites,
            self.user_code,
            self.init_calls,
            self.sockets,
            self.resolver,
            self.reachability,
            self.data_workers,
            self.thread_errors,
            self.summary,
        )

    def _answer_questions(self) -> None:
        on = self.handlers.on_question
        on(calls.REPORT, lambda _: self.reporter.report())
        on(calls.FREE, lambda _: self.rescue.free())
        on(calls.REACH, lambda to: calls.Reached(self.reachability.of_others(to.targets)))
        on(calls.STACK, self.stacks.stack)
        on(calls.VARIABLES, self.variables.variables)
        on(calls.RUN_FACTS, lambda _: self.summary.facts())
        on(calls.STEP_TIMES, lambda _: self.step_timer.times())
        on(calls.SOFTWARE, lambda _: calls.SoftwareFacts(facts.gather()))
        on(calls.HELD, lambda _: self.held.parameters())
        on(calls.STEP, lambda _: calls.PausedAt(self.gate.step()))
        on(calls.EVALUATE, self.expressions.evaluate)
        on(calls.CHECKSUMS, self.expressions.checksums)
        on(calls.STANDING, self.expressions.standing)
        on(calls.MOVE, self.debugger.move)
        on(calls.EDITOR, self.editor.answer)
        on(calls.SET_BREAKPOINTS, self.debugger.set_breakpoints)
        on(calls.ARM, lambda _: self.debugger.arm())
        on(calls.BREAKPOINTS, lambda _: self.debugger.bounds())
        on(calls.RESUME, lambda _: calls.PausedAt(self.gate.resume()))
