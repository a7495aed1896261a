"""What live boards showed earlier: findings, lines, collectives of earlier runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.board.timeline import Timeline
from ddp_notebook.model import Collectives


@dataclass(frozen=True)
class Moment:
    """What was found from a time on, as a page has it."""

    at_ns: int = 0
    findings: Sequence[Any] = ()
    locations: Sequence[Any] = ()


@dataclass
class Memory:
    """What the boards of a session have shown, one after another: a new one begins with it.

    For one board at a time; `of` says which session it is, by its beginning and its number of
    ranks. Times are counted from `epoch_ns`.
    """

    of: tuple[int, int]
    epoch_ns: int
    timeline: Timeline
    past: Past


@dataclass
class Past:
    """Records what a board shows, for when its user scrubs back."""

    # Bounded: a board may be open for days.
    _moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=400))
    _runs: deque[tuple[int, int, Collectives]] = field(default_factory=lambda: deque(maxlen=30))

    def note(self, moment: Moment) -> None:
        """Record what is shown from now on."""
        last = self._moments[-1] if self._moments else Moment()
        if (last.findings, last.locations) != (moment.findings, moment.locations):
            self._moments.append(moment)

    def keep(self, run: int, at_ns: int, collectives: Collectives) -> None:
        """Record the newest collectives of a run as they are at `at_ns`."""
        began_ns = at_ns
        if self._runs and self._runs[-1][0] == run:
            began_ns = self._runs.pop()[1]
        self._runs.append((run, began_ns, collectives))

    def found_at(self, at_ns: int) -> Moment:
        """The findings at a time."""
        earlier = [moment for moment in self._moments if moment.at_ns <= at_ns]
        return earlier[-1] if earlier else Moment()

    def collectives_at(self, at_ns: int) -> Collectives:
        """The newest collectives of the run at a time."""
        earlier = [kept for _, began_ns, kept in self._runs if began_ns <= at_ns]
        return earlier[-1] if earlier else Collectives()
