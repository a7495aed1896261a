"""Finds out what the main thread is doing: it runs, waits for other ranks, is paused, or is idle.

A rank counts as waiting only where it must wait for others: in a function of torch that the
observer or its name tells, for a key of a store, in a loop that asks nothing but others, for its
GPU that hangs in a collective, or for a thread of its own that does one of these. All else (a
sleep, a lock, a queue, a process, a socket) is *busy*, for it may end by itself; only how long it
has stood there is reported (`Stillness`).

Called on the thread that answers questions: nothing here waits for the main thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from ddp_notebook.model import Activity
from ddp_notebook.rank import gpu, torch_private
from ddp_notebook.rank.collectives import observer, works
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.collectives.pause import PauseGate
from ddp_notebook.rank.inspect import frames, store_keys
from ddp_notebook.rank.inspect.frames import UserCode
from ddp_notebook.rank.inspect.polling import Polled, polled
from ddp_notebook.rank.inspect.process import main_cpu_s
from ddp_notebook.rank.main_thread import MainThread

_WAITS_IN_CPP = tuple(
    f"torch.{name}" for name in ("autograd", "nn.parallel", "distributed", "futures", "_")
)
"""Modules of torch's whose C++ may wait for a collective."""
_PYTHONS_THREAD = "_bootstrap"
"""The function of `threading` at the bottom of every Python thread's stack."""
_WITHOUT_WORK = (
    *("ipykernel", "ipyparallel", "zmq", "tornado", "IPython", "traitlets", "ddp_notebook"),
    *("tqdm", "threading", "queue", "selectors", "socket", "asyncio", "concurrent.futures.thread"),
)
"""Modules of threads that run beside the user's code, or that wait for work."""


class Wait(NamedTuple):
    """The call that the main thread waits in; empty if it does not wait for other ranks."""

    inside: str = ""
    """As in a report: collective, key, or the part of setup."""
    record: int | None = None
    """The number of the collective, if it is known which of several it is."""
    key: str = ""
    """The key of a store that it waits for."""
    polls: bool = False
    """It asks in a loop of the user's, which may use the CPU."""
    on_gpu: bool = False
    """It waits through its GPU; the thread may spin."""


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
        # A loop may have come round to the same instruction: so this is asked only of a thread that
        # was not runnable just before.
        frame = sys._current_frames().get(self.thread.ident or 0)
        return frame is not self.frame or _instruction(frame) != self.instruction

    @property
    def stack(self) -> list[FrameType]:
        """Its frames, innermost first, without those that observe a collective."""
        return frames.frames_of(self.frame)


