"""The verbs that look at ranks, as `%ddp_why` and `%ddp_mesh` do, and `%ddp_step`."""

from __future__ import annotations

import argparse

from ddp_notebook.diagnosis import catalogue, error_texts
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics import options
from ddp_notebook.magics.live_board import HOW, can_have_panel
from ddp_notebook.magics.options import one_of
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import CallerUi, NotebookUi, chosen_ranks, value_or_json
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.magics.verbs import attach
from ddp_notebook.model import Board, Category, Diagnosis, StackTree, Stage, StepTable
from ddp_notebook.model.ddp import MeshLayout, WrapStage
from ddp_notebook.rank.calls import How
from ddp_notebook.session.stepping import END
from ddp_notebook.views import findings, stacks, step_table
from ddp_notebook.views.step_rows import OPERATIONS

STATUS = Verb(
    "ddp_status",
    about="Show the board: where every rank is now. Returns it.",
    examples=(
        ("%ddp_status", "the board"),
        ("board = %ddp_status", "as a value: board.snapshot.ready"),
    ),
    run=lambda ui, _args: ui.session.status() if ui.attached is None else ui.attached.board(),
)


def _board(ui: NotebookUi, args: argparse.Namespace) -> Board | None:
    if ui.attached is not None:
        return ui.attached.board()
    ui.session.pool.need("%ddp_board")
    if not ui.output.is_live:
        ui.say("A live board needs Jupyter. This one, in a terminal, does not change by itself:\n")
        return ui.session.status()
    # sidecar in the kernel says nothing of the page, which needs its extension, too; without it the
    # board in the cell stays visible.
    beside = can_have_panel() and not args.here
    ui.open_board("side" if beside else "here")
    if not (beside or args.here):
        ui.say(HOW)
    return None


BOARD = Verb(
    "ddp_board",
    about="Open the live board again: beside the notebook in JupyterLab where jupyter-widgets' "
    "sidecar is installed, else in this cell. The board that was open stays as it is; of more than "
    "ten such, the oldest are pictures that cannot be searched any more.",
    examples=(
        ("%ddp_board", "a live board beside the notebook"),
        ("%ddp_board --here", "in this cell"),
    ),
    run=_board,
    options=(Option("--here", "in this cell"),),
)


def _why(ui: CallerUi, args: argparse.Namespace) -> Diagnosis | None:
    if args.explain is not None:
        ui.say(_explained(ui, args.explain))
        return None
    if ui.attached is not None:
        return attach.why(ui, args, ui.attached)
    return value_or_json(ui, args, ui.session.why())


def _explained(ui: CallerUi, text: str) -> str:
    """Explain an error text, a category or, without a word, the findings that are shown now."""
    if not text:
        job = ui.attached
        diagnosis = ui.session.why() if job is None else job.why().diagnosis
        shown = dict.fromkeys(finding.category for finding in diagnosis.findings)
        if not shown:
            raise UsageMistake(
                "There is no finding to explain. Name a category: %ddp_why --explain straggler"
            )
        return "\n\n".join(map(catalogue.page, shown))
    if explained := error_texts.explain(text):
        return explained
    names = error_texts.near(text) or [category.value for category in Category]
    few = f"Did you mean {' or '.join(names)}?"
    known = few if len(names) <= 3 else f"There are {', '.join(names)}."
    raise UsageMistake(f"There is no category {text!r}: a finding has it in brackets. {known}")


WHY = Verb(
    "ddp_why",
    about="Say what is wrong, which ranks cause it, and what to type. Returns a Diagnosis.",
    examples=(
        ("%ddp_why", "the cause, the ranks at fault, and the fix"),
        ("%ddp_why --json", "as JSON, for a program"),
        ("%ddp_why --explain", "more about the finding: what it means, how to correct it"),
    ),
    run=_why,
    options=(
        options.JSON,
        Option(
            "--explain CATEGORY",
            "explain the finding that is shown, a category, or an error text of torch, gloo or "
            "NCCL in quotes",
            nargs="?",
            const="",
            completer=one_of([category.value for category in Category]),
            default=None,
        ),
    ),
    button=VerbButton(_why, findings.text),
)


