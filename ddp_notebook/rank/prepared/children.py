"""Processes that a script itself starts: those that call init_process_group are ranks as well.

They are prepared as ranks of external jobs are, with their files in a folder of the run's, where
the session looks. A process that is forked has the runtime of the script's process, which becomes
its own; any other one is told by variables, and prepares itself when it imports torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.multiprocessing

from ddp_notebook.model import InitArguments
from ddp_notebook.model.collective_log import SPLITS
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.attached import attach_fork
from ddp_notebook.rank.prepared.early import PID_VARIABLE, about
from ddp_notebook.rank.prepared.ending import note_the_end, write_stacks_when_ended
from ddp_notebook.rank.watched import Watched

_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STARTS = "start_processes"
"""What `torch.multiprocessing.spawn` and the launchers of other libraries call."""


class Children:
    """What `script`, in this process, starts; `world_size` processes of it run.

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
        self._warned = False

    def expect(self) -> None:
        """Prepare for them, once, before the script begins."""
        if self._alone:
            self._tell()
        self._watched.init_calls.before_call = self._calls
        module = sys.modules.get("torch.multiprocessing.spawn")
        original = getattr(module, _STARTS, None)
        if original is None:
            return
        starts = self._starting(original)
        for place in (module, torch.multiprocessing):
            if isinstance(place, ModuleType) and getattr(place, _STARTS, None) is original:
                setattr(place, _STARTS, starts)

    def _tell(self) -> None:
        """Set the variables by which processes prepare themselves."""
        os.environ["DDP_NOTEBOOK"] = "1"
        os.environ[job_folder.FOLDER_VARIABLE] = str(self._folder)
        if "RANK" in os.environ:
            os.environ[PID_VARIABLE] = str(os.getpid())  # who inherits it is another rank

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`start_processes` of torch's, for processes that have to create a store of their own.

        With the variables that torchrun sets for its ranks, they would wait for a store that was
        never started.
        """

        @functools.wraps(original)
        def start_processes(
            fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **named: Any
        ) -> Any:
            if not self._alone:
                self._tell()
                self._warn("a process" if nprocs == 1 else f"{nprocs} processes")
            os.environ.pop(_AGENTS_STORE, None)
            return original(fn, args, nprocs, *more, **named)

        return start_processes

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
            if not self._alone and not self._warned and arguments.rank == 0:
                self._warn("ranks")
            self._attach_fork(arguments.rank, arguments.world_size)
        elif self._alone and (arguments.world_size or 1) > 1:
            self._known = os.getpid()
            self._appear_too(arguments.rank, arguments.world_size)

    def _attach_fork(self, rank: int, world_size: int | None) -> None:
        folder = job_folder.make(about(rank, world_size), self._folder)
        if folder is not None:
            note_the_end(folder)
            write_stacks_when_ended(folder)
            attach_fork(self._watched, rank, folder)

    def _appear_too(self, rank: int, world_size: int | None) -> None:
        """The script's own process is one rank, and those that it starts are the others."""
        own = about(rank, world_size, os.getpid())
        folder = job_folder.make(own, self._folder)
        if folder is not None:
            process = self._watched.process
            process.guards = False  # the others compare nothing before they send it
            (folder / "ask").symlink_to(process.questions)
            (folder / f"ring-{rank}").symlink_to(process.collective_log)
            (folder / SPLITS).symlink_to(process.folder / SPLITS)
