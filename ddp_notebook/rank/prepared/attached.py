"""The runtime in a prepared rank, from its first `init_process_group` on.

A rank that was forked from a process with the runtime has it already: so are those that a script of
`%ddp_run` forks. They are prepared as ranks of other jobs are, with their files in a folder of the
run's, where the session looks. Variables tell a process that is not forked to prepare
itself when it imports torch.

It observes and answers a few questions that only read, and does nothing else: no one who asks can
change what it does or have it evaluate anything. It refuses no collective: mismatched ones go to
torch as they would without it. The code that only answers need is loaded in a thread of its own: it
takes as long as all the rest, and beside a main thread that never pauses longer than who asks
waits. It is loaded a second after the start, which it would slow down, or at the first question.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import process, util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.multiprocessing

from ddp_notebook.launch.child import load
from ddp_notebook.model import InitArguments, codec
from ddp_notebook.model.collective_log import SPLITS
from ddp_notebook.rank.component import Lifecycle, Run
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.early import PID_VARIABLE, about
from ddp_notebook.rank.prepared.ending import (
    FIRST,
    note_the_end,
    write_stacks_when_ended,
    write_when_stuck,
)
from ddp_notebook.rank.rank_process import Events, RankProcess
from ddp_notebook.rank.watched import Watched

FACTS = "facts.json"
_ANSWERED = frozenset({"report", "reach", "stack", "run facts"})
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
        time.sleep(1.0)
        self.get_ready()

    def report(self) -> Any:
        """Return the rank's report of itself. Raises KeyError without an answer."""
        return self.answer("report", {})["answer"]


def attach(rank: int, folder: Path) -> None:
    """Observe this process as `rank` and answer at the socket in `folder`."""
    watched = Watched(RankProcess(rank, Events(), folder, folder / "ask", guards=False))
    Lifecycle(watched.components()).attach()
    _begin(watched, folder)


def _begin(watched: Watched, folder: Path) -> None:
    """Answer questions from now on, and leave for later what can then not be asked any more."""
    # The socket comes before anything that may fail, and the handlers after it, in a thread: who
    # asks in the first second waits for them, and the rank does not.
    asked = _Asked(watched)
    questions = ControlSocket(watched.process.questions, asked.answer)
    questions.attach()
    Lifecycle(watched.components()).run_begins(Run(1))  # a prepared process has one run
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


# -- ranks that a script of %ddp_run starts itself -------------------------------------------

_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STARTS = "start_processes"
"""The function that `torch.multiprocessing.spawn` and launchers of other libraries call."""


class Children:
    """The processes that `script`, in this process, starts; `world_size` processes of it run.

    Ranks among them have their files in `folder`.
    """

    def __init__(self, watched: Watched, script: str, world_size: int, folder: Path) -> None:
        self._watched = watched
        self._script = script
        self._alone = world_size == 1
        self._world_size = world_size
        self._folder = folder
        self._pid = os.getpid()
        self._known = -1
        """The process that is known as a rank of a job that the script starts; -1 for none."""
        self.started_none = False
        """It started processes, but as many as it counted: none."""
        self._warned = self._alone
        """There is nothing more to warn of: a script that runs once may start ranks."""

    def expect(self) -> None:
        """Prepare for them, once, before the script begins."""
        if self._alone:
            self._tell()
        self._watched.init_calls.before_call = self._calls
        module = sys.modules.get("torch.multiprocessing.spawn")
        original = getattr(module, _STARTS, None)
        if original is None:
            return

        @functools.wraps(original)
        def starts(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **named: Any) -> Any:
            self.started_none = not nprocs
            if not self._alone and nprocs:
                self._tell()
                self._warn("a process" if nprocs == 1 else f"{nprocs} processes")
            # These processes have to create a store of their own: with the variables that torchrun
            # sets for its ranks, they would wait for a store that was never started.
            os.environ.pop(_AGENTS_STORE, None)
            return original(fn, args, nprocs, *more, **named)

        for place in (module, torch.multiprocessing):
            if isinstance(place, ModuleType) and getattr(place, _STARTS, None) is original:
                setattr(place, _STARTS, starts)

    def _tell(self) -> None:
        """Set the variables by which processes prepare themselves."""
        os.environ["DDP_NOTEBOOK"] = "1"
        os.environ[job_folder.FOLDER_VARIABLE] = str(self._folder)
        if "RANK" in os.environ:
            os.environ[PID_VARIABLE] = str(os.getpid())  # who inherits it is another rank

    def _warn(self, what: str) -> None:
        self._warned = True
        sys.stderr.write(
            f"{self._script} starts {what} by itself, on each of {self._world_size} ranks: if they "
            f"are ranks, that is too many. Run it once: %ddp_run --python {self._script}\n"
        )

    def _calls(self, arguments: InitArguments) -> None:
        """`init_process_group` is called, in this process or in one that was forked from it."""
        if self._known == os.getpid() or arguments.rank is None:
            return
        if os.getpid() != self._pid:
            self._known = os.getpid()
            if not self._warned and arguments.rank == 0:
                self._warn("ranks")
            # It was forked from the script's with the runtime, which goes on in a rank.
            own = about(arguments.rank, arguments.world_size)
            folder = job_folder.make(own, self._folder)
            if folder is not None:
                note_the_end(folder)
                write_stacks_when_ended(folder)
                self._watched.process.becomes(arguments.rank, folder)
                self._watched.observer.open_log()
                self._watched.hooks.count_in_child()
                _begin(self._watched, folder)
        elif self._alone and (arguments.world_size or 1) > 1:
            self._known = os.getpid()
            self._appear_too(arguments.rank, arguments.world_size)

    def _appear_too(self, rank: int, world_size: int | None) -> None:
        """The script's own process is one rank, and those that it starts are the others."""
        own = about(rank, world_size, os.getpid())
        folder = job_folder.make(own, self._folder)
        if folder is not None:
            known = self._watched.process
            known.guards = False  # the others compare nothing before they send it
            # By links, as the files are in use: this process goes on answering and writing where it
            # did.
            (folder / "ask").symlink_to(known.questions)
            (folder / f"ring-{rank}").symlink_to(known.collective_log)
            (folder / SPLITS).symlink_to(known.folder / SPLITS)