def _where(ui: CallerUi, args: argparse.Namespace) -> StackTree | None:
    if ui.attached is not None:
        return attach.where(ui, args, ui.attached)
    tree = ui.session.where(chosen_ranks(ui.session, args), args.locals)
    return value_or_json(ui, args, tree)


WHERE = Verb(
    "ddp_where",
    about="Show which line each rank is at, at any time: the Python stacks of all ranks as one "
    "tree, with the whole traceback of a rank that raised. Returns a StackTree.",
    examples=(
        ("%ddp_where --ranks 0,2 --locals", "the stacks of two ranks, with their variables"),
        ("%ddp_where", "the stacks of all ranks, merged into one tree"),
    ),
    run=_where,
    options=(
        options.ranks("show these ranks only"),
        Option("--locals", "with the variables in your own frames, as short texts"),
        options.JSON,
    ),
    button=VerbButton(_where, stacks.text),
)


def _step(ui: CallerUi, args: argparse.Namespace) -> StepTable:
    if args.to is not None and args.to not in _GOALS and not args.to.isdecimal():
        raise UsageMistake(
            f"--to {args.to}: there is no such goal. A line: --to 42. Or one of "
            f"{', '.join(_GOALS)}."
        )
    if args.into + args.out + (args.to is not None) > 1:
        raise UsageMistake("Give one of --into, --out and --to.")
    how = How.INTO if args.into else How.OUT if args.out else How.NEXT
    # The output since the last stop is shown with each step; of setup stages there is none.
    run = ui.session.runs.current
    paused = run is not None and run.paused
    table = ui.session.step(chosen_ranks(ui.session, args), args.to, how)
    if run is not None and paused:
        ui.show_news(run)
    return table


_COLLECTIVE = How.COLLECTIVE.value
# Stages of setup and of %ddp_wrap, and collectives by their names: which of them can be a goal
# depends on where the ranks are, and the session says so.
_GOALS = tuple(
    dict.fromkeys(
        [*(stage.value for stage in list(Stage)[1:]), *WrapStage, _COLLECTIVE, *OPERATIONS, END]
    )
)
"""The first stage is where a paused setup starts: it cannot be a goal."""

STEP = Verb(
    "ddp_step",
    about="Move paused ranks to the next line, past the next collective, or through the next "
    "stage of setup or of %ddp_wrap. Returns a table: where each rank is, and for which ranks it "
    "waits. Before Python 3.12, a trace function of yours, such as coverage's, is off in a "
    "thread while that is being stepped.",
    examples=(
        ("%ddp_step --ranks 1", "rank 1 alone one line, one collective or one stage further"),
        ("%ddp_step", "every paused rank"),
        ("%ddp_step --into", "into the function that the line calls; --out: out of this one"),
        ("%ddp_step --to 57", "to line 57 of this function; --to collective: to the next one"),
        ("%ddp_step --to verified", "through to the end of setup"),
    ),
    run=_step,
    options=(
        options.ranks("move these ranks only, and keep the others paused"),
        Option("--into", "from a line, into the function that it calls"),
        Option("--out", "from a line, until this function has returned"),
        Option(
            "--to GOAL",
            "continue to this line of the function, through this stage, to this collective, or to "
            "the end, which stops at the next breakpoint",
            completer=lambda word, _: [goal for goal in _GOALS if goal.startswith(word)],
            default=None,
        ),
    ),
    button=VerbButton(_step, step_table.text, moves_ranks=True),
)


def _mesh(ui: CallerUi, args: argparse.Namespace) -> MeshLayout | None:
    ui.session.pool.need("%ddp_mesh")
    return value_or_json(ui, args, ui.session.layout(chosen_ranks(ui.session, args)))


MESH = Verb(
    "ddp_mesh",
    about="Show the device mesh and the models on it, at any time: where each rank is, each "
    "parameter's placement, its bytes on each rank, and which ranks gather it when. Returns a "
    "MeshLayout.",
    examples=(
        ("%ddp_mesh", "the mesh, and what each rank holds"),
        ("%ddp_mesh --ranks dp=0", "the parameters of the ranks at a place in the mesh"),
    ),
    run=_mesh,
    options=(options.ranks("show these ranks only"), options.JSON),
)
