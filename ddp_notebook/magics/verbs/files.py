"""`%ddp_save` and `%ddp_replay`: a run kept in a file, and looked at without ranks."""

from __future__ import annotations

import argparse

from ddp_notebook.archive.replay import Replay, what_is_missing
from ddp_notebook.board.replay_board import ReplayBoard, can_show_widgets
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.magics.options import files
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verb import ValueDisplay, Verb
from ddp_notebook.model import Diagnosis, format_bytes
from ddp_notebook.views.notebook import mime_bundle


def _save(ui: NotebookUi, args: argparse.Namespace) -> None:
    # An attached job has no record here: its run is saved where it runs, by the console script.
    job, other = ui.attached, ""
    if job is not None:
        other = f"Of {job.name}, in a shell: ddp-notebook save PID_OR_FILES {args.path}"
        if not ui.session.running:
            raise UsageMistake(
                f"%ddp_save saves the session's own run, and this session has no ranks. {other}"
            )
    saved = ui.session.save(args.path, output=args.output, force=args.force)
    path = named_file(args.path)
    issued = sum(len(collectives) for collectives in saved.collectives.of.values())
    ui.say(
        f"{path}: {saved.world_size} ranks, {len(saved.moments):,} events, {issued:,} "
        f"collectives, {format_bytes(path.stat().st_size)}"
    )
    for missing in what_is_missing(saved):
        ui.say(missing)
    ui.say(f"Look at it: %ddp_replay {args.path}   As a trace: open it in ui.perfetto.dev")
    if other:
        ui.say(f"It is the session's own run. {other}")


SAVE = Verb(
    "ddp_save",
    about="Write the run to a file, for %ddp_replay and for ui.perfetto.dev or chrome://tracing. "
    "In a program: session.save.",
    examples=(
        ("%ddp_save run.json", "this session's run, for a bug report"),
        ("%ddp_save run.json --output", "with what the ranks wrote"),
    ),
    run=_save,
    options=(
        Option("path", "the file", completer=files),
        Option(
            "--output",
            "also what the ranks wrote: the last 2,000 pieces, 1,000 characters of each",
        ),
        Option("--force", "replace a file that exists"),
    ),
)


def _show_replay(ui: NotebookUi, replay: Replay) -> None:
    """A replay as a board and a diagnosis; a live one where there can be widgets."""
    ui.say(replay.about)
    diagnosis: Diagnosis | None = None
    try:
        diagnosis = replay.why()
    except UsageMistake as mistake:
        ui.say(str(mistake))
    # The widget has the timeline, and a slider through the run; the picture below it stays in the
    # notebook where no kernel runs.
    if can_show_widgets(ui.shell):
        board = ReplayBoard(replay, diagnosis)
        bundles = [board.widget.bundle(), board.picture()]
    else:
        bundles = [
            mime_bundle(value) for value in (replay.status(), diagnosis) if value is not None
        ]
    for bundle in bundles:
        ui.output.publish(bundle)


REPLAY = Verb(
    "ddp_replay",
    about="Show the board and the diagnosis of a saved run, without ranks. Returns a Replay, as "
    "Session.replay does.",
    examples=(
        ("%ddp_replay run.json", "the board and the diagnosis of a saved run"),
        ("replay = %ddp_replay run.json", "as a value: replay.at(-5) is 5 seconds before its end"),
    ),
    run=lambda _ui, args: Replay.read(args.path),
    options=(Option("path", "a file that %ddp_save wrote", completer=files),),
    value_display=ValueDisplay(Replay, _show_replay),
)
