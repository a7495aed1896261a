"""Groups, and how long what is issued in one may take: as the user set it, or a day at a stop.

torch fixes a timeout when a collective is issued, and a group whose timeout fires is dead. So
all that is issued while ranks may be paused waits for a day; then the user's own holds again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ddp_notebook.launch.timeouts import GROUP_TIMEOUT
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.collectives.log_writer import LogWriter
from ddp_notebook.rank.collectives.splits import Exchanges


class Group:
    """An observed group. A plain object: it is read before each collective, and
    attributes of one of torch's own objects take three times as long."""

    __slots__ = (
        *("__weakref__", "called", "checks", "exchanges", "inner", "limit_s", "limits", "members"),
        *("number", "patient", "seq_ids", "title", "waits"),
    )

    def __init__(
        self, inner: Any, title: str, called: str, members: Sequence[int], limits: TimeLimits
    ) -> None:
        self.inner = inner
        """torch's own group."""
        self.title = title
        self.called = called
        """The name that the user or a mesh gave it; empty for nothing."""
        self.members = tuple(members)
        self.limits = limits
        self.number = -1
        """Names it on this rank; another one after `%ddp_abort`, and with another limit."""
        self.limit_s = 0.0
        """After how many seconds torch gives up what is issued from now on; 0 for a day or more."""
        self.patient = False
        """True if its sends and receives wait by `PatientWork`: for `TimeLimits` to set."""
        self.seq_ids = [0, 0]
        """How many collectives, and sends and receives, were issued so far."""
        self.checks: list[Callable[..., None] | None] = [None, None]
        """The checks against the other ranks: of collectives, not of sends and receives."""
        self.exchanges: Exchanges | None = None
        """Its all_to_alls, where they are compared."""
        # gloo: NCCL works on by itself.
        self.waits = torch_private.group_backend(inner) == "gloo"
        """A collective that is waited for is waited for in here, so that its end is seen."""

    def text(self, log: LogWriter) -> int:
        """The number by which records name the group."""
        limit_s = self.limit_s
        value = {"group": self.title, "members": list(self.members), "called": self.called}
        return log.text(("group", self.title, limit_s), {**value, "limit_s": limit_s})


class TimeLimits:
    """The limits of this rank's groups. Any thread."""

    def __init__(self) -> None:
        self._lifted = False
        self._groups: weakref.WeakKeyDictionary[Any, timedelta] = weakref.WeakKeyDictionary()
        """With the timeout that the user gave."""
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def made(self, group: Group, timeout: timedelta) -> None:
        """`group` is new, and was given `timeout`."""
        # A group may be made on the main thread while the one that answers lifts the limits for a
        # breakpoint: without the lock the new group could miss that.
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

    def _apply(self, group: Group, users: timedelta) -> None:
        timeout = GROUP_TIMEOUT if self._lifted else users
        is_long = timeout >= GROUP_TIMEOUT
        if is_long or group.patient:  # else torch has it as the user gave it
            is_long &= torch_private.set_group_timeout(timeout, group.inner)
        group.limit_s = 0.0 if is_long else users.total_seconds()
        group.patient = is_long
        # Always another one: records that are packed for equal calls have the limit in them.
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
