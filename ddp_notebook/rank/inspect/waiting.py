"""What the main thread is doing: it runs, waits in torch or for a key, is paused, or is idle.

Called on the thread that answers questions: nothing here waits for the main thread.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed.rpc as rpc

from ddp_notebook.launch.process_groups import parent
from ddp_notebook.model import Activity, Blocked, Lacks
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives import observer
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.inspect import blocked, frames, store_keys
from ddp_notebook.rank.inspect.frames import IsUsers, UserCode
from ddp_notebook.rank.inspect.polling import (
    Polled,
    event_loop_at_end,
    lines_of_tasks,
    polled,
)
from ddp_notebook.rank.main_thread import MainThread

_WAITS_IN_CPP = ("torch.autograd", "torch.nn.parallel", "torch.distributed", "torch._")
_PYTHONS_THREAD = "_bootstrap"
"""The function of `threading` at the bottom of every Python thread's stack."""
_ENDED_BY_CALLS = (Lacks.LOCK, Lacks.EVENT)
_STILL_S = 0.5
"""Seconds after which a call of another rank that was seen twice at one place is stuck there."""
_MOST_THREADS = 8
"""The longest chain of threads, each waiting for the next, that is followed."""


class Wait(NamedTuple):
    """What the main thread waits in; empty if it does not wait for other ranks."""

    inside: str = ""
    """As in a report: collective, key, or the part of set-up."""
    record: int | None = None
    """The number of the collective, if it is known which of several it is."""
    key: str = ""
    """The key of a store that it waits for."""
    test: str = ""
    """What a loop asks about the key, if more than whether it exists."""
    polls: bool = False
    """It asks in a loop of the user's, which may use the CPU."""


@dataclass(frozen=True)
class Awaited:
    """The thread that determines what the rank waits for: the main thread, or one it waits for."""

    thread: threading.Thread
    frame: FrameType | None
    """Its innermost frame."""
    instruction: int = -1
    """Its position (bytecode offset) in that frame."""

    @property
    def is_main(self) -> bool:
        """True of the main thread."""
        return self.thread is threading.main_thread()

    @property
    def has_moved(self) -> bool:
        """True if it has moved since; then what was seen of it is outdated."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return frame is not self.frame or _instruction(frame) != self.instruction

    @property
    def native_id(self) -> int:
        """The system's thread id; after a fork Python keeps the old one of the main thread."""
        return os.getpid() if self.is_main else self.thread.native_id or 0

    @property
    def stack(self) -> list[FrameType]:
        """Its frames, innermost first, without those that observe a collective."""
        return frames.frames_of(self.frame)


