"""The buttons that the live board is handed: each runs a verb, and shows its value as text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ddp_notebook.board.buttons import Button
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.session import Session
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.views import output
from ddp_notebook.views.notebook import Shown


class ButtonUi:
    """The caller's UI of a verb that a button started: what it shows is the button's answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.attached = None
        """None: the board with the button is always that of the session's ranks."""
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        """Add `text` to the answer."""
        self.texts.append(text)

    def show(self, value: Shown) -> None:
        """The value of the verb is part of the answer anyway."""

    def show_news(self, run: CellRun) -> None:
        """Add what the ranks wrote since it was shown last."""
        if news := run.events.news():
            self.say(output.outputs(news))

    def open_board(self) -> None:
        """The board with the button is open already."""


def board_buttons(session: Session, verbs: Iterable[Verb]) -> dict[str, Button]:
    """The verbs that have a button, by name."""
    return {
        verb.name: Button(partial(_press, session, verb, verb.button), verb.button.moves_ranks)
        for verb in verbs
        if verb.button is not None
    }


def _press(session: Session, verb: Verb, button: VerbButton, line: str) -> tuple[Any, str]:
    ui = ButtonUi(session)
    value = button.run(ui, verb.parser.read(line))
    value_text = [] if value is None else [button.as_text(value)]
    return value, "\n\n".join([*value_text, *ui.texts])
