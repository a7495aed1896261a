"""The line above a running cell's output: what the run does, for how long, Where and Abort.

Importing this needs anywidget. The clock is the page's, and stops when the kernel does not answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from ddp_notebook.board.buttons import Button, Buttons
from ddp_notebook.board.model import answer_json
from ddp_notebook.board.still_picture import hidden_beside
from ddp_notebook.session import Session


class Shown(anywidget.AnyWidget):  # type: ignore[misc]
    """A widget as a notebook shows it, until it is closed."""

    def bundle(self, text: str = "") -> dict[str, Any]:
        """The MIME bundle; `text` where there are no widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": text}

    def close(self) -> None:
        """Take it off all pages: what stands below it is seen there. Its layout is closed, too."""
        if self.comm is not None:
            self.layout.close()
        super().close()


class RunningLine(Shown):
    """One line of one run, from its beginning on. Safe to set from any thread."""

    _esm = "".join(
        (Path(__file__).parent / name).read_text("utf-8")
        for name in ("page/anywidget.js", "running_line.js")
    )

    stand_in = traitlets.Unicode().tag(sync=True)
    """Names the model, and the words that stand below it for pages that have no such widget."""
    text = traitlets.Unicode().tag(sync=True)
    """The run's activity; at its end, how it ended."""
    age_s = traitlets.Float().tag(sync=True)
    """For how long it ran when `text` was set last."""
    over = traitlets.Bool(False).tag(sync=True)
    busy = traitlets.List().tag(sync=True)
    """The magics that buttons have started and that are not done."""
    answers = traitlets.List().tag(sync=True)
    """The answers of the last buttons, the newest first."""

    def __init__(
        self, session: Session, buttons: Mapping[str, Button], text: str, began_s: float
    ) -> None:
        self._session = session
        self._began_s = began_s
        name, age_s = uuid.uuid4().hex, time.monotonic() - began_s
        super().__init__(model_id=name, stand_in=name, text=text, age_s=age_s)
        self._buttons = Buttons(session, buttons, self._pressed, lambda _: None)
        self._sent_s = time.monotonic()
        self.on_msg(lambda _, content, __: self._heard(content))

    def look(self, text: str) -> None:
        """Say what the run does now. To be called about once a second."""
        now_s = time.monotonic()
        # A page that gets no message for longer says that the kernel does not answer.
        quiet = now_s - self._sent_s > 5.0
        if text != self.text or quiet:
            self._sent_s = now_s
            with self.hold_sync():
                self.text, self.age_s = text, now_s - self._began_s
        if quiet:  # a page may have missed what was said before
            self._tell_all()

    def end(self, text: str) -> None:
        """Say how it ended, and take the buttons away."""
        with self.hold_sync():
            self.text, self.over = text, True

    def words(self, text: str) -> str:
        """`text` as HTML for where the script does not run: a notebook that was saved in mid-cell.

        While the script draws, it hides them.
        """
        still = f"ddpl-still-{self.stand_in}"
        return f'{hidden_beside(still)}<div class="{still}">{escape(text, quote=False)}</div>'

    def _tell_all(self) -> None:
        self.send_state(["text", "age_s", "over", "busy", "answers"])

    def _heard(self, content: Any) -> None:
        """A page sent a message: a button was pressed, or it may have missed what was said."""
        # A page can send what it likes.
        if not isinstance(content, dict):
            return
        if content.get("kind") in ("hello", "here"):
            self._tell_all()
        elif content.get("kind") == "do" and not self.over:
            self._buttons.press(str(content.get("magic", "")))

    def _pressed(self) -> None:
        """A button was pressed, or has answered."""
        with self.hold_sync():
            self.busy = list(self._buttons.busy)
            self.answers = [
                answer_json(answer, self._session.findings.begun)
                for answer in self._buttons.answers
            ]
