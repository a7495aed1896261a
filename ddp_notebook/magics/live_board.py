"""The live board of a notebook: it stands in one cell at a time, the one that opened it last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.board.buttons import Button
from ddp_notebook.board.controller import LiveBoard, StillBoard, open_board
from ddp_notebook.magics.run_display import is_news
from ddp_notebook.model import Board, Event
from ddp_notebook.session import Session

_FIRST_PAINT_AFTER_S = 0.02
"""Until then `init` has cleared the record: the board of the session before is not shown."""


class NotebookBoard:
    """Opens, paints and closes the live board. `shell` is IPython's."""

    def __init__(self, shell: Any, session: Session, buttons: Mapping[str, Button]) -> None:
        self._shell = shell
        self._session = session
        self._buttons = buttons
        self._open: LiveBoard | StillBoard | None = None
        session.record.subscribe(self._changed)
        shell.events.register("pre_run_cell", self._cell_begins)
        shell.events.register("post_run_cell", self._cell_ended)

    def withdraw(self) -> None:
        """Look no more at which cells run."""
        self._shell.events.unregister("pre_run_cell", self._cell_begins)
        self._shell.events.unregister("post_run_cell", self._cell_ended)

    def open(self) -> None:
        """Show a live board in the cell that runs; an earlier one stays as it is."""
        self.close()
        self._open = open_board(self._session, self._shell, self._buttons)
        self._open.open(_FIRST_PAINT_AFTER_S)

    def close(self, final: Board | None = None) -> None:
        """Stop painting; `final`, or else what was shown last, stays."""
        board, self._open = self._open, None
        if board is not None:
            board.close(final)

    def nudge(self) -> None:
        """Something may have changed (any thread; quick)."""
        if self._open is not None:
            self._open.nudge()

    def _cell_begins(self, _info: object) -> None:
        if self._open is not None:
            self._open.cell_begins()

    def _cell_ended(self, _result: object) -> None:
        if self._open is not None:
            self._open.cell_ended()

    def _changed(self, events: Sequence[Event]) -> None:
        if is_news(events):
            self.nudge()
