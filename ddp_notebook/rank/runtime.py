"""The runtime: the one owner of all that lives on a rank, and which function answers what.

`RankRuntime` makes the components and hands each what it needs; none finds another by itself.
What the session calls is in `calls.py`; `call` is where such a call arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.getipython import get_ipython

from ddp_notebook.rank import boot, calls, held_modules
from ddp_notebook.rank.bench.collectives_task import CollectivesBench
from ddp_notebook.rank.bench.steps_task import StepsBench
from ddp_notebook.rank.boot import RankProcess
from ddp_notebook.rank.cells import values
from ddp_notebook.rank.cells.keyboard import Keyboard
from ddp_notebook.rank.cells.names import Names
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.cells.runner import CellRunner, LostInterrupts
from ddp_notebook.rank.cells.scripts import ScriptRunner
from ddp_notebook.rank.cells.shell import RankShell
from ddp_notebook.rank.cells.threads import ThreadErrors
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Lifecycle
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.inspect import facts
from ddp_notebook.rank.inspect.case import Reporter
from ddp_notebook.rank.inspect.data_workers import DataWorkers
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.reachability import Reachability, Resolver
from ddp_notebook.rank.inspect.stacks import Stacks
from ddp_notebook.rank.inspect.store_keys import StoreKeys
from ddp_notebook.rank.inspect.waiting import Waiting
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.orders import Orders
from ddp_notebook.rank.setup.connecting import StoreClient
from ddp_notebook.rank.setup.rendezvous import InitCalls
from ddp_notebook.rank.setup.rescue import Rescue
from ddp_notebook.rank.setup.sockets import TorchSockets
from ddp_notebook.rank.setup.stages import SetUp
from ddp_notebook.rank.setup.subgroups import Subgroups
from ddp_notebook.rank.training.data_parallel import DataParallelTracking
from ddp_notebook.rank.training.ddp_stage import DDPConstruction
from ddp_notebook.rank.training.facts import RunSummary
from ddp_notebook.rank.training.hooks import TrainingHooks
from ddp_notebook.rank.training.replicas import Tracker
from ddp_notebook.rank.training.samplers import Samplers
from ddp_notebook.rank.variables.scopes import Variables


class RankRuntime:
    """Everything of ours in a rank's process. `shell` is IPython's."""

    def __init__(self, process: RankProcess, shell: Any) -> None:
        self.process = process
        self.events = process.events
        self.main_thread = main_thread = MainThread()
        self.user_code = user_code = UserCode()
        self.call_sites = call_sites = CallSites(user_code)
        self.gate = gate = PauseGate(main_thread)

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
        self.summary = summary = RunSummary(process, observer, tracker, samplers, parallel)
        self.hooks = hooks = TrainingHooks(
            observer, call_sites, tracker, samplers, parallel, summary, subgroups
        )
        self.ddp_construction = DDPConstruction(self.events)
        self.bench = CollectivesBench(self.events, observer)
        self.steps_bench = StepsBench(self.events, observer, hooks)

        self.forwarder = forwarder = OutputForwarder(self.events, process.log, process.folder)
        self.shell = RankShell(shell, forwarder, user_code)
        self.names = names = Names(shell)
        self.thread_errors = ThreadErrors(forwarder, user_code)
        self.data_workers = DataWorkers(process, user_code)
        self.handlers = Handlers(getattr(shell, "kernel", None))
        self.life = life = Lifecycle(
            # The order in which they are attached and hear of what begins. What is read while
            # something runs comes before what can make it run; sockets come last in a set-up,
            # when everything of the one before is closed.
            (
                main_thread,
                forwarder,
                self.shell,
                self.thread_errors,
                LostInterrupts(forwarder),
                Keyboard(shell, user_code),
                names,
                self.handlers,
                Orders(process.orders, self.handlers.carry_out),
                gate,
                init_calls,
                observer,
                hooks,
                self.data_workers,
                StoreKeys(),
                subgroups,
                self.rescue,
                sockets,
            )
        )
        self.runner = CellRunner(
            life, self.shell, forwarder, self.events, main_thread, hooks, parallel, user_code
        )
        self.scripts = ScriptRunner(process, life, self.runner, user_code)
        self.set_up = self._make_set_up()
        waiting = Waiting(main_thread, gate, observer, user_code)
        self.reporter = self._make_reporter(waiting)
        self.stacks = Stacks(process, main_thread, waiting, user_code, self.runner)
        self.variables = Variables(process, waiting, user_code, self.runner, shell)
        self._answer_calls()
        self._take_orders()
        self._answer_questions()

    def _make_set_up(self) -> SetUp:
        return SetUp(
            self.life,
            self.events,
            self.main_thread,
            self.init_calls,
            StoreClient(self.main_thread, self.resolver),
            self.sockets,
            self.subgroups,
            self._verified,
        )

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

    def attach(self) -> None:
        """Put everything where it belongs in IPython, torch and the event sender. Once."""
        self.life.attach()
        self.events.collect = self.forwarder.collect
        self.events.pulse = self._pulse
        held_modules.hold()

    def _pulse(self) -> dict[str, Any]:
        """The fields of a sign of life."""
        self.observer.settle()
        doing = self.main_thread.doing
        if self.forwarder.cell:
            doing = self.user_code.describe_main_thread()
            doing = doing or self.user_code.describe_task(self.runner.task)
        withheld_bytes = self.forwarder.withheld_bytes
        return {"doing": doing, "cell": self.forwarder.cell, "withheld_bytes": withheld_bytes}

    def _verified(self, names: Mapping[str, Any]) -> None:
        """A set-up has passed all stages: DDP objects that are left go on with the new group."""
        self.hooks.reattach()
        self.shell.publish(names)

    def _answer_calls(self) -> None:
        on = self.handlers.on_call
        on(calls.BRING_UP, self.set_up.bring_up)
        on(calls.PREPARE, self.set_up.prepare)
        on(calls.ADVANCE, self.set_up.advance)
        on(calls.GET_VALUE, values.get)
        on(calls.COMPLETE, self.names.complete)
        on(calls.INSPECT, self.names.inspect)
        construction = self.ddp_construction
        on(calls.DESCRIBE, construction.describe)
        on(calls.COMPARE, construction.compare)
        on(calls.VERIFY, construction.verify)
        on(calls.BROADCAST, construction.broadcast)
        on(calls.PLAN_BUCKETS, construction.plan_buckets)
        on(calls.CONSTRUCT, construction.construct)
        on(calls.ASSIGN, construction.assign)
        on(calls.REDUCTION, construction.reduction)
        on(calls.BENCH_FACTS, self.bench.facts)
        on(calls.BENCH, self.bench.run)
        on(calls.PREPARE_STEPS, self.steps_bench.prepare)
        on(calls.MEASURE_STEPS, self.steps_bench.measure)
        on(calls.FORGET_STEPS, self.steps_bench.forget)

    def _take_orders(self) -> None:
        on = self.handlers.on_order
        on(calls.RUN_CELL, self.runner.run)
        on(calls.START_CELL, self.runner.start)
        on(calls.RUN_SCRIPT, self.scripts.run)

    def _answer_questions(self) -> None:
        on = self.handlers.on_question
        on(calls.REPORT, lambda _: self.reporter.report())
        on(calls.FREE, lambda _: self.rescue.free())
        on(calls.REACH, lambda to: calls.Reached(self.reachability.of_others(to.targets)))
        on(calls.STACK, self.stacks.stack)
        on(calls.VARIABLES, self.variables.variables)
        on(calls.RUN_FACTS, lambda _: self.summary.facts())
        on(calls.SOFTWARE, lambda _: calls.SoftwareFacts(facts.gather()))
        on(calls.STEP, lambda _: calls.PausedAt(self.gate.step()))
        on(calls.RESUME, lambda _: calls.PausedAt(self.gate.resume()))


_runtime: RankRuntime | None = None


def current() -> RankRuntime:
    """This rank's runtime, made and attached on first use. Raises RuntimeError off a rank."""
    global _runtime
    if _runtime is None:
        _runtime = RankRuntime(boot.process(), get_ipython())
        _runtime.attach()
    return _runtime


def wake() -> None:
    """Have this rank read orders: as any call does."""
    current()


def call(name: str, request: Any) -> Any:
    """Answer a call of the session's: every one arrives here."""
    return current().handlers.call(name, request)