class Waiting:
    """Determines what the main thread is doing."""

    def __init__(
        self, main_thread: MainThread, gate: PauseGate, observer: Observer, user_code: UserCode
    ) -> None:
        self._main_thread = main_thread
        self._gate = gate
        self._observer = observer
        self._user_code = user_code
        self._is_users = user_code.is_users
        self._served_at: dict[int, tuple[tuple[int, int], float]] = {}
        """By thread, where a call of another rank is, and since when it was seen there."""

    def activity(self, inside: str) -> Activity:
        """Its activity; `inside` is what it waits in, empty for nothing."""
        main = self._main_thread
        if main.paused_before or main.paused_at or self._gate.at is not None:
            return Activity.HELD
        if inside:
            return Activity.WAITING
        if self._main_thread.running:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            returned = torch_private.function_returned(frames.chain(frame))
            return Activity.IDLE if returned else Activity.BUSY
        return Activity.FAILED if self._main_thread.error else Activity.IDLE

    def awaited(self) -> Awaited:
        """The thread that the main thread waits for, through others; itself when for none."""
        current = sys._current_frames()
        thread = threading.main_thread()
        for _ in range(_MOST_THREADS):
            frame = current.get(thread.ident or 0)
            stack = frames.frames_of(frame)
            other = _waits_for_thread(stack, current) or self._held_up_by(thread, current)
            if other is None:
                break
            thread = other
        frame = current.get(thread.ident or 0)
        return Awaited(thread, frame, _instruction(frame))

    def _held_up_by(
        self, thread: threading.Thread, current: dict[int, FrameType]
    ) -> threading.Thread | None:
        """A thread in a collective, if the main thread waits without a limit for a Python lock.

        That is so if all threads that could release the lock are in collectives themselves.
        """
        if thread is not threading.main_thread() or not _is_locked(os.getpid()):
            return None
        others = _at_work(current)
        stuck = all(
            self._inside_torch(frames.chain(current.get(other.ident or 0))) for other in others
        )
        return others[0] if others and stuck else None

    def locked(self, awaited: Awaited) -> bool:
        """True if the main thread waits without a limit for a lock that no thread can release.

        Locks in torch do not count: torch's own threads release them.
        """
        if not awaited.is_main or not _is_locked(awaited.native_id):
            return False
        return not _at_work(sys._current_frames()) and not awaited.has_moved

    def blocked(self, awaited: Awaited) -> Blocked | None:
        """What the main thread waits for outside of torch, if none of its threads can bring it.

        A lock on a file only if a process holds it that the same parent started, as it did this.
        """
        stack = frames.frames_of(frames.main_frame())
        if not _is_users_wait(stack, self._is_users):
            return None
        path = blocked.file_lock(os.getpid()) or _polled_lock(stack)
        if path:
            return _behind_lock(path)
        in_rpc = Lacks.SHUTDOWN if _shuts_rpc_down(stack) else _waits_for_answer(stack)
        if in_rpc is not None:
            return self._among_calls(in_rpc)
        others = _at_rest()
        if others is None or awaited.has_moved or _may_be_called():
            return None
        at = tuple(f"its thread {thread.name!r} waits{self._line_of(thread)}" for thread in others)
        found = self._by_itself(stack, at)
        if found is None or not _is_worker():
            return found
        # Another rank may call a function of the user's here.
        return replace(found, lacks=Lacks.REMOTE_CALL) if found.lacks in _ENDED_BY_CALLS else None

    def _among_calls(self, lacks: Lacks) -> Blocked | None:
        """The same of a wait in RPC, if no call of another rank runs here that can go on.

        A call counts as stuck once it was seen twice at one place, some time apart.
        """
        served, now = _served(), time.monotonic()
        before, self._served_at = self._served_at, {}
        for ident, frame in served.items():
            at = id(frame), _instruction(frame)
            since = before[ident][1] if before.get(ident, (None,))[0] == at else now
            self._served_at[ident] = at, since
        if not served:
            return Blocked(lacks)
        stuck = all(map(_waits_in_python, served.values()))
        still = all(now - since >= _STILL_S for _, since in self._served_at.values())
        if not (stuck and still):
            return None
        lines = (self._user_code.describe(frame) for frame in served.values())
        return Blocked(Lacks.OWN_CALLS, threads=tuple(f"a call waits at {at}" for at in lines))

    def _by_itself(self, stack: Sequence[FrameType], threads: tuple[str, ...]) -> Blocked | None:
        """The same, where its other threads all wait for locks."""
        child = _waits_for_child(stack)
        if child:
            return Blocked(Lacks.PIPE, "", child, threads)
        if _is_locked(os.getpid()) and self._observer.waits_for() is None:
            return Blocked(Lacks.LOCK, _library_call(stack, self._is_users), threads=threads)
        if _is_behind_process(stack):
            return Blocked(Lacks.PROCESS_LOCK, threads=threads)
        loop = event_loop_at_end(stack)
        if loop is not None:
            tasks = tuple(lines_of_tasks(loop, self._user_code))
            return Blocked(Lacks.EVENT, threads=(*tasks, *threads))
        path = blocked.fifo(os.getpid())
        alone = path and not blocked.has_children()
        return Blocked(Lacks.FIFO, path, threads=threads) if alone else None

    def _line_of(self, thread: threading.Thread) -> str:
        where = self._user_code.describe(sys._current_frames().get(thread.ident or 0))
        return f" at {where}" if where else ""

    def wait(self, awaited: Awaited, runnable: bool) -> Wait:
        """What it waits in; `runnable` if it uses the CPU."""
        stack = awaited.stack
        inside = self._main_thread.waiting_in or self._inside_torch(frames.chain(awaited.frame))
        if inside:
            return Wait(inside, observer.record_of(frames.chain(awaited.frame)))
        record = _record_of_engine(awaited)
        if record is not None:
            return Wait("collective", record)
        asked = polled(awaited.frame, self._user_code) if awaited.is_main else Polled()
        if asked.key:
            return Wait("key", key=asked.key, test=asked.test, polls=True)
        if asked.collective and self._observer.waits_for() is not None:
            return Wait("collective", polls=True)
        if runnable:
            return Wait()
        key = store_keys.awaited(frames.chain(awaited.frame))
        if key:
            return Wait("key", key=key)
        waits = self._awaits_work(awaited, stack) and not awaited.has_moved
        return Wait("collective") if waits else Wait()

    def _inside_torch(self, stack: Iterable[FrameType]) -> str:
        """The part of set-up that these frames are in, by the names of torch's functions.

        A collective also by the observing method: torch exports functions under several names.
        """
        collective = ""
        for frame in stack:
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if module == "torch.distributed.rendezvous" and name in frames.STORE_FUNCTIONS:
                return "store"
            if module == "torch.distributed.distributed_c10d":
                if name in frames.GROUP_FUNCTIONS:
                    return "process-group"
                if not collective and name in frames.WAITING_IN and name != "init_process_group":
                    collective = "collective"
            elif observer.is_call(frame):
                collective = "collective"
            if is_ddp_constructor(frame):
                return "ddp"
            if self._is_users(frame.f_code.co_filename):
                break
        return collective

    def _awaits_work(self, awaited: Awaited, stack: Sequence[FrameType]) -> bool:
        """True in torch's C++, or in ``work.wait()``, while a collective is not done."""
        if not stack or self._observer.waits_for() is None:
            return False
        in_torch = blocked.in_torch(awaited.native_id)
        if in_torch is not None or not awaited.is_main:
            return bool(in_torch)
        # It sleeps in the driver of a device, say, or the system does not tell: frames have to.
        innermost = stack[0]
        if self._is_users(innermost.f_code.co_filename):
            line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
            return ".wait(" in line
        return str(innermost.f_globals.get("__name__", "")).startswith(_WAITS_IN_CPP)


