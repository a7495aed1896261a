"""The live board of a notebook: it stands in one cell at a time, the one that opened it last.

It may stand in a panel beside the notebook, by jupyter-widgets' sidecar.
"""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_notebook.board.buttons import Button
from ddp_notebook.board.controller import LiveBoard, StillBoard, open_board
from ddp_notebook.board.replay_board import can_show_widgets
from ddp_notebook.board.timeline import Memory
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.run_display import is_news
from ddp_notebook.model import Board, Event
from ddp_notebook.session import Session

if TYPE_CHECKING:
    from ddp_notebook.jobs.target import Target

Place = Literal["auto", "here", "side", "off"]
PLACES: tuple[Place, ...] = ("auto", "here", "side", "off")
"""As the last one, in the running cell, in a panel beside the notebook, nowhere."""
_MOST_EARLIER = 10
"""How many closed boards stay live in their cells; each holds what ranks did, for scrubbing."""


class NotebookBoard:
    """Opens, draws and closes the live board. `shell` is IPython's."""

    def __init__(self, shell: Any, session: Session, buttons: Mapping[str, Button]) -> None:
        self._shell = shell
        self._session = session
        self._buttons = buttons
        self._open: LiveBoard | StillBoard | None = None
        self._memory: Memory | None = None
        self._earlier: deque[LiveBoard | StillBoard] = deque()
        """Closed ones, which pages may still ask."""
        self._panel = SidePanel()
        self._beside = True
        """The user has not asked for it in a cell."""
        self._job: Target | None = None
        session.record.subscribe(self._changed)
        shell.events.register("pre_run_cell", self._cell_begins)
        shell.events.register("post_run_cell", self._cell_ended)

    def withdraw(self) -> None:
        """Stop watching which cells run; remove the panel."""
        self._panel.close()
        self._shell.events.unregister("pre_run_cell", self._cell_begins)
        self._shell.events.unregister("post_run_cell", self._cell_ended)

    def open(self, place: Place = "auto") -> None:
        """Show a live board at one of `PLACES`; an earlier one stays as it is.

        What is in the panel is in the cell, too, for pages that have no such panel. Raises
        UsageMistake.
        """
        can_dock = can_have_panel() and can_show_widgets(self._shell)
        if place == "side" and not can_dock:
            raise UsageMistake(f"A board beside the notebook needs a package, sidecar. {HOW}")
        self.close()
        if place == "off":
            return
        # Beside the notebook it is seen whatever the notebook scrolls to, as Run All does.
        if place != "auto":
            self._beside = place == "side"
        in_panel = can_dock and self._beside
        self._open = open_board(self._session, self._shell, self._buttons, self._memory)
        self._open.show_job(self._job)
        if not in_panel:
            self._panel.close()

        # Where the page has no sidecar (nbviewer, another front end), the panel is not shown, and
        # the copy in the cell is seen.
        def show(bundle: Mapping[str, Any]) -> None:
            if in_panel:
                self._panel.show(bundle, again=place == "side")
            self._shell.display_pub.publish(data=dict(bundle), metadata={})

        # By then `init` has cleared the record, so the previous session's board is not shown.
        self._open.open(0.02, show, in_panel=in_panel)

    def close(self, final: Board | None = None) -> None:
        """Stop drawing; `final`, or else the last drawing, stays."""
        board, self._open = self._open, None
        if board is not None:
            board.close(final)
            self._memory = board.memory
            self._earlier.append(board)
            # Each keeps a widget with its comm, and the history that its page may scrub through.
            while len(self._earlier) > _MOST_EARLIER:
                self._earlier.popleft().let_go()

    def show_job(self, job: Target | None) -> None:
        """Show an attached job from now on, or the session's own ranks again."""
        self._job = job
        if self._open is not None:
            self._open.show_job(job)

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


# -- beside the notebook -----------------------------------------------------------------


HOW = (
    "To have it beside the notebook: right-click on the board, Create New View for Cell Output. "
    "Or: %pip install sidecar, reload the page, %ddp_board"
)


def can_have_panel() -> bool:
    """True where sidecar is installed for the kernel; the page needs it, too."""
    return importlib.util.find_spec("sidecar") is not None


class SidePanel:
    """One panel, in which boards are shown one after another."""

    def __init__(self) -> None:
        self._panel: Any = None

    def show(self, bundle: Mapping[str, Any], *, again: bool) -> None:
        """Show a MIME bundle in the panel; `again` opens it where it was closed."""
        if again:
            self.close()
        if self._panel is None:
            from sidecar import Sidecar  # it may not be installed

            # The title has the notebook, as a page may have several.
            notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).stem
            title = f"DDP ranks: {notebook}" if notebook else "DDP ranks"
            self._panel = Sidecar(title=title, anchor="split-right")
        output = {"output_type": "display_data", "data": dict(bundle), "metadata": {}}
        self._panel.outputs = (output,)

    def close(self) -> None:
        """Take the panel away."""
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
