"""The components that any rank's process has from its first `init_process_group` on, asked or not.

A rank of an external job has no more than this until it is asked: so this imports little, and
whatever only an answer needs (`inspect/answers.py`) is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ddp_notebook.rank.cells.threads import ThreadErrors
from ddp_notebook.rank.cells.warning_places import WarningPlaces
from ddp_notebook.rank.collectives.call_sites import CallSites
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.inspect.data_workers import DataWorkers
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.global_names import GlobalNames
from ddp_notebook.rank.inspect.paths_changed import PathsChanged
from ddp_notebook.rank.inspect.store_keys import StoreKeys
from ddp_notebook.rank.main_thread import MainThread
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.setup.own_stores import OwnStores
from ddp_notebook.rank.setup.reachability import Resolver
from ddp_notebook.rank.setup.rendezvous import InitCalls
from ddp_notebook.rank.setup.sockets import TorchSockets
from ddp_notebook.rank.setup.subgroups import Subgroups
from ddp_notebook.rank.training.facts import RunSummary
from ddp_notebook.rank.training.fsdp_private import Sharded
from ddp_notebook.rank.training.hooks import TrainingHooks
from ddp_notebook.rank.training.inputs import Samplers
from ddp_notebook.rank.training.pipelines import Pipelines
from ddp_notebook.rank.training.step_marks import StepMarks
from ddp_notebook.rank.training.tracker import Tracker


def shown_by_python(_: str) -> bool:
    """Python itself shows the error that ends a thread."""
    return False


class Watched:
    """This process as a rank, as far as it is watched while it goes on.

    `names` are the user's global variables, by default those of `__main__`. `show` shows why a
    thread of the user's ended, unless it returns False: then Python does.
    """

    def __init__(
        self,
        process: RankProcess,
        names: GlobalNames | None = None,
        show: Callable[[str], bool] = shown_by_python,
    ) -> None:
        self.process = process
        self.names = names = names or GlobalNames(lambda: vars(sys.modules.get("__main__", sys)))
        self.main_thread = main_thread = MainThread()
        self.user_code = user_code = UserCode()
        self.call_sites = call_sites = CallSites(user_code)
        self.gate = gate = PauseGate(main_thread)

        self.sockets = sockets = TorchSockets()
        self.subgroups = subgroups = Subgroups()
        self.resolver = resolver = Resolver()
        self.init_calls = InitCalls(main_thread, sockets, resolver)
        self.own_stores = OwnStores(main_thread, self.init_calls, sockets)

        self.tracker = tracker = Tracker(call_sites)
        self.samplers = samplers = Samplers(call_sites)
        self.observer = observer = Observer(process, call_sites, gate, sockets, subgroups)
        self.sharded, self.pipelines = Sharded(), Pipelines()
        observer.on_new_kind += [self.sharded.see, self.pipelines.see, tracker.split.see]
        self.summary = RunSummary(process, observer, tracker, samplers, self.sharded, names)
        self.marks = marks = StepMarks(call_sites)
        self.pipelines.found = marks.end
        self.hooks = TrainingHooks(
            observer, call_sites, tracker, samplers, self.summary, subgroups, marks
        )
        self.thread_errors = ThreadErrors(show, user_code)
        self.data_workers = DataWorkers(process, user_code)
        self.store_keys = StoreKeys()
        self.paths_changed = PathsChanged()

    def components(
        self, early: Sequence[Component] = (), stops: Sequence[Component] = ()
    ) -> tuple[Component, ...]:
        """The order in which components are attached and hear of what begins, with other ones.

        What is read while something runs comes before what can make it run: `early` before the
        gate, `stops` after it. Sockets come last in a setup, when everything of the one before is
        closed.
        """
        return (
            self.main_thread,
            self.thread_errors,
            WarningPlaces(),
            *early,
            self.gate,
            *stops,
            self.init_calls,
            self.own_stores,
            self.observer,
            self.sharded,
            self.pipelines,
            self.hooks,
            self.data_workers,
            self.store_keys,
            self.paths_changed,
            self.subgroups,
            self.sockets,
        )
