"""What this rank knows about its own set-up, gathered when asked; also while main is blocked.

Called on the engine's control thread: nothing here may wait long, or for the main thread.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import linecache
import os
import platform
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.model import (
    Activity,
    Category,
    InitArguments,
    Place,
    Probe,
    RankReport,
    StoreFile,
    codec,
)
from ddp_notebook.model.ddp import Fingerprint
from ddp_notebook.rank import state, torch_private
from ddp_notebook.rank.collectives import call_sites, observer, pause
from ddp_notebook.rank.inspect import data_workers, host, reachability
from ddp_notebook.rank.inspect import frames as where
from ddp_notebook.rank.setup import rendezvous, sockets, store_process
from ddp_notebook.rank.training import ddp, facts

_LOOKS, _BETWEEN_LOOKS_S = 4, 0.004
_WAITS_IN_CPP = ("torch.autograd", "torch.nn.parallel", "torch.distributed", "torch._tensor")
_KEY = re.compile(rb"\w+/\d+//\w+//\d+/(\d+)")


def gather() -> dict[str, Any]:
    """This rank's evidence as JSON."""
    observer.observer.settle()
    runnable = is_runnable()  # before anything here wakes the store's thread
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = where.frames_of(frame)
    inside = waiting_in(frames, runnable)
    call = rendezvous.log
    error = state.current.error
    arguments = call.arguments
    probe, addresses = host.as_main(lambda: _store_and_name(arguments, bool(call.entered)))
    wire: dict[str, Any] = codec.encode(
        RankReport(
            rank=state.current.rank,
            activity=activity_of(inside),
            inside=inside,
            doing=state.current.doing or where.describe(frame),
            entered=call.entered,
            left=call.left,
            initialized=dist.is_initialized(),
            arguments=arguments,
            error_type=error.type if error else "",
            error_text=error.text if error else "",
            error_category=error.category if error else "",
            error_remedy=error.remedy if error else "",
            holder=_holder(error),
            polls_for=_polled_file(frame) if not inside else "",
            workers=data_workers.watch.workers(frames) if not inside else (),
            probe=probe,
            file=_store_file(arguments.path),
            host=call.host or host.host(),
            network=call.network or host.network(),
            versions=versions(),
            addresses=addresses,
            listens=_listens(inside, arguments),
            runnable=runnable,
            main_cpu_s=_main_cpu_s(),
            model=_wrapped_model(frames),
            path=tuple(Place(*each) for each in call_sites.users_path(frame)),
            waits_for=observer.observer.waits_for() if inside else None,
            run=observer.observer.run,
            replicas=facts.counts(),
        )
    )
    return wire


def _holder(error: state.Failure | None) -> str:
    """Who holds the port that this rank could not have."""
    port = rendezvous.log.arguments.master_port
    if error is None or not port:
        return ""
    ours = error.category == Category.PORT_IN_USE
    in_use = ours or re.search("EADDRINUSE|already in use", error.text)  # torch's own words
    return store_process.holder(port) if in_use else ""


def activity_of(inside: str) -> Activity:
    """What the main thread is at; `inside` is the part of set-up that it is in, empty for none."""
    if state.current.held or pause.at is not None:
        return Activity.HELD
    if inside:
        return Activity.WAITING
    if state.current.running:
        return Activity.BUSY
    return Activity.FAILED if state.current.error else Activity.IDLE


def waiting_in(frames: list[FrameType], runnable: bool) -> str:
    """What the main thread waits in, empty for nothing; `runnable` when it uses the CPU."""
    inside = state.current.waiting_in or _inside_of(frames)
    if not inside and not runnable and _awaits_work(frames):
        return "collective"
    return inside


def _inside_of(frames: list[FrameType]) -> str:
    """The part of set-up that these frames are in, by the names of torch's functions."""
    collective = ""
    for frame in frames:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.distributed.rendezvous" and name in torch_private.STORE_FUNCTIONS:
            return "store"
        if module == "torch.distributed.distributed_c10d":
            if name in torch_private.GROUP_FUNCTIONS:
                return "process-group"
            if not collective and name in where.WAITING_IN and name != "init_process_group":
                collective = "collective"
        if module == "torch.nn.parallel.distributed" and name == "__init__":
            return "ddp"
        if where.is_users(frame.f_code.co_filename):
            break
    return collective


