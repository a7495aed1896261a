"""The live board as a widget: one class, one script, one style sheet.

Importing this needs anywidget. The class knows nothing of sessions: it holds what is drawn, and
passes on the messages of the page.

Jupyter saves a widget's state in the notebook. That is what was drawn when the board's own cell
ended, as the text around it is of then; what is drawn later is sent to the pages alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import traitlets

from ddp_notebook.board.model import STAGES
from ddp_notebook.board.running_line import RunningLine, Shown
from ddp_notebook.board.still_picture import hidden_beside

__all__ = ["BoardWidget", "RunningLine"]

_PAGE = Path(__file__).parent / "page"
_EXPORTS = re.compile(r"^export (?!default)", re.MULTILINE)
"""Only the tests of the script need them."""
_COMMENTS = re.compile(r"^\s*(?://.*|/\*(?:[^*]|\*(?!/))*\*/)\s*?\n| +// .*$", re.MULTILINE)
_INDENTATION = re.compile(r"^\s+", re.MULTILINE)
_TEXT = re.compile(r'("(?:[^"\\\n]|\\.)*"|`[^`]*`)')
_BESIDE = re.compile(r" ?(=>|[!=]==|&&|\|\||\?\?|[=<>?:,;{}()\[\]]) ?| ([+*]) (?![+-])")
"""Spaces that mean nothing in a script, outside of texts."""
_BREAKS = re.compile(r"(?<=[{(\[,;])\n|;?\n(?=})|\n(?=[)\].])")
"""Ends of lines that mean nothing in it: it has no loop without a body."""
_AROUND = re.compile(r"(?<=:) +|(?<=[ (,])0(?=\.\d)|\s*([{};,>])\s*")
"""Spaces, and zeros before a point, that mean nothing in a style sheet."""


def _squeezed(line: str) -> str:
    """A line of the script without such spaces; as it is where it may have other kinds of text."""
    parts = _TEXT.split(line)
    nested = any(text.count("{") != text.count("}") for text in parts[1::2] if text[0] == "`")
    if nested or any(mark in code for code in parts[::2] for mark in "`'/"):
        return line
    return "".join(part if n % 2 else _BESIDE.sub(r"\1\2", part) for n, part in enumerate(parts))


def _joined(kind: str) -> str:
    """The files of the page as one, by name: nothing in one of them runs before all are read.

    Without comments, indentation, empty lines and names for tests: a page has no use for them.
    """
    # Bundled here and not by a build step: the page is a dozen small files, and a wheel needs no
    # node.
    text = "\n".join(path.read_text("utf-8") for path in sorted(_PAGE.glob(f"*.{kind}")))
    return _INDENTATION.sub("", _EXPORTS.sub("", _COMMENTS.sub("", text)))


class BoardWidget(Shown):
    """The content that the page draws; `board.model` makes it. Safe to set from any thread.

    `still` names the model, and the picture without scripts that stands below it in the notebook:
    while the script draws, it hides that; wherever the script does not run, the picture is what is
    seen.
    """

    _esm = _BREAKS.sub("", "\n".join(map(_squeezed, _joined("js").split("\n"))))
    _css = _AROUND.sub(r"\1", _joined("css")).replace(";}", "}")

    still = traitlets.Unicode().tag(sync=True)
    notebook = traitlets.Unicode().tag(sync=True)
    """Names the notebook, also after a restart of its kernel; empty where the server does not."""
    in_panel = traitlets.Bool().tag(sync=True)
    """It has a panel beside the notebook: its cell shows it only where the page has no panels."""
    stages = traitlets.List(STAGES).tag(sync=True)
    board = traitlets.Dict().tag(sync=True)
    findings = traitlets.List().tag(sync=True)
    locations = traitlets.List().tag(sync=True)
    stops = traitlets.Dict().tag(sync=True)
    """The lines at which ranks are paused, and the code around them."""
    actions = traitlets.List().tag(sync=True)
    benchmark = traitlets.Dict().tag(sync=True)
    """The running benchmark, if there is one."""
    busy = traitlets.List().tag(sync=True)
    """The magics that buttons have started and that are not done."""
    answers = traitlets.List().tag(sync=True)
    """The answers of the last buttons, the newest first."""
    told = traitlets.Int().tag(sync=True)
    """The changes that pages were told of while the board's own cell ran; messages go on with it.

    Every message has the number of the last change: a page whose connection was lost, for however
    short a time, sees by the next one that it has missed some, and asks for all.
    """

    def __init__(self, on_message: Callable[[Mapping[str, Any]], None], **values: Any) -> None:
        # A name for the kernel's notebook that tells nothing of its path: the state is saved.
        path = os.environ.get("JPY_SESSION_NAME", "").encode(errors="replace")
        notebook = hashlib.sha256(path).hexdigest()[:12] if path else ""
        name = uuid.uuid4().hex
        super().__init__(model_id=name, still=name, notebook=notebook, **values)
        self.drawn: dict[str, Any] = {}
        """The values that were drawn last, by the names above."""
        self._kept = False
        self._changes = 0
        self._lock = threading.RLock()
        """Changes are sent in the order in which they are counted."""
        self.on_msg(
            lambda _, content, __: on_message(content) if isinstance(content, dict) else None
        )

    def draw(self, now_us: int, **values: Any) -> None:
        """Show `values` by their names, as far as they are not shown yet. `now_us` is when."""
        changed = {name: each for name, each in values.items() if self.drawn.get(name) != each}
        if not changed:
            return
        self.drawn.update(changed)
        if "board" in changed:
            changed["board"] = {**changed["board"], "now": now_us}
        # Values that are set as traits are saved in the notebook by Jupyter. Once the board's own
        # cell has ended, what is drawn later is of other cells, and is sent as a message instead.
        if self._kept:
            self.tell({"kind": "state", "values": changed}, now_us)
        else:
            # One message for all of it, or the page would draw states that never were.
            with self._lock, self.hold_sync():
                self._changes += 1
                self.told = self._changes
                for name, value in changed.items():
                    setattr(self, name, value)

    def keep(self) -> None:
        """The board's own cell has ended: what is drawn now is what is saved of it."""
        self._kept = True

    def tell_whole(self, slices: Mapping[str, Any], now_us: int) -> None:
        """Tell a page that opens late, or has missed messages, what is drawn, and all `slices`."""
        values = dict(self.drawn) if self._kept else {}
        if values:
            values["board"] = {**values["board"], "now": now_us}
        with self._lock:
            if not self._kept:
                self.send_state(list(self.drawn))
            self.tell({**slices, "values": values, "whole": True}, now_us)

    def tell(self, message: Mapping[str, Any], now_us: int) -> None:
        """Send something to the pages that is no part of what is drawn for good."""
        with self._lock:
            self._changes += message["kind"] in ("state", "slices")
            self.send({**message, "now": now_us, "told": self._changes})

    def picture(self, bundle: Mapping[str, str], below: str = "") -> dict[str, str]:
        """`bundle` as the picture that is seen where the script does not run, `below` below it.

        Where the notebook is opened again, it is all there is.
        """
        still = f"ddp-still-{self.still}"
        html = f'{hidden_beside(still)}<div class="{still}">{bundle["text/html"]}{below}</div>'
        return {**bundle, "text/html": html}
