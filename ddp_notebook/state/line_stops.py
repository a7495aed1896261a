"""Where ranks are paused at lines, and from when until when they were: time of no collective."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp_notebook.model import CellFinished, Event, LineLeft, LineStopped, Place, RankExited

MOST_PAUSES = 2_000
"""How many are kept of a run, the newest ones."""


@dataclass(frozen=True, slots=True)
class LinePause:
    """A rank was paused before a line. Times are the session's monotonic clock.

    `stop` counts a rank's stops; `why` is empty after a step; `ended_ns` is 0 while it is paused.
    """

    rank: int
    stop: int
    place: Place
    why: str
    began_ns: int
    ended_ns: int = 0


class LineStops:
    """Folds the events of one run. Not for several threads at once."""

    def __init__(self) -> None:
        self.now: dict[int, LineStopped] = {}
        """Ranks that are paused at a line, and where."""
        self._pauses: dict[tuple[int, int], LinePause] = {}
        self._left: dict[int, int] = {}
        """By rank, the last stop that it left: a rank may leave a stop before its event arrives."""

    @property
    def pauses(self) -> tuple[LinePause, ...]:
        """The pauses so far, each rank's in their order."""
        return tuple(self._pauses.values())

    def take(self, event: Event, at_ns: int) -> None:
        """An event of the run, which arrived at `at_ns`."""
        match event:
            case LineStopped() if event.stop > self._left.get(event.rank, 0):
                known = self.now.get(event.rank)
                if known is not None and known.stop != event.stop:
                    self._leave(event.rank, at_ns)
                self.now[event.rank] = event
                pause = _pause(event, at_ns)
                self._pauses.setdefault((event.rank, event.stop), pause)
                if len(self._pauses) > MOST_PAUSES:
                    del self._pauses[next(iter(self._pauses))]
            case LineLeft():
                self._left[event.rank] = max(event.stop, self._left.get(event.rank, 0))
                known = self.now.get(event.rank)
                if known is not None and known.stop <= event.stop:
                    self._leave(event.rank, at_ns)
            case CellFinished() | RankExited() if event.rank in self.now:
                self._leave(event.rank, at_ns)

    def _leave(self, rank: int, at_ns: int) -> None:
        key = (rank, self.now.pop(rank).stop)
        pause = self._pauses.get(key)
        if pause is not None:
            self._pauses[key] = replace(pause, ended_ns=max(at_ns, pause.began_ns))


def _pause(event: LineStopped, at_ns: int) -> LinePause:
    index = event.line - event.first
    text = event.source[index].strip() if 0 <= index < len(event.source) else ""
    function = "" if event.function == "<module>" else event.function
    place = Place(event.file, event.line, function, text)
    return LinePause(event.rank, event.stop, place, event.why, at_ns)
