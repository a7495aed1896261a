"""The session's events, the state they fold into, and waiting for a change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ddp_notebook.archive.history import History, Kept
from ddp_notebook.errors import SessionLost
from ddp_notebook.model import Event, Ranks, RankState, Snapshot, Stage, Status
from ddp_notebook.model.fold import fold, fold_rank, set_up_anew, without_group


class Record:
    """The session's events folded into a snapshot; safe to use from any thread.

    Subscribers are called with each batch of events, in order, on the thread that added them, and
    must be fast.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = Snapshot()
        self._history = History()
        self._subscribers: list[Callable[[Sequence[Event]], None]] = []
        self._lent: dict[int, RankState] = {}
        """The session's own ranks that are currently replaced by a script's processes."""
        self.began_ns = time.monotonic_ns()
        """When the session began."""

    @property
    def snapshot(self) -> Snapshot:
        """The state now."""
        with self._changed:
            return replace(self._snapshot, taken_ns=time.monotonic_ns())

    def check_not_lost(self) -> None:
        """Raise SessionLost once the session has ended."""
        if ended := self.snapshot.ended:
            raise SessionLost(f"{ended} Start again: %ddp_init")

    def kept(self) -> tuple[Snapshot, Kept]:
        """Return the current state, and the history of it that is still kept."""
        with self._changed:
            return replace(self._snapshot, taken_ns=time.monotonic_ns()), self._history.kept()

    def begin(self, world_size: int, **fields: Any) -> None:
        """Start over with `world_size` unknown ranks."""
        with self._changed:
            self._lent, self.began_ns = {}, time.monotonic_ns()
            ranks = tuple(RankState(rank) for rank in range(world_size))
            self._snapshot = Snapshot(ranks=ranks, **fields)
            self._history = History(self._snapshot)
            self._changed.notify_all()

    def resize(self, world_size: int, **fields: Any) -> None:
        """Continue with `world_size` ranks; new ones are unknown."""
        with self._changed:
            before = self._snapshot.ranks[:world_size]
            new = tuple(RankState(rank) for rank in range(len(before), world_size))
            self._snapshot = replace(self._snapshot, ranks=(*before, *new), **fields)
            self._history = History(self._snapshot)
            self._changed.notify_all()
        self._tell(())

    def begin_setup(self) -> None:
        """Restart setup of the live ranks: stages passed before do not count."""
        self._change_all(set_up_anew)

    def lose_group(self) -> None:
        """Mark every rank as no longer verified: the process group is gone.

        While a script's processes replace ranks it is theirs; the session's is not touched.
        """
        lent = self._lent
        self._change_all(lambda s: without_group(s) if not lent or s.rank in lent else s)

    @contextmanager
    def restarting(self, ranks: Ranks) -> Iterator[None]:
        """Mark `ranks` inside the context as being ended and replaced."""

        def mark(restarting: bool) -> None:
            self._change_all(lambda s: replace(s, restarting=restarting) if s.rank in ranks else s)

        mark(True)
        try:
            yield
        finally:
            mark(False)

    def _change_all(self, change: Callable[[RankState], RankState]) -> None:
        with self._changed:
            ranks = tuple(change(state) for state in self._snapshot.ranks)
            self._snapshot = replace(self._snapshot, ranks=ranks)
            self._history.changed(self._snapshot)
            self._changed.notify_all()
        self._tell(())

    def note(self, **fields: Any) -> None:
        """Change what the session itself decides: backend, notes, ended."""
        with self._changed:
            self._snapshot = replace(self._snapshot, **fields)
            self._history.changed(self._snapshot)
            self._changed.notify_all()
        self._tell(())

    def add(self, events: Sequence[Event]) -> None:
        """Add events."""
        with self._changed:
            before = self._snapshot
            self._snapshot = fold(before, events)
            self._history.heard(before, events)
        # Subscribers first, and without the lock: a run has taken the event when a thread that
        # waits for a change wakes up; and a subscriber may itself add events, or read the snapshot.
        self._tell(events)
        with self._changed:
            self._changed.notify_all()

    def pass_on(self, events: Sequence[Event]) -> None:
        """Tell of events that come too late to change a state: others have those places again."""
        self._tell(events)
        with self._changed:
            self._changed.notify_all()

    def hear(self, events: Sequence[Event]) -> None:
        """Add events of the session's own processes, including those that a script replaces now."""
        # Ranks that a script replaces go on unseen: how they are is known when it gives them back.
        if self._lent:
            with self._changed:
                for event in events:
                    if event.rank in self._lent:
                        self._lent[event.rank] = fold_rank(self._lent[event.rank], event)
                events = [event for event in events if event.rank not in self._lent]
        if events:
            self.add(events)

    def lend(self, ranks: Ranks) -> None:
        """Give the places of `ranks` to a script's processes."""
        now_ns = time.monotonic_ns()

        def place(s: RankState) -> RankState:
            """Return the initial state of the process that is about to replace a rank's."""
            new = RankState(s.rank, Status.READY, Stage.VERIFIED, device=s.device, host=s.host)
            return replace(new, heard_ns=now_ns, since_ns=now_ns)

        with self._changed:
            self._lent = {rank: self._snapshot.ranks[rank] for rank in ranks}
        self._change_all(lambda s: place(s) if s.rank in ranks else s)

    def lent_to(self, rank: int, pid: int) -> None:
        """Note the process that has the place of `rank`."""
        self._change_all(lambda s: replace(s, pid=pid) if s.rank == rank else s)

    def take_back(self) -> None:
        """Give their places back to the session's own processes, as they are now."""
        # Rank by rank in the one change, under its lock: an event of a rank's own process, such as
        # its death, that came between two steps would be folded into the state of the script's.
        self._change_all(lambda s: self._lent.pop(s.rank, s))

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate` is true, checking it after each change; returns its last value."""
        with self._changed:
            return self._changed.wait_for(predicate, timeout_s)

    def subscribe(self, subscriber: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Call `subscriber` with new events; returns a function that unsubscribes it."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def _tell(self, events: Sequence[Event]) -> None:
        # A copy: who is told may unsubscribe there and then, and others are still to be told.
        for subscriber in tuple(self._subscribers):
            subscriber(events)