def _instruction(frame: FrameType | None) -> int:
    return -1 if frame is None else frame.f_lasti


def is_ddp_constructor(frame: FrameType) -> bool:
    """True for the frame of ``DistributedDataParallel.__init__``."""
    module = frame.f_globals.get("__name__", "")
    return module == "torch.nn.parallel.distributed" and frame.f_code.co_name == "__init__"


def _record_of_engine(awaited: Awaited) -> int | None:
    """The number of the collective that a thread of autograd's engine is in, if `awaited` waits.

    The engine computes a GPU's part of a backward on a thread of its own, which is none of
    Python's; a hook there calls the collective.
    """
    stack = awaited.stack
    module = str(stack[0].f_globals.get("__name__", "")) if stack else ""
    if not module.startswith("torch.autograd") or not blocked.in_torch(awaited.native_id):
        return None
    for frame in sys._current_frames().values():
        *_, outermost = frames.chain(frame)
        number = observer.record_of(frames.chain(frame))
        if number is not None and outermost.f_code.co_name != _PYTHONS_THREAD:
            return number
    return None


# -- threads that wait for threads ---------------------------------------------------------


def _waits_for_thread(
    stack: Sequence[FrameType], current: dict[int, FrameType]
) -> threading.Thread | None:
    """The thread that these frames wait for, without a limit: for its end or its result."""
    for frame in stack[:4]:  # the innermost, down to the function of Python's that is called
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where == ("threading", "join"):
            thread = frame.f_locals.get("self")
            limited = frame.f_locals.get("timeout") is not None
            return thread if isinstance(thread, threading.Thread) and not limited else None
        if where == ("concurrent.futures._base", "result"):
            future, limit = frame.f_locals.get("self"), frame.f_locals.get("timeout")
            return _who_computes(future, current) if limit is None else None
    return None