class Stillness:
    """Since when the rank has been at one place without using CPU time.

    It is only known as far as anybody asks. A blocked thread uses no CPU time at all, to the
    nanosecond; one that sleeps and wakes in a loop does. Other threads may work for the main one,
    so the process may use no more than the threads of this package need to answer.
    """

    def __init__(self) -> None:
        self._place: object = None
        self._since_s = self._cpu_s = 0.0

    def look(self, awaited: Awaited) -> float:
        """Return for how many seconds looks have found it there."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        # The id, not the frame: to keep that would keep its variables.
        place = id(awaited.frame), awaited.instruction, main_cpu_s()
        works = cpu_s - self._cpu_s > 0.1 * (now_s - self._since_s)
        if place != self._place or works:
            self._place, self._since_s, self._cpu_s = place, now_s, cpu_s
        return now_s - self._since_s


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
        self._place: object = None
        """Where the main thread was when it was last seen to have moved."""
        self._at_place_since_s = 0.0

    def activity(self, inside: str) -> Activity:
        """Return its activity; `inside` is what it waits in, empty for nothing."""
        main = self._main_thread
        if main.paused_before or main.paused_at or self._gate.at is not None:
            return Activity.HELD
        if inside:
            return Activity.WAITING
        if self._main_thread.running:
            returned = torch_private.function_returned(frames.chain(frames.main_frame()))
            return Activity.IDLE if returned else Activity.BUSY
        return Activity.FAILED if self._main_thread.error else Activity.IDLE

    def awaited(self) -> Awaited:
        """Return the thread that the main thread waits for, through others; itself if for none."""
        # One snapshot of all threads: looks at different moments could chain threads that never
        # waited for each other at once. `has_moved` says whether it still holds.
        current = sys._current_frames()
        thread = threading.main_thread()
        # The longest chain of threads, each waiting for the next, that is followed.
        for _ in range(8):
            stack = frames.frames_of(current.get(thread.ident or 0))
            other = _waits_for_thread(stack, current) or self._held_up_by(thread, stack, current)
            if other is None:
                break
            thread = other
        frame = current.get(thread.ident or 0)
        return Awaited(thread, frame, _instruction(frame))

    def _held_up_by(
        self,
        thread: threading.Thread,
        stack: Sequence[FrameType],
        current: dict[int, FrameType],
    ) -> threading.Thread | None:
        """Return a thread in a collective, if the main thread waits for what such threads bring.

        That is so if it is in a queue or an event without a time limit, or at the end of a script,
        and all threads that could bring what it waits for are in collectives themselves.
        """
        if thread is not threading.main_thread() or not _waits_without_limit(stack):
            return None
        others = [other for other in threading.enumerate() if _is_at_work(other, current)]
        stuck = all(
            self._inside_torch(frames.chain(current.get(other.ident or 0))) for other in others
        )
        return others[0] if others and stuck else None

    def wait(self, awaited: Awaited, runnable: bool) -> Wait:
        """Return what it waits in; `runnable` if it uses the CPU."""
        if self._main_thread.gpu_works:
            number = self._observer.waits_for()
            return Wait() if number is None else Wait("collective", number, on_gpu=True)
        inside = self._main_thread.waiting_in or self._inside_torch(frames.chain(awaited.frame))
        if inside:
            return Wait(inside, observer.record_of(frames.chain(awaited.frame)))
        # The order matters: who is in a function of torch's waits there, even if one of torch's own
        # threads spins meanwhile. Where only C++ is on the stack, a runnable thread may compute.
        record = None if runnable else _record_of_engine(awaited)
        if record is not None:
            return Wait("collective", record)
        asked = polled(awaited.frame, self._user_code) if awaited.is_main else Polled()
        if asked.key:
            return Wait("key", key=asked.key, polls=True)
        if asked.collective and self._observer.waits_for() is not None:
            return Wait("collective", polls=True)
        number = self._hung_on_gpu(awaited)
        if number is not None:
            return Wait("collective", number, on_gpu=True)
        if runnable:
            return Wait()
        key = store_keys.awaited(frames.chain(awaited.frame))
        if key:
            return Wait("key", key=key)
        # In torch's C++ or in ``work.wait()`` while a collective is not done. C++ has no frames of
        # Python's; but it is called from few modules of torch's, and a thread that computes there
        # is runnable.
        if awaited.frame is None or self._observer.waits_for() is None:
            return Wait()
        module = next((str(e.f_globals.get("__name__", "")) for e in awaited.stack), "")
        waits = works.is_asked(awaited.frame) or module.startswith(_WAITS_IN_CPP)
        # Looked at last, and again: a rank that goes on meanwhile is no rank that waits.
        return Wait("collective") if waits and not awaited.has_moved else Wait()

    def _hung_on_gpu(self, awaited: Awaited) -> int | None:
        """Return the number of the collective for which the awaited thread waits through its GPU.

        NCCL's collectives have long returned when the thread waits, in a call that reads a value.
        Nothing in Python tells such a call from one that computes. So all of this must hold: its
        oldest collective is not done and has been the oldest for some time (otherwise the GPU is
        still processing its queue), it stands at one instruction all that time, and what it calls
        there is known to wait for a GPU. The thread may spin.
        """
        if awaited.frame is None or not gpu.in_use():
            return None
        observer, now_s = self._observer, time.monotonic()
        number = observer.waits_for()
        place = id(awaited.frame), awaited.instruction, observer.issued(), number
        if place != self._place:
            self._place, self._at_place_since_s = place, now_s
        # Seconds at one instruction after which a call that may wait for a GPU counts as one that
        # does.
        still = now_s - self._at_place_since_s >= 0.4
        return number if still and number is not None and gpu.may_wait_in(awaited.frame) else None

    def _inside_torch(self, stack: Iterable[FrameType]) -> str:
        """Return the part of setup that these frames are in, by the names of torch's functions.

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


def _instruction(frame: FrameType | None) -> int:
    return -1 if frame is None else frame.f_lasti


