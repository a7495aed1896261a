"""What a live board showed earlier: findings, lines, collectives of earlier runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.model import Collectives

_MOST_MOMENTS = 400
"""Changes of what was found that are kept; the oldest are forgotten."""
_MOST_RUNS = 30


@dataclass(frozen=True)
class Moment:
    """What was found from a time on, as a page has it."""

    at_ns: int = 0
    findings: Sequence[Any] = ()
    locations: Sequence[Any] = ()


@dataclass
class Past:
    """Filled while a board is drawn, asked when its user scrubs back."""

    _moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_MOST_MOMENTS))
    _runs: deque[tuple[int, int, Collectives]] = field(
        default_factory=lambda: deque(maxlen=_MOST_RUNS)
    )

    def note(self, moment: Moment) -> None:
        """This is shown from now on."""
        last = self._moments[-1] if self._moments else Moment()
        if (last.findings, last.locations) != (moment.findings, moment.locations):
            self._moments.append(moment)

    def keep(self, run: int, at_ns: int, collectives: Collectives) -> None:
        """The newest collectives of a run, each time they are looked at; `at_ns` is when."""
        began_ns = at_ns
        if self._runs and self._runs[-1][0] == run:
            began_ns = self._runs.pop()[1]
        self._runs.append((run, began_ns, collectives))

    def found_at(self, at_ns: int) -> Moment:
        """What was found at a time."""
        earlier = [moment for moment in self._moments if moment.at_ns <= at_ns]
        return earlier[-1] if earlier else Moment()

    def collectives_at(self, at_ns: int) -> Collectives:
        """The newest collectives of the run at a time."""
        earlier = [kept for _, began_ns, kept in self._runs if began_ns <= at_ns]
        return earlier[-1] if earlier else Collectives()
