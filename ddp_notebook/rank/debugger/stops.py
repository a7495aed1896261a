"""A thread that is paused at a line: it evaluates expressions until it is resumed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from ddp_notebook.rank.calls import Move, Moved

_POLL_S = 0.05
"""How often a thread that waits looks whether its run was aborted."""

T = TypeVar("T")


Places = Sequence[tuple[FrameType, int]]
"""Frames of the user's and the line that each is at, the innermost first."""


class Stop:
    """A thread that is paused before a line. `number` counts a rank's stops.

    `over`: the frames that an error has left, when that is why it is paused: there is no next line.
    """

    def __init__(self, number: int, frame: FrameType, why: str, over: Places = ()) -> None:
        self.number = number
        self.frame = frame
        self.line = over[0][1] if over else frame.f_lineno
        self.why = why
        self.over = over
        self.thread = threading.current_thread()
        self.note = ""
        """Who has it meanwhile."""
        self.holder: Callable[[Move], Moved] | None = None
        """What resumes it while another debugger has it; None: nothing but `resume`."""
        self.ordered = False
        """It was ordered to continue, and is about to."""
        self._inbox: queue.SimpleQueue[Move | Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def hold(self, holder: Callable[[Move], Moved]) -> bool:
        """Have `holder` resume it from now on; False where it was ordered to continue already."""
        with self._lock:
            if not self.ordered:
                self.holder = holder
            return not self.ordered

    def order(self, order: Move) -> Callable[[Move], Moved] | None:
        """Resume the thread, unless another debugger has it: then what can. Any other thread."""
        with self._lock:
            if self.holder is None:
                self.resume(order)
            return self.holder

    def resume(self, order: Move) -> None:
        """Resume the thread. From any other thread."""
        self.ordered = True
        self._inbox.put(order)

    def do(self, work: Callable[[], None]) -> None:
        """Have the thread do this while it waits; what it raises ends the wait. Any thread."""
        self._inbox.put(work)

    def ask(self, compute: Callable[[], T], timeout_s: float) -> T:
        """What `compute` gives in the thread that waits. Raises what it raises, TimeoutError."""
        answer: Future[Any] = Future()

        def work() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(compute())
                except Exception as error:  # noqa: BLE001  # raised where it is waited for
                    answer.set_exception(error)

        self._inbox.put(work)
        try:
            result: T = answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise
        return result

    def wait(self, check: Callable[[], None]) -> Move:
        """Wait until the thread is resumed. `check` raises what ends the wait."""
        while True:
            try:
                message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                check()
                continue
            if isinstance(message, Move):
                return message
            message()