def is_ddp_constructor(frame: FrameType) -> bool:
    """True for the frame of ``DistributedDataParallel.__init__``."""
    module = frame.f_globals.get("__name__", "")
    return module == "torch.nn.parallel.distributed" and frame.f_code.co_name == "__init__"


def _record_of_engine(awaited: Awaited) -> int | None:
    """Return the number of the collective that a thread of autograd's engine is in.

    Only if `awaited` waits for the engine. It computes a GPU's part of a backward on a thread of
    its own, which is none of Python's; a hook there calls the collective.
    """
    stack = awaited.stack
    module = str(stack[0].f_globals.get("__name__", "")) if stack else ""
    if not module.startswith("torch.autograd"):
        return None
    # torch starts the engine's threads, so `threading` is not at the bottom of their stacks. For a
    # thread of the user's that is in a collective the backward need not wait.
    for frame in sys._current_frames().values():
        *_, outermost = frames.chain(frame)
        number = observer.record_of(frames.chain(frame))
        if number is not None and outermost.f_code.co_name != _PYTHONS_THREAD:
            return number
    return None


# -- threads that wait for threads, and for processes ----------------------------------------


def _waits_for_thread(
    stack: Sequence[FrameType], current: dict[int, FrameType]
) -> threading.Thread | None:
    """Return the thread whose end or result these frames wait for, without a limit."""
    # Python waits a frame or two below `join` and `result`. Where they are further out, they have
    # called code that runs.
    for frame in stack[:4]:
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where == ("threading", "join"):
            thread = frame.f_locals.get("self")
            limited = frame.f_locals.get("timeout") is not None
            return thread if isinstance(thread, threading.Thread) and not limited else None
        if where == ("concurrent.futures._base", "result"):
            future, limit = frame.f_locals.get("self"), frame.f_locals.get("timeout")
            return _who_computes(future, current) if limit is None else None
    return _who_pins(stack[:4], current)


def _who_pins(stack: Sequence[FrameType], current: dict[int, FrameType]) -> threading.Thread | None:
    """Return the thread that copies the batch that these frames wait for into pinned memory.

    To take such memory may wait for the GPU. None while that thread waits for workers.
    """
    pins = next(filter(None, map(torch_private.pinning_thread, stack)), None)
    at = current.get(pins.ident or 0) if pins is not None else None
    copies = at is not None and at.f_globals.get("__name__") == torch_private.PINS
    return pins if copies else None


def _who_computes(future: object, current: dict[int, FrameType]) -> threading.Thread | None:
    """Return the thread of a pool that computes the result of `future`."""
    for thread in threading.enumerate():
        for frame in frames.chain(current.get(thread.ident or 0)):
            where = frame.f_globals.get("__name__"), frame.f_code.co_name
            if where == ("concurrent.futures.thread", "run"):
                item = frame.f_locals.get("self")
                if getattr(item, "future", None) is future:
                    return thread
    return None


def _waits_without_limit(stack: Sequence[FrameType]) -> bool:
    """Return whether a thread is in a condition, an event or a queue, without a time limit.

    So is the end of a script, where Python waits for the threads that the script has left behind.
    """
    if not stack:
        return False
    where = stack[0].f_globals.get("__name__"), stack[0].f_code.co_name
    limited = stack[0].f_locals.get("timeout", 0) is not None
    return where == ("threading", "_shutdown") or (where == ("threading", "wait") and not limited)


def _is_at_work(thread: threading.Thread, current: dict[int, FrameType]) -> bool:
    """Return whether a thread besides the main one does more than wait for work or for a time."""
    if thread is threading.main_thread():
        return False
    modules = (
        str(frame.f_globals.get("__name__", ""))
        for frame in frames.chain(current.get(thread.ident or 0))
    )
    return isinstance(thread, threading.Timer) or not all(
        name.startswith(_WITHOUT_WORK) for name in modules
    )


def joins_processes(stack: Iterable[FrameType]) -> bool:
    """Return whether these frames wait for the end of processes that the user's code started."""
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _JOINS for frame in stack)


_JOINS = (
    *(("torch.multiprocessing.spawn", "join"), ("multiprocessing.process", "join")),
    *(("subprocess", "wait"), ("subprocess", "communicate")),
)
