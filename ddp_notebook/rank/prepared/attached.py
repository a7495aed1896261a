"""The runtime in a prepared rank, from its first `init_process_group` on.

A rank that was forked from a process with the runtime has it already.

It observes and answers a few questions that only read, and does nothing else: no one who asks can
change what it does or have it evaluate anything. It refuses no collective: mismatched ones go to
torch as they would without it. The code that only answers need is loaded in a thread of its own: it
takes as long as all the rest, and beside a main thread that never pauses longer than who asks
waits. It is loaded a second after the start, which it would slow down, or at the first question.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from ddp_notebook.launch.child import load
from ddp_notebook.model import codec
from ddp_notebook.rank.component import Lifecycle, Run
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.ending import FIRST, write_when_stuck
from ddp_notebook.rank.rank_process import NoEvents, RankProcess
from ddp_notebook.rank.watched import Watched

RUN = 1
"""The number of the run: a prepared process has one."""
FACTS = "facts.json"
_READY_AFTER_S = 1.0
_ANSWERED = frozenset({"report", "stack", "run facts"})
"""The questions that `jobs` asks. A rank of a notebook answers more, such as ``evaluate``: none of
these may ever be answered here, where whoever shares the user and the folder can ask."""


class _Asked:
    """Answers questions; creates the handlers once."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._handlers: Any = None
        self._turn = threading.Lock()

    def answer(self, question: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """As `Handlers.answer`."""
        if question not in _ANSWERED:
            return {"error": "it runs on by itself: it can only be asked where it is"}
        self.get_ready()
        answer: dict[str, Any] = self._handlers.answer(question, about)
        return answer

    def get_ready(self) -> None:
        """Load the code that answers."""
        with self._turn:
            if self._handlers is None:
                answers = load("ddp_notebook.rank.inspect.answers").Answers(self._watched)
                self._handlers = answers.to(load("ddp_notebook.rank.control").Handlers())

    def get_ready_later(self) -> None:
        """The same a second later, unless a question was asked before."""
        time.sleep(_READY_AFTER_S)
        self.get_ready()

    def report(self) -> Any:
        """The answer to the question what the rank does. Raises KeyError if there is none."""
        return self.answer("report", {})["answer"]


def attach(rank: int, folder: Path) -> None:
    """Observe this process as `rank` and answer at the socket in `folder`."""
    watched = Watched(RankProcess(rank, NoEvents(), folder, folder / "ask", guards=False))
    Lifecycle(watched.components()).attach()
    _begin(watched, folder)


def attach_fork(watched: Watched, rank: int, folder: Path) -> None:
    """The same in a child that was forked from the process that `watched` watches."""
    watched.process.becomes(rank, folder)
    watched.observer.open_log()
    watched.hooks.count_in_child()
    _begin(watched, folder)


def _begin(watched: Watched, folder: Path) -> None:
    """Answer questions from now on, and leave for later what can then not be asked any more."""
    asked = _Asked(watched)
    questions = ControlSocket(watched.process.questions, asked.answer)
    questions.attach()
    Lifecycle(watched.components()).run_begins(Run(RUN))
    pid = os.getpid()

    def ends() -> None:
        """Write the summary of the training, for later: nothing runs any more."""
        if os.getpid() == pid:
            with contextlib.suppress(Exception):
                watched.observer.settle()
                facts = codec.encode(watched.summary.facts())
                job_folder.write(folder / FACTS, {"facts": facts})

    atexit.register(ends)
    if process.parent_process() is not None:  # one that was forked ends without `atexit`
        util.Finalize(None, ends, exitpriority=FIRST)

    def counts() -> tuple[int, int]:
        log = watched.observer.log
        return (log.written if log is not None else -1), watched.init_calls.calls.returned

    write_when_stuck(counts, asked.report, folder / "report.json")
    threading.Thread(target=asked.get_ready_later, name="ddp-answers", daemon=True).start()
