"""Waiting in the notebook's main thread: interrupts are noted, and threads switch quickly.

A KeyboardInterrupt can be raised anywhere: between sending a cell to rank 0 and to rank 1,
or in a callback of the garbage collector, where Python swallows it. So while a cell runs
an interrupt raises nothing; it is noted, and the loop that waits checks for it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_EVERY_S = 0.05
"""How often a waiting loop should check for an interrupt."""
_SWITCH_S = 0.0005

_meanwhile: list[Callable[[], None]] = []


def do_meanwhile(act: Callable[[], None]) -> None:
    """Call `act` whenever a waiting loop of the main thread checks for interrupts.

    It must be quick and raise nothing.
    """
    if act not in _meanwhile:
        _meanwhile.append(act)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Record an interrupt inside the context, not raise it; the value says whether one occurred.

    Only the main thread receives interrupts; in any other thread this changes nothing.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _frame: object) -> None:
        signals.append(number)

    previous = signal.signal(signal.SIGINT, note)

    def interrupted() -> bool:
        for act in _meanwhile:
            act()
        return bool(signals)

    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
        # A context around this one, if there is one, is to know of it, too: what it waits for
        # may have begun a context of its own only to finish something that must not be torn.
        if signals and getattr(previous, "__qualname__", "") == note.__qualname__:
            assert callable(previous)
            previous(signals[-1], None)


@contextmanager
def deferred() -> Iterator[None]:
    """Finish what is inside the context, and raise KeyboardInterrupt only then.

    For changes whose halves must not be seen alone: a process that has ended while its rank is
    called ready, a world size that options have and the record has not.
    """
    with noted() as interrupted:
        yield
    if interrupted():
        raise KeyboardInterrupt


@contextmanager
def quick_switches() -> Iterator[None]:
    """Switch threads every 0.5 ms inside the context: this thread only waits for others.

    By default a thread keeps the GIL for 5 ms while another waits. A message passes through three
    threads, which took half of the time of a short cell. A thread other than the notebook's may
    wait for hours, so it keeps the default.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
