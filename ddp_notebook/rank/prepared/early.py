"""A prepared rank before init_process_group: its launch parameters, and its main thread's line.

Runs at the end of `import torch`, so that it imports little. The runtime of a rank is attached
when init_process_group is first called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_notebook import files
from ddp_notebook.launch.child import load
from ddp_notebook.rank.control_socket import ControlSocket
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.ending import note_the_end, write_stacks_when_ended
from ddp_notebook.rank.prepared.job_folder import About

PID_VARIABLE = "DDP_NOTEBOOK_RANK_PID"
"""The process that RANK belongs to."""
_CALLED = "init_process_group"
_TOLD = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", job_folder.SLURM_JOB)
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{Path(os.__file__).parent}{os.sep}")
_OURS = f"{Path(__file__).parents[2]}{os.sep}"


@functools.cache  # the entry point may be installed twice
def begin() -> None:
    """Prepare this process: now if it is a rank, else if it becomes one. Once."""
    here = Prepared()
    rank = os.environ.get("RANK", "")
    # Workers of a DataLoader, and what a script starts by subprocess, inherit RANK. The first are
    # known by their parent; for the second the rank leaves its pid in the environment.
    spawned = sys.modules.get("multiprocessing.process")
    is_worker = spawned is not None and spawned.parent_process() is not None
    is_own = os.environ.get(PID_VARIABLE, str(os.getpid())) == str(os.getpid())
    if rank.isascii() and rank.isdigit() and is_own and not is_worker:
        os.environ[PID_VARIABLE] = str(os.getpid())
        here.appear(int(rank))
    here.watch()


def _name(function: Callable[..., None], places: Iterable[object]) -> None:
    """Make it what these modules call."""
    for place in places:
        setattr(place, _CALLED, function)


class Prepared:
    """This process as a rank that can be asked."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._folder: Path | None = None
        self._questions: ControlSocket | None = None
        self._attached = False
        self._rank = -1

    def appear(self, rank: int, world_size: int | None = None) -> None:
        """Register this process, and answer where its main thread is."""
        self._rank, self._folder = rank, job_folder.make(about(rank, world_size))
        if self._folder is not None:
            note_the_end(self._folder)
            write_stacks_when_ended(self._folder)
            self._questions = ControlSocket(self._folder / "ask", self._answer)
            self._questions.attach()

    def watch(self) -> None:
        """Attach the runtime when init_process_group is called, under any name."""
        # This runs at the end of `import torch`, before any code of the user's can have taken the
        # function by its name. A library that torch itself loads may have: a rank that calls it
        # there lacks a record, and nothing else.
        torchs = distributed_c10d.init_process_group

        @functools.wraps(torchs)
        def init_process_group(*args: Any, **options: Any) -> None:
            if not self._attached:
                self._attached = True
                # One call is enough: the runtime sees the later ones. If someone has wrapped ours
                # since, theirs stays in place.
                if distributed_c10d.init_process_group is init_process_group:
                    _name(torchs, places)
                # The user waits in `init_process_group` meanwhile. Whatever fails here, the
                # call goes on below with the user's own arguments.
                collects = gc.isenabled()
                gc.disable()  # with all of torch's objects a collection takes 0.1 s
                try:
                    with contextlib.suppress(Exception):  # the job goes on without us
                        self._attach(inspect.signature(torchs).bind(*args, **options).arguments)
                finally:
                    if collects:
                        gc.enable()
            call = distributed_c10d.init_process_group
            (torchs if call is init_process_group else call)(*args, **options)

        # init_device_mesh calls it by a name of its own.
        places = [distributed_c10d, dist, sys.modules.get("torch.distributed.device_mesh")]
        places = [module for module in places if getattr(module, _CALLED, None) is torchs]
        _name(init_process_group, places)

    def _attach(self, given: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:
            self._folder = self._questions = None  # a fork: it is another rank, if it is one
            self._rank = -1
        if self._rank < 0:
            called = load("ddp_notebook.rank.setup.rendezvous").arguments_of(given)
            self.appear(int(called.rank), called.world_size)
        if self._folder is None:
            return
        # Loaded only now: it takes as long as a good part of torch, and most processes that import
        # torch are no ranks. Until here the few lines below have answered at the same socket.
        attached = load("ddp_notebook.rank.prepared.attached")
        if self._questions is not None:
            self._questions.close()
        attached.attach(self._rank, self._folder)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            threading.Thread(target=job_folder.sweep, name="ddp-sweep", daemon=True).start()

    def _answer(self, question: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """A report of a rank that has not called init_process_group: it runs code of its own."""
        if question != "report":
            return {"error": "it has not called init_process_group yet"}
        # The main thread's lines of the user's code, the outermost first.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        path: list[dict[str, Any]] = []
        while frame is not None and len(path) < 50:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if not file.startswith(("<", _OURS)) and not any(part in file for part in _LIBRARIES):
                function = "" if name == "<module>" else name
                line = {"file": Path(file).name, "line": frame.f_lineno, "function": function}
                path.insert(0, line)
            frame = frame.f_back
        doing = f"{path[-1]['file']}:{path[-1]['line']}" if path else "Python's own code"
        report = {"rank": self._rank, "activity": "busy", "doing": doing, "path": path, "run": 1}
        return {"answer": report}


def about(rank: int, world_size: int | None, launcher: int = 0) -> About:
    """Return the description of this process as `rank`; by default its launcher is looked for."""
    environment = os.environ
    if world_size is None:
        world_size = _number(environment.get("WORLD_SIZE"))
    with contextlib.suppress(OSError):  # not Linux
        launcher = launcher or processes.launcher(os.getpid())
    launcher = launcher or os.getppid()
    return About(
        pid=os.getpid(),
        began=job_folder.began(os.getpid()),
        parent=launcher,
        parent_began=job_folder.began(launcher),
        rank=rank,
        world_size=world_size,
        attempt=_number(environment.get("TORCHELASTIC_RESTART_COUNT")) or 0,
        script=os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else "",  # noqa: PTH100
        folder="" if files.current_folder_is_gone() else str(Path.cwd()),
        host=socket.gethostname(),
        pids=job_folder.namespace(),
        wall_s=time.time(),
        agents_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        told={name: environment[name] for name in _TOLD if name in environment},
    )


def _number(text: str | None) -> int | None:
    """The number that a variable holds; None for anything else."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