def _is_locked(native_id: int) -> bool:
    """True if a thread waits without a limit for a lock, and not in torch."""
    return blocked.in_torch(native_id) is False and blocked.for_ever(native_id)


def _is_behind_process(stack: Sequence[FrameType]) -> bool:
    """True in ``with lock:`` of a lock of multiprocessing's, where no process can release it.

    Those that this one started have ended; where it was started so itself, others may share it.
    """
    inner = str(stack[0].f_globals.get("__name__", "")) if stack else ""
    own = inner == "multiprocessing.synchronize" and multiprocessing.parent_process() is None
    return (
        own and blocked.for_ever(os.getpid(), shared=True) and not blocked.has_children(living=True)
    )


def _at_rest() -> list[threading.Thread] | None:
    """The other threads, where each waits without a limit for a lock; None if one may go on.

    Without those that run beside the user's code. What has not begun to run between two looks has
    waited all the time, and so did all at one moment.
    """
    current = sys._current_frames()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    if not current.keys() <= threads.keys():
        return None  # one that Python did not start
    main = threading.main_thread()
    others = [
        thread for thread in threads.values() if thread is not main and not _beside(thread, current)
    ]
    ids = [os.getpid(), *(other.native_id or 0 for other in others)]
    before = blocked.times_run(ids)
    rest = all(map(_is_locked, ids[1:])) and blocked.times_run(ids) == before
    return others if rest and -1 not in before else None


def _beside(thread: threading.Thread, current: dict[int, FrameType]) -> bool:
    """True of a thread of this package's or the engine's, or that only draws a progress bar."""
    modules = [
        str(frame.f_globals.get("__name__", ""))
        for frame in frames.chain(current.get(thread.ident or 0))
    ]
    return any(name.startswith(_BESIDE) for name in modules) and all(
        name.startswith(_IDLE) for name in modules
    )


def _behind_lock(path: str) -> Blocked | None:
    """That it waits for the lock on a file, if this process has it, or one of the same parent."""
    pid = blocked.holder(path)
    known = pid == os.getpid() or (pid and parent(pid) == os.getppid())
    name = str(Path(path).readlink()) if path.startswith("/proc/self/") else path
    return Blocked(Lacks.FILE_LOCK, name, pid) if known else None


def is_at_rest() -> bool:
    """True if none of the user's threads besides the main one can go on."""
    return _at_rest() is not None


def _may_be_called() -> bool:
    """True where others can have the user's code run in a process all of whose threads wait.

    A handler of a signal does, if it is not torch's own, as that for workers of a DataLoader.
    """
    handlers = {signal.getsignal(number) for number in signal.valid_signals()}
    for handler in handlers - {signal.default_int_handler}:
        # asyncio.run() has a method of its own, with arguments, called at Ctrl-C.
        module = str(getattr(getattr(handler, "func", handler), "__module__", ""))
        if callable(handler) and not module.startswith(_NO_USERS_HANDLERS):
            return True
    return False


def _is_worker() -> bool:
    """True in a worker of torch's RPC: it runs calls on threads that Python does not know."""
    with contextlib.suppress(Exception):
        rpc.get_worker_info()
        return True
    return False


def _served() -> dict[int, FrameType]:
    """By thread the innermost frames of calls of other ranks: Python did not start these threads.

    One that asks Python for its thread becomes known to it, as a dummy.
    """
    dummy = threading._DummyThread
    known = {t.ident for t in threading.enumerate() if not isinstance(t, dummy)}
    return {ident: f for ident, f in sys._current_frames().items() if ident not in known}


def _waits_in_python(frame: FrameType) -> bool:
    """True of a wait without a limit for an event, a condition or a queue of Python's."""
    of_threading = frame.f_globals.get("__name__") == "threading"
    waits = of_threading and frame.f_code.co_name == "wait"
    return waits and frame.f_locals.get("timeout", 0) is None


def _waits_for_answer(stack: Sequence[FrameType]) -> Lacks | None:
    """`Lacks.ANSWER` in ``rpc_sync``: torch's C++ waits there for what another rank returns."""
    inner = stack[0] if stack else None
    in_sync = (
        inner is not None
        and inner.f_code.co_name == "rpc_sync"
        and inner.f_globals.get("__name__") == "torch.distributed.rpc.api"
    )
    return Lacks.ANSWER if in_sync else None


