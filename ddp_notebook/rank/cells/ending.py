"""Says how a cell or a script ended on this rank."""

from __future__ import annotations

from ddp_notebook.model import CellFinished, Frame
from ddp_notebook.rank.cells import raised
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.main_thread import Failure


class Ending:
    """Tells the session, and keeps it for a report."""

    def __init__(self, core: RankCore, events: EventSender, forwarder: OutputForwarder) -> None:
        self._core = core
        self._events = events
        self._forwarder = forwarder

    def say(self, run: int, error: BaseException | None, file: str) -> None:
        """The run ended, with `error` or well. `file` is what ran."""
        core, outcome, name, text = self._core, "ok", "", ""
        frames: tuple[Frame, ...] = ()
        if error is not None:
            outcome = "interrupted" if raised.is_interrupt(error) else "error"
            name, text = type(error).__name__, raised.message_of(error)
            frames = raised.frames_of(error, core.user_code)
            cause = core.data_parallel.cause_of(error)
            core.main_thread.error = Failure(name, text, *cause, frames=frames)
        self._events.emit_now(
            CellFinished,
            cell=run,
            outcome=outcome,
            ename=name,
            evalue=text,
            line=raised.line_of(error, file),
            path=tuple(map(raised.place_of, frames)),
            withheld_bytes=self._forwarder.withheld_bytes,
            trained=core.hooks.trained(),
        )
