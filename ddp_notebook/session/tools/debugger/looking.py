"""The frames of paused ranks, the selected frame, and the watched expressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Frame, Ranks, StepTable, VariableTable, by_value
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Standing
from ddp_notebook.state import line_table

if TYPE_CHECKING:
    from ddp_notebook.session.tools.debugger.own_ranks import OwnRanks

_ASK_TIMEOUT_S = 2.0
_MOST_WATCHED = 20


@dataclass(frozen=True, slots=True)
class Stand:
    """Ranks with the same user frames, the innermost first; or why there are none."""

    ranks: Ranks
    frames: tuple[Frame, ...]
    why: str = ""


def _frames_or_why(answer: object) -> tuple[tuple[Frame, ...], str]:
    """The frames that a rank reported, or why there are none."""
    if not isinstance(answer, Standing):
        return (), "does not answer"
    if answer.busy:
        return (), "computes; its frames change"
    return answer.frames, "" if answer.frames else "is in no code of yours"


class Looking:
    """The selection lasts until ranks move; watched expressions stay."""

    def __init__(self, subject: OwnRanks) -> None:
        self._subject = subject
        self._chosen: tuple[object, int] = (None, 0)
        self.watched: tuple[str, ...] = ()
        """Expressions whose values are shown after each step."""

    @property
    def up(self) -> int:
        """The selected frame: the number of user frames above the innermost."""
        at, up = self._chosen
        return up if up and at == self._subject.moment() else 0

    def stands(self, ranks: Ranks | None) -> tuple[Stand, ...]:
        """The frames of `ranks` (all by default). Raises UsageMistake for an unknown rank."""
        subject = self._subject
        subject.need("%ddp_frame")
        members = subject.members(ranks)
        alive = subject.alive(members)
        answers = subject.ask(alive, calls.STANDING, calls.Nothing(), _ASK_TIMEOUT_S)
        found = {rank: _frames_or_why(answers.get(rank)) for rank in members}
        return tuple(Stand(of, *each) for of, each in by_value(found))

    def choose(self, frame: str, ranks: Ranks | None) -> tuple[Stand, ...]:
        """Select this frame: ``up``, ``down``, a number, or empty for the selected one.

        Raises UsageMistake where there is none.
        """
        stands = self.stands(ranks)
        deepest = max((len(stand.frames) for stand in stands), default=0)
        steps = {"": 0, "up": 1, "down": -1}
        up = self.up + steps[frame] if frame in steps else int(frame)
        if not deepest:
            raise UsageMistake(
                "No rank stands in code of yours. It does at a breakpoint (%ddp_break), in a "
                "collective, and after a cell that raised."
            )
        if not 0 <= up < deepest:
            known = f"they are 0 (innermost) to {deepest - 1}" if deepest > 1 else "there is only 0"
            raise UsageMistake(f"There is no frame {up if up > 0 else 'below 0'}: {known}.")
        self._chosen = (self._subject.moment(), up)
        return stands

    def watch(self, source: str) -> None:
        """Show this expression after each step. Raises UsageMistake for one too many."""
        if source not in self.watched and len(self.watched) >= _MOST_WATCHED:
            raise UsageMistake(f"{_MOST_WATCHED} expressions are watched. %ddp_print --unwatch")
        self.watched = tuple(dict.fromkeys((*self.watched, source)))

    def unwatch(self, source: str) -> None:
        """Stop watching this expression, or all if it is empty. Raises UsageMistake."""
        if source and source not in self.watched:
            known = ", ".join(self.watched) or "none"
            raise UsageMistake(f"{source!r} is not watched; watched: {known}.")
        self.watched = tuple(each for each in self.watched if source and each != source)

    def with_watched(
        self, table: StepTable, evaluate: Callable[[str, Ranks], VariableTable]
    ) -> StepTable:
        """`table` with the watched expressions, on the ranks that are paused at lines."""
        paused = tuple(sorted(self._subject.stops()))
        if not paused or not self.watched:
            return table
        lines = [line_table.watched(each, evaluate(each, paused)) for each in self.watched]
        return replace(table, details=(*table.details, *lines))
