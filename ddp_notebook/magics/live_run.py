"""A run under its cell while it goes on: what the ranks wrote, and a line of what they do above it.

The line appears after a second. It is a widget if the front end can show one, else text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ddp_notebook.board.buttons import Button
from ddp_notebook.board.replay_board import can_show_widgets, line_class
from ddp_notebook.magics.cell_output import NOTHING, Bundle
from ddp_notebook.model import name_ranks
from ddp_notebook.session import Session
from ddp_notebook.session.runs.endings import exits
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.views.live_region import OUTPUT_INTERVAL_S, OUTPUT_SETTLE_S, LiveRegion
from ddp_notebook.views.notebook import live_bundle

if TYPE_CHECKING:
    from ddp_notebook.board.running_line import RunningLine

Show = Callable[[Bundle], None]


class Lines:
    """Makes the lines of one notebook. `shell` is IPython's.

    The last line of an ended run stays, for a page that is loaded later; earlier ones are closed.
    """

    def __init__(self, shell: Any, session: Session, buttons: Mapping[str, Button]) -> None:
        self._shell = shell
        self._session = session
        self._buttons = buttons
        self._made: list[RunningLine] = []

    def make(self, text: str, began_s: float) -> RunningLine | None:
        """A line for a run that began at `began_s`; None without widgets."""
        if not can_show_widgets(self._shell):
            return None
        for line in [line for line in self._made if line.over]:
            self._made.remove(line)
            line.close()
        line = line_class()(self._session, self._buttons, text, began_s)
        self._made.append(line)
        return line


class LiveRun:
    """One run, from `open` to `end`, or until `over`: then `final` gives what stays on show."""

    def __init__(
        self,
        publisher: Any,
        lines: Lines,
        run: CellRun,
        over: Callable[[], bool] = lambda: False,
        final: Callable[[], Bundle] = lambda: NOTHING,
        line_after_s: float = 1.0,  # a shorter run has no line
        context: Context | None = None,
    ) -> None:
        self._run = run
        self._lines = lines
        self._final = final
        self._line_after_s = line_after_s
        self._line: RunningLine | None = None
        self._has_line: bool | None = None
        """None until the run has lasted long enough for a line."""
        self._words = ""
        """The words in place of the line where a page has no such widget."""
        self._show_line: Show = lambda _: None
        self.region = LiveRegion(
            publisher,
            self._look,
            OUTPUT_INTERVAL_S,
            settle_s=OUTPUT_SETTLE_S,
            over=over,
            context=context,
        )

    def end(self, shown: Bundle, how: str) -> None:
        """Replace the run's display by `shown`, and the line by `how` it ended."""
        self.region.close(shown)
        self._end_line(how)

    @property
    def has_line(self) -> bool:
        """True if a line of its own says how it ended."""
        return self._line is not None

    def _look(self) -> Bundle:
        run = self._run
        if self.region.closed:
            self._end_line("")
            return self._final()
        # The widget is made only for a run that lasts: making one takes longer than a short cell.
        if self._has_line is None and time.monotonic() - run.began_s >= self._line_after_s:
            self._begin_line()
        if self._line is not None:
            self._line.look(_standing(run, f"{run.heading} runs"))
            bundle = live_bundle(run.events.live_groups(), "")
            return {**bundle, "text/html": self._words + bundle["text/html"]}
        stop = " · stop it: interrupt the kernel (I, I)" if self._has_line is False else ""
        return live_bundle(
            run.events.live_groups(), _standing(run, f"began at {_since(run)}") + stop
        )

    def _begin_line(self) -> None:
        run = self._run
        line = self._line = self._lines.make(_standing(run, f"{run.heading} runs"), run.began_s)
        self._has_line = line is not None
        if line is not None:
            began = f"{run.heading} began at {_since(run)}."
            self._words = line.words(f"{began} This was saved before it ended.")
            # The line takes the place of the region, and the output continues below it: front ends
            # cannot insert an output above one that exists.
            self._show_line = self.region.give_up_place(
                line.bundle(f"{began} Where it is: %ddp_where")
            )

    def _end_line(self, how: str) -> None:
        if self._line is not None:
            self._show_line({"text/plain": how})
            # Only a page that was loaded in mid-run still has the line, and has no output.
            self._line.end(
                f"{how} · what a rank wrote: %ddp_output --ranks 0, what was found: %ddp_why"
            )


def _since(run: CellRun) -> str:
    """When it began, as a time of day: still true when it is read later."""
    began_s = time.time() - (time.monotonic() - run.began_s)
    return time.strftime("%H:%M:%S", time.localtime(began_s))


def _standing(run: CellRun, runs: str) -> str:
    """A run in words: what `runs`, which ranks left it and how, which ranks wait for which."""
    pending = run.pending
    words = [f"{runs} on {name_ranks(pending)}" if pending else runs]
    words += [f"{name_ranks(ranks)} {word}" for word, ranks in exits(run.events).items() if pending]
    return " · ".join([*words, run.waits_for] if run.waits_for else words)