def _awaits_work(frames: list[FrameType]) -> bool:
    """True in torch's C++, or in ``work.wait()``, while a collective is not done."""
    if not frames or observer.observer.waits_for() is None:
        return False
    innermost = frames[0]
    if where.is_users(innermost.f_code.co_filename):
        line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
        return ".wait(" in line
    return str(innermost.f_globals.get("__name__", "")).startswith(_WAITS_IN_CPP)


def _wrapped_model(frames: list[FrameType]) -> Fingerprint | None:
    """What the model is made of whose DDP is being constructed on these frames."""
    for frame in frames:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.nn.parallel.distributed" and name == "__init__":
            model = frame.f_locals.get("module")
            if isinstance(model, torch.nn.Module):
                return ddp.contents(model)
    return None


# -- the store, and where others find this rank ------------------------------------------


def _store_and_name(came: InitArguments, entered: bool) -> tuple[Probe, dict[str, tuple[str, ...]]]:
    """Whether the store answers this rank, and what its name means here."""
    probe = reachability.store(came.master_addr, came.master_port) if entered else Probe()
    return probe, reachability.resolved(came.master_addr)


def _listens(inside: str, came: InitArguments) -> tuple[str, ...]:
    """Where the group that is being made listens; a store that this rank hosts left out."""
    if inside != "process-group":
        return ()
    return tuple(each for each in sockets.listening() if not each.endswith(f":{came.master_port}"))


def _store_file(path: str) -> StoreFile:
    """What is in the file of a ``file://`` rendezvous: an address per rank, or more."""
    if not path:
        return StoreFile()
    try:
        data = Path(path).read_bytes()[: 1 << 20]
    except OSError:
        return StoreFile(path)
    keys = Counter((match[0], match[1].decode()) for match in _KEY.finditer(data))
    claims: dict[str, int] = {}
    for (_, rank), count in keys.items():  # a group of its own has keys of its own
        claims[rank] = max(count, claims.get(rank, 0))
    return StoreFile(path, True, claims)


# -- what the user's code waits for ------------------------------------------------------


def _polled_file(frame: FrameType | None) -> str:
    """A file that does not exist and whose coming the user's code awaits in a loop, or ""."""
    while frame is not None and not where.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    source = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    with contextlib.suppress(SyntaxError, ValueError):
        for loop in ast.walk(ast.parse("".join(source))):
            if isinstance(loop, ast.While) and loop.lineno <= frame.f_lineno <= _last(loop):
                for path in _paths_asked_for(loop.test, frame):
                    if path and not Path(path).exists():
                        return path
    return ""


def _last(loop: ast.While) -> int:
    return loop.end_lineno or loop.lineno


def _paths_asked_for(test: ast.expr, frame: FrameType) -> list[str]:
    """The values of ``x`` in each ``exists(x)`` and ``x.exists()`` of a loop's condition."""
    found = []
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name not in ("exists", "isfile", "is_file"):
                continue
            asked: ast.expr | None = node.args[0] if node.args else None
            if asked is None and isinstance(node.func, ast.Attribute):
                asked = node.func.value
            found.append(_value(asked, frame))
    return found


def _value(node: ast.expr | None, frame: FrameType) -> str:
    """The value of a name or a text in `frame`; nothing is called or computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
        return str(value) if isinstance(value, (str, Path)) else ""
    return ""


# -- the process -------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What must be the same on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["ddp_notebook"] = importlib.metadata.version("ddp_notebook")
    return found


def is_runnable() -> bool:
    """True when main, or a thread that Python does not know (one of torch's), wants a CPU.

    A thread that polls, or answers a knock at the store, does so for a moment; one that lacks
    a CPU does so at every look.
    """
    main = threading.main_thread().native_id
    ours = {str(thread.native_id) for thread in threading.enumerate()} - {str(main)}
    wanting: set[str] | None = None
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_LOOKS_S)
        now = _threads_that_run() - ours
        wanting = now if wanting is None else wanting & now
        if not wanting:
            return False
    return True


def _threads_that_run() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if task.read_text().rpartition(")")[2].split()[0] == "R":
                found.add(task.parent.name)
    return found


def _main_cpu_s() -> float:
    """CPU time of the main thread; where it cannot be had, of the process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return time.process_time()
