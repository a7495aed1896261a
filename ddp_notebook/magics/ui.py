"""The environment of a verb: the session, the shell, the cell's output and the live board."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ddp_notebook import jobs
from ddp_notebook.board.buttons import Button
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.cell_output import CellOutput, progress_line
from ddp_notebook.magics.live_board import NotebookBoard, Place
from ddp_notebook.magics.parser import Surroundings
from ddp_notebook.magics.run_display import Lines, RunDisplay
from ddp_notebook.model import Ranks, parse_ranks
from ddp_notebook.session import Session
from ddp_notebook.session.preflight import has_room_for_threads
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.views.notebook import Displays, Shown, mime_bundle


class CallerUi(Protocol):
    """The part of it that a verb may use, called by a cell or by a button of the board."""

    session: Session

    @property
    def attached(self) -> jobs.target.Target | None:
        """The job of others that the verbs mean which look at ranks; None: the session's ranks."""

    def say(self, text: str) -> None:
        """Show `text` to the caller."""

    def show(self, value: Shown) -> None:
        """Show `value` to the caller now; it is not shown again as the value of the cell."""

    def show_news(self, run: CellRun) -> None:
        """Show what the ranks wrote since it was shown last."""

    def open_board(self) -> None:
        """Show a live board to the caller."""


class NotebookUi:
    """A notebook and its session, for verbs that a cell calls."""

    def __init__(self, shell: Any, session: Session, buttons: Mapping[str, Button]) -> None:
        self.shell = shell
        self.session = session
        self.output = CellOutput(shell)
        self.displays = Displays(shell)
        self.runs = RunDisplay(session, self.output, Lines(shell, session, buttons))
        self.board = NotebookBoard(shell, session, buttons)
        self.attached: jobs.target.Target | None = None
        """The job of the last `%ddp_attach`, until `%ddp_detach`."""

    def say(self, text: str) -> None:
        """Print `text` in the cell."""
        self.output.say(text)

    def show(self, value: Shown) -> None:
        """Display it in the cell."""
        self.output.publish(mime_bundle(value))
        self.displays.shown_already(value)

    def show_news(self, run: CellRun) -> None:
        """Show the ranks' output since the notebook showed it last."""
        self.runs.show_news(run)

    def open_board(self, place: Place = "auto") -> None:
        """Show a live board if there is a front end; an earlier one is closed."""
        # At the limit of threads Python ends the process, which is the notebook, when a thread
        # cannot start.
        if not self.output.is_live or not has_room_for_threads():
            return  # what starts processes says that there is no room
        self.board.open(place)
        self.displays.shown_already()

    def progress(self) -> AbstractContextManager[None]:
        """A line in the terminal that shows the progress, if there is no live board."""
        if self.output.is_live:
            return nullcontext()
        return progress_line(lambda: self.session.record.snapshot, sys.stdout)

    @property
    def variables(self) -> MutableMapping[str, Any]:
        """The notebook's variables."""
        names: MutableMapping[str, Any] = self.shell.user_ns
        return names

    @property
    def prompt_number(self) -> int:
        """The n of this cell's ``In [n]``; some shells count it before a cell runs, some after."""
        # A terminal counts a cell after it ran, ipykernel before: only the length of `In` is the
        # same in both.
        inputs = self.variables.get("In", ())
        return len(inputs) - 1 if len(inputs) > 1 else int(self.shell.execution_count)

    def surroundings(self) -> Surroundings:
        """Return the facts for Tab completion."""
        names = [name for name in self.variables if not name.startswith("_")]
        return Surroundings(names, self.session.record.snapshot.ranks)


def chosen_ranks(session: Session, args: argparse.Namespace) -> Ranks | None:
    """The rank set of `--ranks`, also by mesh coordinates; None without it. Raises UsageMistake."""
    if args.ranks is None or not session.running:
        return None  # without ranks the session itself says what is missing
    try:
        if "=" not in args.ranks:
            return parse_ranks(args.ranks, session.record.snapshot.world_size)
        if (mesh := session.mesh()) is not None:
            return mesh.ranks(args.ranks)
    except ValueError as error:
        raise UsageMistake(str(error)) from None
    raise UsageMistake(
        f"--ranks {args.ranks}: the ranks have no mesh, so there are no such places. Make one: "
        'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")). Or write --ranks 0,2'
    )


class _HasJson(Protocol):
    def to_json(self) -> Mapping[str, Any]:
        """Its content, for `json.dumps`."""


V = TypeVar("V", bound=_HasJson)


def value_or_json(ui: CallerUi, args: argparse.Namespace, value: V) -> V | None:
    """`value`; with `--json` it is printed, and None."""
    if not args.json:
        return value
    ui.say(json.dumps(value.to_json(), indent=2))
    return None
