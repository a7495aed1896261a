"""Holds this rank before each collective, until it is stepped on."""

from __future__ import annotations

import threading

from ddp_notebook.rank import state

on = False
"""True while collectives are held."""
at: int | None = None
"""The number of the collective before which the rank is held; None when it is not."""
_go = threading.Semaphore(0)
_LOOK_EVERY_S = 0.05


class GivenUp(RuntimeError):
    """The rank waited in code of ours, and what it ran was given up."""


def begin(hold: bool) -> None:
    """A cell begins, with its collectives held or not."""
    global on, at, _go
    on, at = hold, None
    _go = threading.Semaphore(0)


def let_go() -> dict[str, int | None]:
    """Let the rank go on to its next collective; before which it was held. From any thread."""
    was = at
    if was is not None:
        _go.release()
    return {"at": was}


def let_go_for_good() -> dict[str, int | None]:
    """Hold the rank no more."""
    global on
    on = False
    return let_go()


def hold(number: int) -> None:
    """Wait before collective `number`. Raises GivenUp, KeyboardInterrupt."""
    global at
    gate = _go
    at = number
    try:
        while not gate.acquire(timeout=_LOOK_EVERY_S):
            if state.current.give_up.is_set():
                raise GivenUp("given up (%ddp_abort)")
    finally:
        at = None