def _shuts_rpc_down(stack: Sequence[FrameType]) -> bool:
    return any(
        frame.f_code.co_name == "shutdown"
        and frame.f_globals.get("__name__") == "torch.distributed.rpc.api"
        for frame in stack
    )


def _polled_lock(stack: Sequence[FrameType]) -> str:
    """The file whose lock `filelock` asks for again and again, without a limit; empty for none."""
    for frame in stack[:4]:
        names = frame.f_locals
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("filelock") and frame.f_code.co_name == "acquire" and "self" in names:
            limit = names.get("timeout")
            return str(names["self"].lock_file) if limit is None or limit < 0 else ""
    return ""


def _waits_for_child(stack: Sequence[FrameType]) -> int:
    """The pid of a child that waits for this process at a pipe, as the main thread does for it.

    0 for none. While `communicate` runs, it reads what the child writes, and writes to its input.
    """
    for frame in stack[:6]:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") != "subprocess" or name not in ("wait", "communicate"):
            continue
        child, limit = frame.f_locals.get("self"), frame.f_locals.get("timeout")
        talks = name == "communicate"
        ends = (blocked.READ,) if talks else (blocked.READ, blocked.WRITE)
        if limit is not None or not isinstance(child, subprocess.Popen):
            return 0
        alone = not (talks and child.stdin) and not blocked.has_children(child.pid)
        return child.pid if alone and blocked.at_pipe_of_ours(child.pid, ends) else 0
    return 0


def _is_users_wait(stack: Sequence[FrameType], is_users: IsUsers) -> bool:
    """True where code of the user's runs, and it is not this package that waits, called by it.

    The end of a run waits for this package's threads, after the user's code, and `print` may.
    """
    modules = (str(frame.f_globals.get("__name__", "")) for frame in stack)
    waits = next((name for name in modules if not name.startswith(_OF_THREADS)), "")
    return not waits.startswith("ddp_notebook") and any(
        is_users(frame.f_code.co_filename) for frame in stack
    )


def _library_call(stack: Sequence[FrameType], is_users: IsUsers) -> str:
    """What the user called that waits: ``Queue.get()``; empty for a lock itself."""
    inner: FrameType | None = None
    for frame in stack:
        if is_users(frame.f_code.co_filename):
            break
        inner = frame
    if inner is None:
        return ""
    of = type(inner.f_locals["self"]).__name__ + "." if "self" in inner.f_locals else ""
    return f"{of}{inner.f_code.co_name}()"


def _at_work(current: dict[int, FrameType]) -> list[threading.Thread]:
    """The threads besides the main one that do not just wait for work or for a time."""
    return [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and (
            isinstance(thread, threading.Timer)
            or any(
                not str(frame.f_globals.get("__name__", "")).startswith(_IDLE)
                for frame in frames.chain(current.get(thread.ident or 0))
            )
        )
    ]


_BESIDE = (
    "ipykernel",
    "ipyparallel",
    "zmq",
    "tornado",
    "IPython",
    "traitlets",
    "ddp_notebook",
    "tqdm",
)
"""Modules of threads that run beside the user's code."""
_OF_THREADS = ("threading", "queue", "selectors", "socket", "asyncio", "concurrent.futures.thread")
_NO_USERS_HANDLERS = ("signal", "torch.", "asyncio.runners", *_BESIDE)
_IDLE = (*_OF_THREADS, *_BESIDE)
"""Those, and modules of threads that wait for work."""


def _who_computes(future: object, current: dict[int, FrameType]) -> threading.Thread | None:
    """The thread of a pool that computes the result of `future`."""
    for thread in threading.enumerate():
        for frame in frames.chain(current.get(thread.ident or 0)):
            where = frame.f_globals.get("__name__"), frame.f_code.co_name
            if where == ("concurrent.futures.thread", "run"):
                item = frame.f_locals.get("self")
                if getattr(item, "future", None) is future:
                    return thread
    return None
