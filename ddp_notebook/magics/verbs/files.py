"""`%ddp_save` and `%ddp_replay`: a run kept in a file, and looked at without ranks.

`DDPMagics` inherits the verbs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.archive.replay import Replay, what_is_missing
from ddp_notebook.board.replay_board import ReplayBoard, can_show_widgets
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Diagnosis, format_bytes
from ddp_notebook.views.notebook import mime_bundle

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session


def save_parser() -> Parser:
    """The parser of `%ddp_save`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    description = (
        "Write the run to a file: for %ddp_replay, and for ui.perfetto.dev or chrome://tracing."
    )
    parser = Parser("%ddp_save", "%ddp_save run.json", description)
    add = parser.add_argument
    add("path", help="the file")
    add("--output", action="store_true", help="also what the ranks wrote, as far as it is kept")
    add("--force", action="store_true", help="replace a file that exists")
    return parser


def replay_parser() -> Parser:
    """The parser of `%ddp_replay`."""
    from ddp_notebook.magics.parsing import Parser

    description = "Show the board and the diagnosis of a saved run. Needs no ranks."
    parser = Parser("%ddp_replay", "%ddp_replay run.json", description)
    parser.add_argument("path", help="a file of %%ddp_save")
    return parser


class SaveVerb:
    """The verbs, for the class of all verbs to inherit."""

    shell: Any
    session: Session

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

        def _say(self, text: str) -> None: ...

    @line_magic
    def ddp_save(self, line: str) -> None:
        """Write the run to a file: %ddp_save run.json [--output] [--force]"""
        self._verb("ddp_save", line, self._save)

    def _save(self, args: argparse.Namespace) -> None:
        saved = self.session.save(args.path, output=args.output, force=args.force)
        path = Path(args.path).expanduser()
        issued = sum(len(each) for each in saved.collectives.of.values())
        self._say(
            f"{path}: {saved.world_size} ranks, {len(saved.moments):,} events, {issued:,} "
            f"collectives, {format_bytes(path.stat().st_size)}"
        )
        for missing in what_is_missing(saved):
            self._say(missing)
        self._say(f"Look at it: %ddp_replay {args.path}   As a trace: open it in ui.perfetto.dev")

    @line_magic
    def ddp_replay(self, line: str) -> Replay | None:
        """The board and the diagnosis of a saved run: %ddp_replay run.json"""
        return self._verb("ddp_replay", line, lambda args: Replay.read(args.path))

    def _show_replays(self) -> None:
        """Have a replay show itself as a board and a diagnosis."""
        formatter = self.shell.display_formatter.ipython_display_formatter
        formatter.for_type(Replay, self._show_replay)

    def _show_replay(self, replay: Replay) -> None:
        self._say(replay.about)
        diagnosis: Diagnosis | None = None
        try:
            diagnosis = replay.why()
        except UsageMistake as mistake:
            self._say(str(mistake))
        bundles = [mime_bundle(replay.status())]
        if diagnosis is not None:
            bundles.append(mime_bundle(diagnosis))
        publish = self.shell.display_pub.publish
        if can_show_widgets(self.shell):
            board = ReplayBoard(replay, diagnosis)
            publish(data=board.widget.bundle(), metadata={})
            below = (board.bars, "")
            bundles = [board.widget.picture(*each) for each in zip(bundles, below, strict=False)]
        for bundle in bundles:
            publish(data=bundle, metadata={})
