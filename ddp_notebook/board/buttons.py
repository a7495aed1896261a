"""The live board's buttons: each does what a magic does, on a thread of its own.

A button is the magic's text. It is read by the magic's own parser, so that what a person learns
from the board is what can be typed.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import Any

from ddp_notebook.board.model import INTERRUPT
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Diagnosis, Ranks, parse_ranks
from ddp_notebook.session import Session
from ddp_notebook.views import board, findings, output, stacks, step_table

_MOVING = ("ddp_step", "ddp_restart")
"""One of these at a time; asking and giving up are possible meanwhile."""
ReadLine = Callable[[str, str], argparse.Namespace]
"""Parses the line of a magic, given the magic's name and the line. Raises UsageError."""
_KEPT = 3
"""Answers that stay on the board."""


class Buttons:
    """What was pressed and not done yet, and what came of the last of them."""

    def __init__(
        self,
        session: Session,
        read: ReadLine,
        changed: Callable[[], None],
        found: Callable[[Diagnosis], None],
    ) -> None:
        """`read` parses the line of a magic, given its name. `changed` is called when there is
        something new to show, `found` with a diagnosis.
        """
        self._session = session
        self._read = read
        self._changed = changed
        self._found = found
        self._lock = threading.Lock()
        self._answers = 0
        self.busy: tuple[str, ...] = ()
        self.said: tuple[dict[str, Any], ...] = ()

    def press(self, magic: str) -> None:
        """Do what `magic` does. Returns at once; any thread."""
        with self._lock:
            if magic in self.busy:
                return
            self.busy = (*self.busy, magic)
        self._changed()
        threading.Thread(target=self._do, args=(magic,), name="ddp-button", daemon=True).start()

    def _do(self, magic: str) -> None:
        try:
            self._say(magic, self._act(magic), ok=True)
        except Exception as error:  # noqa: BLE001  # it is shown where the button was pressed
            self._say(magic, str(error) or type(error).__name__, ok=False)

    def _say(self, magic: str, words: str, *, ok: bool) -> None:
        with self._lock:
            self.busy = tuple(each for each in self.busy if each != magic)
            self._answers += 1  # to press once more shows an answer anew, be it the same
            answer = {"number": self._answers, "magic": magic, "text": words, "ok": ok}
            others = tuple(each for each in self.said if each["magic"] != magic)
            self.said = (answer, *others)[:_KEPT]
        self._changed()

    def _act(self, magic: str) -> str:
        """What the magic gives, as text. Raises what it raises."""
        if magic == INTERRUPT:
            return self._cancel()
        name, _, line = magic.removeprefix("%").partition(" ")
        verb = {
            "ddp_step": self._step,
            "ddp_why": self._why,
            "ddp_where": self._where,
            "ddp_abort": self._abort,
            "ddp_restart": self._restart,
        }.get(name)
        if verb is None or not magic.startswith("%"):
            raise UsageMistake(f"The board has no button for {magic}.")
        other = next((m for m in self.busy if m != magic and m[1:].startswith(_MOVING)), "")
        if other and name in _MOVING:
            raise UsageMistake(f"{other} is still at work. %ddp_abort gives it up.")
        return verb(self._read(name, line))

    def _cancel(self) -> str:
        """End the benchmark that goes on; its own cell shows what came of it."""
        measuring = self._session.measuring
        if measuring is None:
            raise UsageMistake("No benchmark runs.")
        measuring.cancel()
        measuring.over.wait()
        return f"The benchmark ended at {measuring.done:.0%}. What is measured is kept."

    def _ranks(self, args: argparse.Namespace) -> Ranks | None:
        if args.ranks is None:
            return None
        try:
            return parse_ranks(args.ranks, self._session.record.snapshot.world_size)
        except ValueError as error:
            raise UsageMistake(str(error)) from None

    def _step(self, args: argparse.Namespace) -> str:
        table = self._session.step(self._ranks(args), args.to)
        return "\n\n".join(part for part in (step_table.text(table), self._news()) if part)

    def _news(self) -> str:
        """What the ranks wrote since the notebook showed it last."""
        run = self._session.current
        return output.outputs(run.news()) if run is not None else ""

    def _why(self, args: argparse.Namespace) -> str:
        diagnosis = self._session.why()
        self._found(diagnosis)
        return findings.text(diagnosis)

    def _where(self, args: argparse.Namespace) -> str:
        return stacks.text(self._session.where(self._ranks(args), args.locals))

    def _abort(self, args: argparse.Namespace) -> str:
        return board.text(self._session.abort(self._ranks(args)))

    def _restart(self, args: argparse.Namespace) -> str:
        return board.text(self._session.restart(self._ranks(args)))
