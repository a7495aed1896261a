"""Interrupts of the notebook while ranks run a cell.

A KeyboardInterrupt can be raised anywhere: between sending a cell to rank 0 and to rank 1,
or in a callback of the garbage collector, where Python swallows it. So while a cell runs
an interrupt raises nothing; it is noted, and the loop that waits looks at the note.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_EVERY_S = 0.05
"""How often a waiting loop should look whether there was an interrupt."""

_meanwhile: list[Callable[[], None]] = []


def do_meanwhile(act: Callable[[], None]) -> None:
    """Have `act` done whenever a loop of the main thread that waits for ranks looks for interrupts.

    It must be quick and raise nothing.
    """
    if act not in _meanwhile:
        _meanwhile.append(act)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Within, an interrupt is noted instead of raised; the value tells whether there was one.

    In another thread than the main one there are no interrupts, and nothing changes.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))

    def interrupted() -> bool:
        for act in _meanwhile:
            act()
        return bool(came)

    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
