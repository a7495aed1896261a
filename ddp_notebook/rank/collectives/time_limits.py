"""How long what is issued in a group may take: as the user set it, or a day at a breakpoint.

torch fixes a timeout when a collective is issued, and a group whose timeout fires is dead. So
all that is issued while ranks may be paused waits for a day; then the user's own holds again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from datetime import timedelta
from typing import Any, Protocol

from ddp_notebook.launch.timeouts import GROUP_TIMEOUT
from ddp_notebook.rank import torch_private


class Timed(Protocol):
    """A group with its limit."""

    inner: Any
    """torch's own group."""
    waits: bool
    """True for gloo."""
    number: int
    """Changes with the limit: records of equal calls include it."""
    limit_s: float
    """After how many seconds torch gives up what is issued from now on; 0 for a day or more."""
    patient: bool
    """True if its sends and receives wait by `PatientWork`."""


class TimeLimits:
    """The limits of this rank's groups. Any thread."""

    def __init__(self) -> None:
        self._lifted = False
        self._groups: weakref.WeakKeyDictionary[Any, timedelta] = weakref.WeakKeyDictionary()
        """With the timeout that the user gave."""
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def made(self, group: Timed, timeout: timedelta) -> None:
        """`group` is new, and was given `timeout`."""
        with self._turn:
            self._groups[group] = timeout
            self._apply(group, timeout)

    def lift(self, on: bool) -> None:
        """Let all that is issued from now on wait for a day; not `on`: as the user set it."""
        with self._turn:
            if on != self._lifted:
                self._lifted = on
                for group, timeout in self._groups.items():
                    self._apply(group, timeout)

    def _apply(self, group: Timed, users: timedelta) -> None:
        timeout = GROUP_TIMEOUT if self._lifted else users
        is_long = timeout >= GROUP_TIMEOUT
        if is_long or group.patient:  # else torch has it as the user gave it
            is_long &= torch_private.set_group_timeout(timeout, group.inner)
        group.limit_s = 0.0 if is_long else users.total_seconds()
        group.patient = is_long
        group.number = next(self._numbers)


def wait_long(group: Any) -> None:
    """Let all that is issued in torch's `group`, observed or not, wait for a day from now on."""
    known = getattr(group, "ddp_notebook_group", None)
    if known is None:
        torch_private.set_group_timeout(GROUP_TIMEOUT, group)
    else:
        known.limits.made(known, GROUP_TIMEOUT)


class PatientWork:
    """The work of a send or receive. gloo's own has the timeout with which its group was made."""

    __slots__ = ("__weakref__", "_work")

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> Any:
        """As torch's; for a day where the caller gives no timeout."""
        return self._work.wait(timeout or GROUP_TIMEOUT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
