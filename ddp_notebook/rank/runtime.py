"""The runtime of an engine: the core of a rank, and what runs cells on it.

`RankRuntime` makes the components and hands each what it needs; none finds another by itself.
The calls of the session are in `calls.py`; `call` is where such a call arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython.core.getipython import get_ipython

from ddp_notebook.launch.child import end_by_sigterm
from ddp_notebook.model import OutputKind
from ddp_notebook.rank import boot, calls
from ddp_notebook.rank.bench.collectives import CollectivesBench
from ddp_notebook.rank.bench.steps import StepsBench
from ddp_notebook.rank.boot import EngineProcess
from ddp_notebook.rank.cells import values
from ddp_notebook.rank.cells.ending import Ending
from ddp_notebook.rank.cells.keyboard import Keyboard, LostInterrupts
from ddp_notebook.rank.cells.names import Names
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.cells.raised import frames_of, shown
from ddp_notebook.rank.cells.runner import CellRunner
from ddp_notebook.rank.cells.shell import RankShell
from ddp_notebook.rank.cells.terminal import Terminal
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.orders import Orders
from ddp_notebook.rank.setup.pasted import PastedProgram
from ddp_notebook.rank.setup.stages import SetUp
from ddp_notebook.rank.training.ddp_stage import DDPConstruction


class RankRuntime:
    """Everything of ours in an engine's process. `shell` is IPython's."""

    def __init__(self, engine: EngineProcess, shell: Any) -> None:
        process = engine.process
        self.events = events = engine.events
        self.forwarder = forwarder = OutputForwarder(
            events, {engine.log: OutputKind.STDOUT}, process.folder
        )
        names = GlobalNames(lambda: shell.user_ns, getattr(shell, "user_ns_hidden", {}))
        self.core = core = RankCore(process, names, self._show)
        user_code = core.user_code
        construction = DDPConstruction(events, core.main_thread)
        bench = CollectivesBench(events, core.observer)
        steps_bench = StepsBench(events, core.observer, core.hooks)
        self.shell = RankShell(shell, forwarder, user_code, core.debugger)
        self.names = Names(shell)
        orders = Orders(core.handlers.carry_out)
        core.questions.take_orders = orders.take
        self.life = core.lifecycle(
            (
                forwarder,
                self.shell,
                LostInterrupts(forwarder),
                Keyboard(user_code, core.debugger),
                Terminal(shell),
                PastedProgram(core.init_calls),
                self.names,
                orders,
            )
        )
        ending = Ending(core, events, forwarder)
        self.runner = CellRunner(
            self.life, self.shell, events, core.main_thread, ending, core.observer
        )
        self.set_up = SetUp(self.life, events, core, self._verified)
        core.handlers.on_order(calls.RUN_CELL, self.runner.run)
        core.handlers.on_order(calls.START_CELL, self.runner.start)
        on = core.handlers.on_call
        on(calls.BRING_UP, self.set_up.bring_up)
        on(calls.PREPARE, self.set_up.prepare)
        on(calls.ADVANCE, self.set_up.advance)
        on(calls.GET_VALUE, lambda of: values.get(of, shell.user_ns))
        on(calls.COMPLETE, self.names.complete)
        on(calls.INSPECT, self.names.inspect)
        on(calls.DESCRIBE, construction.describe)
        on(calls.COMPARE, construction.compare)
        on(calls.VERIFY, construction.verify)
        on(calls.BROADCAST, construction.broadcast)
        on(calls.PLAN_BUCKETS, construction.plan_buckets)
        on(calls.CONSTRUCT, construction.construct)
        on(calls.ASSIGN, construction.assign)
        on(calls.REDUCTION, construction.reduction)
        on(calls.BENCH_FACTS, bench.facts)
        on(calls.BENCH, bench.run)
        on(calls.PREPARE_STEPS, steps_bench.prepare)
        on(calls.MEASURE_STEPS, steps_bench.measure)
        on(calls.FORGET_STEPS, steps_bench.forget)

    def attach(self) -> None:
        """Put everything where it belongs in IPython, torch and the event sender. Once."""
        self.life.attach()

        def pulse() -> dict[str, Any]:
            cell = self.forwarder.cell
            doing = self.core.doing(in_run=cell != 0)
            return {"doing": doing, "cell": cell, "withheld_bytes": self.forwarder.withheld_bytes}

        # After everything is attached: from now on the sender's thread calls both.
        self.events.collect, self.events.pulse = self.forwarder.collect, pulse
        end_by_sigterm()  # by the engine's own handler it would end later, "with code 1"

    def is_of_user(self, error: BaseException) -> bool:
        """Return True when a line of the user's code raised it, or called what did."""
        return bool(frames_of(error, self.core.user_code))

    def _show(self, text: str) -> bool:
        """Show why a thread of the user's ended, if that is in a run, and not in a fork."""
        forwarder = self.forwarder
        if not forwarder.cell or forwarder.forked:
            return False
        forwarder.show(what=OutputKind.ERROR, text=shown(text))
        return True

    def _verified(self, names: Mapping[str, Any]) -> None:
        """A setup has passed all stages: DDP objects that are left go on with the new group."""
        self.core.hooks.reattach()
        self.shell.publish(names)


_runtime: RankRuntime | None = None


def current() -> RankRuntime:
    """This rank's runtime, made and attached on first use. Raises RuntimeError off a rank."""
    global _runtime
    if _runtime is None:
        # Only within a call, on the main thread: the engine's loop runs by then, and `Orders` needs
        # it.
        _runtime = RankRuntime(boot.engine(), get_ipython())
        _runtime.attach()
    return _runtime


def is_of_user(error: BaseException) -> bool:
    """Return True when the user's code raised it; none of it has run before there is a runtime."""
    return _runtime is not None and _runtime.is_of_user(error)


def wake() -> None:
    """Have this rank read orders: as any call does."""
    current()


def call(name: str, request: Any) -> Any:
    """Answer a call of the session's: every one arrives here."""
    return current().core.handlers.call(name, request)
