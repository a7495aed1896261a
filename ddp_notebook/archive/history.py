"""The newest events of a session, kept for a file; bounded, however long it goes on.

Not safe by itself: the record calls it under its lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from ddp_notebook.model import Event, Output, Progress, Pulse, Snapshot
from ddp_notebook.model.state import Moment

MOST_EVENTS = 20_000
"""Events that are kept, give or take a chapter."""
MOST_OUTPUTS = 2_000
OUTPUT_CHARACTERS = 1_000
"""Of one piece of output, as much is kept."""
_CHAPTER = 500
_SILENCE_NS = 1_500_000_000
_PLAIN = "text/plain"


@dataclass(frozen=True)
class Kept:
    """The kept part: the state before the first moment, the moments, and how much was dropped."""

    start: Snapshot
    moments: tuple[Moment, ...]
    outputs: tuple[Output, ...]
    dropped_events: int
    dropped_outputs: int


@dataclass(slots=True)
class _Chapter:
    """Some moments, and the state before them.

    States are never changed in place, so that one costs a reference, and the oldest chapter is
    dropped without folding it.
    """

    before: Snapshot
    moments: list[Moment] = field(default_factory=list)


class History:
    """The events since a session began with the state `start`."""

    def __init__(self, start: Snapshot | None = None) -> None:
        self._chapters = deque([_Chapter(start or Snapshot())])
        self._events = 0
        self._dropped = 0
        self._outputs: deque[Output] = deque(maxlen=MOST_OUTPUTS)
        self._written = 0
        self._signs: dict[int, tuple[int, object]] = {}
        """Where in the newest chapter each rank's sign of life is that was its latest event, and
        what it says."""

    def changed(self, state: Snapshot) -> None:
        """The session itself made `state` of what there was."""
        self._turn_page(state)
        self._add(Moment(time.monotonic_ns(), state=state))
        self._signs.clear()

    def heard(self, before: Snapshot, events: Sequence[Event]) -> None:
        """`events` came when the state was `before`."""
        self._turn_page(before)
        known = self._chapters[-1].moments
        for event in events:
            at_ns = event.heard_ns or time.monotonic_ns()
            if isinstance(event, Output):
                self._written += 1
                # Of figures and the like no more than their text is kept.
                plain = event.data.get(_PLAIN)
                data = {_PLAIN: plain[:OUTPUT_CHARACTERS]} if isinstance(plain, str) else {}
                text = event.text[:OUTPUT_CHARACTERS]
                output = structs.replace(event, text=text, data=data, metadata={}, heard_ns=at_ns)
                self._outputs.append(output)
            elif isinstance(event, Progress):
                pass  # of a task whose result is kept by itself
            else:
                # A rank's signs of life that say the same are one moment with an end. Further apart
                # they are a silence, and kept as two.
                about = (event.doing, event.cell) if isinstance(event, Pulse) else None
                place, before_it = self._signs.pop(event.rank, (0, ()))
                if (
                    about == before_it
                    and at_ns - max(known[place].at_ns, known[place].until_ns) < _SILENCE_NS
                ):
                    known[place] = replace(known[place], until_ns=at_ns)
                else:
                    place = len(known)
                    self._add(Moment(at_ns, event=event))
                if about is not None:
                    self._signs[event.rank] = place, about

    def kept(self) -> Kept:
        """Return all that is left, oldest first."""
        return Kept(
            self._chapters[0].before,
            tuple(moment for chapter in self._chapters for moment in chapter.moments),
            tuple(self._outputs),
            self._dropped,
            self._written - len(self._outputs),
        )

    def _add(self, moment: Moment) -> None:
        self._chapters[-1].moments.append(moment)
        self._events += 1

    def _turn_page(self, before: Snapshot) -> None:
        """Begin a new chapter when the newest is full, and drop the oldest when all are."""
        if len(self._chapters[-1].moments) < _CHAPTER:
            return
        self._chapters.append(_Chapter(before))
        self._signs.clear()  # what a chapter says does not change any more
        # Whole chapters are dropped: each begins with the state before it, so nothing has to be
        # folded again.
        while self._events - len(self._chapters[0].moments) >= MOST_EVENTS:
            gone = len(self._chapters.popleft().moments)
            self._events -= gone
            self._dropped += gone
