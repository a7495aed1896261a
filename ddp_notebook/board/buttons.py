"""The live board's buttons: each runs a verb's own code, on a thread of its own.

A button is the magic's text, so that what a person learns from the board is what can be typed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from ddp_notebook.board.model import INTERRUPT
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Diagnosis
from ddp_notebook.session import Session
from ddp_notebook.views.notebook import mime_bundle

_AT_LINES = ("%ddp_step", "%ddp_break")
"""The code shows the effect of these while ranks are paused at lines."""


@dataclass(frozen=True)
class Button:
    """The action of a button. `press` gets the words after the magic's name, and gives the magic's
    value and the text to show; it raises what the magic raises.

    `moves_ranks`: only one such button at a time; asking and aborting are possible meanwhile.
    """

    press: Callable[[str], tuple[Any, str]]
    moves_ranks: bool = False


class Buttons:
    """The buttons that were pressed and are not done, and the last answers."""

    def __init__(
        self,
        session: Session,
        buttons: Mapping[str, Button],
        changed: Callable[[], None],
        found: Callable[[Diagnosis], None],
    ) -> None:
        """`buttons` are by the name of the magic, without its %. `changed` is called when there is
        something new to show, `found` with a diagnosis.
        """
        self._session = session
        self._buttons = buttons
        self._changed = changed
        self._found = found
        self._lock = threading.Lock()
        self._count = 0
        self.busy: tuple[str, ...] = ()
        self.answers: tuple[dict[str, Any], ...] = ()

    def press(self, magic: str) -> None:
        """Do what `magic` does. Returns at once; any thread."""
        with self._lock:
            if magic in self.busy:
                return
            self.busy = (*self.busy, magic)
        self._changed()
        threading.Thread(target=self._do, args=(magic,), name="ddp-button", daemon=True).start()

    def close(self, number: object) -> None:
        """The user wants to see the answer of this number no more."""
        with self._lock:
            self.answers = tuple(other for other in self.answers if other["number"] != number)
        self._changed()

    def _do(self, magic: str) -> None:
        try:
            self._answer(magic, *self._act(magic), ok=True)
        except Exception as error:  # noqa: BLE001  # it is shown where the button was pressed
            self._answer(magic, str(error) or type(error).__name__, ok=False)

    def _answer(self, magic: str, text: str, nodes: Sequence[Any] = (), *, ok: bool) -> None:
        # Ranks that are paused at lines are shown in the code: an answer in words would cover it.
        seen = ok and magic.startswith(_AT_LINES) and bool(self._session.runs.stops)
        with self._lock:
            self.busy = tuple(other for other in self.busy if other != magic)
            self._count += 1  # the number shows an answer as new, also when its text is the same
            run = self._session.runs.current
            answer = {
                "number": self._count,
                "magic": magic,
                "text": text,
                "nodes": nodes,
                "ok": ok,
                "at": time.strftime("%H:%M:%S"),
                "of": run.title if run is not None else "",
                "begun": self._session.findings.begun,
            }
            # A button has one answer, whatever is typed after its magic.
            name = magic.partition(" ")[0]
            others = tuple(a for a in self.answers if a["magic"].partition(" ")[0] != name)
            self.answers = others if seen else (answer, *others)[:4]
        self._changed()

    def _act(self, magic: str) -> tuple[str, Sequence[Any]]:
        """Return the value of the magic as text, and as nodes. Raises what it raises."""
        if magic == INTERRUPT:  # the benchmark's own cell shows the result
            measuring = self._session.benchmarks.current
            if measuring is None:
                raise UsageMistake("No benchmark is running.")
            measuring.cancel()
            measuring.over.wait()
            return f"The benchmark stopped at {measuring.done:.0%}. What is measured is kept.", ()
        button = self._button(magic)
        if button is None:
            raise UsageMistake(f"The board has no button for {magic}.")
        if button.moves_ranks:
            for other in self.busy:
                moving = self._button(other)
                if other != magic and moving is not None and moving.moves_ranks:
                    raise UsageMistake(f"{other} is still running. To stop it: %ddp_abort")
        value, text = button.press(magic.partition(" ")[2])
        if isinstance(value, Diagnosis):
            self._found(value)
        with contextlib.suppress(KeyError):  # of another type, or nothing
            bundle = mime_bundle(value)
            if bundle["text/plain"] == text:
                return text, _Nodes(bundle["text/html"]).made
        return text, ()

    def _button(self, magic: str) -> Button | None:
        name = magic.partition(" ")[0]
        return self._buttons.get(name[1:]) if name.startswith("%") else None


_KEPT = (
    *("b", "br", "code", "details", "div", "li", "ol", "p", "pre", "small", "span", "strong"),
    *("summary", "table", "tbody", "td", "th", "thead", "tr", "ul"),
)
_ALONE = ("br", "wbr", "col", "hr", "img")
_LEFT_OUT = ("script", "style", "svg")


class _Nodes(HTMLParser):
    """Our own HTML as nested lists `[element, attributes, content]`, of which a page makes elements
    one by one: no markup reaches it, and no style.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.made: list[Any] = []
        self._open: list[tuple[str, list[Any]]] = [("", self.made)]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element; of one that is not kept, its content takes its place."""
        content = self._open[-1][1]
        if tag in _LEFT_OUT:
            content = []
        elif tag in _KEPT:
            kept = {name: value for name, value in attrs if name in ("colspan", "rowspan", "scope")}
            content.append([tag, kept, content := []])
        if tag not in _ALONE:
            self._open.append((tag, content))

    def handle_endtag(self, tag: str) -> None:
        """End the element."""
        if self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Text in the innermost element."""
        self._open[-1][1].append(data)
