"""What a rank answers about itself; whoever asks cannot change what it does."""

from __future__ import annotations

from ddp_notebook.rank import calls
from ddp_notebook.rank.control import Handlers
from ddp_notebook.rank.inspect import facts
from ddp_notebook.rank.inspect.case import Reporter
from ddp_notebook.rank.inspect.stacks import Stacks
from ddp_notebook.rank.inspect.waiting import Waiting
from ddp_notebook.rank.setup.reachability import Reachability
from ddp_notebook.rank.variables.scopes import Variables
from ddp_notebook.rank.watched import Watched


class Answers:
    """Answers from what is watched, on the thread that asks."""

    def __init__(self, watched: Watched) -> None:
        process, main_thread, user_code = watched.process, watched.main_thread, watched.user_code
        waiting = Waiting(main_thread, watched.gate, watched.observer, user_code)
        self.reachability = Reachability(watched.resolver, watched.sockets)
        self.variables = Variables(process, waiting, main_thread, user_code, watched.names)
        self._summary = watched.summary
        self._stacks = Stacks(process, main_thread, waiting, user_code)
        self._reporter = Reporter(watched, waiting, self.reachability)

    def to(self, handlers: Handlers) -> Handlers:
        """`handlers`, through which all of it is answered."""
        on = handlers.on_question
        on(calls.REPORT, lambda _: self._reporter.report())
        on(calls.STACK, self._stacks.stack)
        on(calls.VARIABLES, self.variables.variables)
        on(calls.RUN_FACTS, lambda _: self._summary.facts())
        on(calls.SOFTWARE, lambda _: calls.SoftwareFacts(facts.gather()))
        return handlers
