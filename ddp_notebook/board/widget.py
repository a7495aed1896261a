"""The live board as a widget: one class, one script, one style sheet.

Importing this needs anywidget. The class knows nothing of sessions: it holds what is drawn, and
passes on the messages of the page.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from ddp_notebook.board.model import STAGES

_FOLDER = Path(__file__).parent
_WIDGET = "application/vnd.jupyter.widget-view+json"


class BoardWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """What the page draws; `board.model` makes it. Safe to set from any thread.

    `still` names the picture without scripts that stands below it in the notebook: while the
    script draws, it hides that; wherever the script does not run, the picture is what is seen.
    """

    _esm = (_FOLDER / "board.js").read_text("utf-8")
    _css = (_FOLDER / "board.css").read_text("utf-8")

    still = traitlets.Unicode().tag(sync=True)
    stages = traitlets.List(STAGES).tag(sync=True)
    board = traitlets.Dict().tag(sync=True)
    findings = traitlets.List().tag(sync=True)
    locations = traitlets.List().tag(sync=True)
    actions = traitlets.List().tag(sync=True)
    benchmark = traitlets.Dict().tag(sync=True)
    """The running benchmark, if there is one."""
    busy = traitlets.List().tag(sync=True)
    """The magics that buttons have started and that are not done."""
    answers = traitlets.List().tag(sync=True)
    """What the last of them gave, the newest first."""

    def __init__(self, on_message: Callable[[Mapping[str, Any]], None], **values: Any) -> None:
        super().__init__(still=uuid.uuid4().hex[:12], **values)
        self.on_msg(
            lambda _, content, __: on_message(content) if isinstance(content, dict) else None
        )

    def paint(self, board: Mapping[str, Any], now_us: int) -> None:
        """Show `board`, if it is not what is shown already. `now_us` is when this is."""
        shown = {name: value for name, value in self.board.items() if name != "now"}
        if shown != board:
            self.board = {**board, "now": now_us}

    def tell(self, message: Mapping[str, Any], now_us: int) -> None:
        """Send something to the pages that is no part of what is drawn for good."""
        self.send({**message, "now": now_us})

    def bundle(self) -> dict[str, Any]:
        """What is displayed. Its text is empty: the picture below it stands for it."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {_WIDGET: view, "text/plain": ""}

    def picture(self, bundle: Mapping[str, str], bars: str = "") -> dict[str, str]:
        """`bundle` as the picture that is seen where the script does not run, `bars` below it."""
        html = f'<div class="ddp-still-{self.still}">{bundle["text/html"]}{bars}</div>'
        return {**bundle, "text/html": html}
