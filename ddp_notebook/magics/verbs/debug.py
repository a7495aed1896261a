"""`%ddp_break`, `%ddp_frame`, `%ddp_print`, `%ddp_set`: ranks at lines."""

from __future__ import annotations

import argparse
import re

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics import options
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import CallerUi, NotebookUi, chosen_ranks
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.model import VariableTable, counted, name_ranks
from ddp_notebook.rank.calls import ON, Breakpoint
from ddp_notebook.session.options import check_choice
from ddp_notebook.views.step_rows import frames_text

_NONE = (
    "There are no breakpoints. %ddp_break 7 stops at line 7 of the last cell, %ddp_break "
    "train.py:42 and %ddp_break Model.forward elsewhere"
)


def _break(ui: CallerUi, args: argparse.Namespace) -> None:
    known, ranks, on = ui.session.breakpoints, chosen_ranks(ui.session, args), args.on or ""
    if args.clear:
        if args.place and not args.place.isdecimal():
            raise UsageMistake("--clear takes the number of a breakpoint, or none for all.")
        count = known.clear(int(args.place) if args.place else None)
        ui.say(f"{counted(count, 'breakpoint')} cleared.")
    elif args.off or args.on == "":
        known.enable(not args.off)
        off = "Breakpoints are passed, breakpoint() too. On again: %ddp_break --on"
        ui.say(off if args.off else "Breakpoints stop ranks.")
    elif not args.place and args.on is None:
        ui.say("\n".join(row.text for row in known.rows()) or _NONE)
    else:
        if on:
            check_choice("--on", on, ON)
        if on and args.place:
            raise UsageMistake("A place and --on are two breakpoints: set one, then the other.")
        wanted = Breakpoint(
            0,
            ranks=ranks,
            condition=args.condition,
            count=args.count,
            once=args.once,
            log=args.log,
            on=on,
        )
        ui.say(known.add(args.place, wanted).text)


def _break_by_click(ui: CallerUi, args: argparse.Namespace) -> None:
    """Do a page's order, which has places and numbers, and no code to run on ranks."""
    # A page may be shown to anyone, as in a notebook that was sent: it must not bring code to the
    # ranks.
    if args.condition or args.log:
        raise UsageMistake("A board sets plain breakpoints. Type that one in a cell.")
    _break(ui, args)


_BEHIND = re.compile(
    r"(?P<source>.*\S)\s+(?:--ranks[ =](?P<ranks>[\w=,-]+)|--up[ =](?P<up>-?\d+)"
    r"|--(?P<flag>each|watch|unwatch))",
    re.S,
)
"""An option behind the Python text, of which hardly any ends so."""


def source_of(text: str, args: argparse.Namespace) -> str:
    """The Python text of a line; options behind it count as those before it."""
    # People write `%ddp_print loss --ranks 1` as they would in a shell. `loss --ranks` is also a
    # valid expression, but hardly one that is meant.
    while (behind := _BEHIND.fullmatch(text)) is not None:
        if behind["flag"] and behind["flag"] not in args:
            break
        text = behind["source"]
        if behind["ranks"]:
            args.ranks = behind["ranks"]
        elif behind["up"]:
            args.up = int(behind["up"])
        else:
            setattr(args, behind["flag"], True)
    return text


def _print(ui: NotebookUi, args: argparse.Namespace) -> VariableTable | None:
    source = source_of(args.expression, args)
    looking = ui.session.looking
    # Without an expression, --watch lists what is shown after each step; --unwatch takes one away,
    # or all.
    if args.unwatch or (args.watch and not source):
        if args.unwatch:
            looking.unwatch(source)
        watched = ", ".join(looking.watched) or "nothing"
        ui.say(f"Shown after each step: {watched}")
        return None
    table = ui.session.evaluate(source, chosen_ranks(ui.session, args), args.up, own_text=args.each)
    if args.watch:
        looking.watch(source)
    return table


PRINT = Verb(
    "ddp_print",
    about="Evaluate an expression on the ranks, where each one is: paused at a line, blocked in a "
    "collective, where it raised, or idle. Equal values are shown once. Unlike %ddp_vars it runs "
    "your code. Returns a VariableTable.",
    examples=(
        ("%ddp_print loss.item() * 2", "on all ranks"),
        ("%ddp_print --ranks 1 --up 1 batch", "on rank 1, in the function that called this one"),
        ("%ddp_print --watch loss", "now, and below the table of each step"),
        ("%ddp_print --each config", "by the value's own repr"),
    ),
    run=_print,
    options=(
        options.ranks("evaluate it on these ranks only"),
        Option("--up N", "in the frame of yours N above (default: that of %ddp_frame)", type=int),
        Option("--each", "call the value's own repr on each rank, which may be your code"),
        Option("--watch", "show it after each step, too; without an expression, list those"),
        Option("--unwatch", "stop showing it after steps; without an expression, stop showing all"),
        Option("expression", "a Python expression", is_text=True, nargs="?"),
    ),
    is_python=True,
)


def _frame(ui: NotebookUi, args: argparse.Namespace) -> None:
    if not (args.frame in ("", "up", "down") or args.frame.isdecimal()):
        raise UsageMistake(f"{args.frame!r} is no frame. Type %ddp_frame up, down, or its number.")
    looking = ui.session.looking
    stands = looking.choose(args.frame, chosen_ranks(ui.session, args))
    lines = [frames_text(stand.ranks, stand.frames, looking.up, stand.why) for stand in stands]
    ui.say("\n".join(line for group in lines for line in group))


FRAME = Verb(
    "ddp_frame",
    about="Choose the frame that %ddp_print and %ddp_set look at, until the ranks move: 0 is the "
    "innermost of your functions, the last one shown. Without one: show the frames where ranks "
    "stand, or have raised.",
    examples=(
        ("%ddp_frame up", "the function that called this one"),
        ("%ddp_frame 0", "the innermost one again"),
        ("%ddp_frame", "all of them, and which is chosen"),
    ),
    run=_frame,
    options=(
        options.ranks("show these ranks only"),
        Option("frame", "up, down, or a number", nargs="?", default=""),
    ),
)


def _set(ui: NotebookUi, args: argparse.Namespace) -> None:
    source = source_of(args.assignment, args)
    table = ui.session.evaluate(source, chosen_ranks(ui.session, args), args.up, assign=True)
    # An assignment may work on some ranks and fail on others: both are said.
    failed = {rank for unread in table.unread for rank in unread.ranks}
    ranks = chosen_ranks(ui.session, args) or tuple(range(table.world_size))
    done = tuple(rank for rank in ranks if rank not in failed)
    lines = [f"{source} → {name_ranks(done)}"] if done else []
    lines += [f"{name_ranks(unread.ranks)}: {unread.why}" for unread in table.unread]
    ui.say("\n".join(lines))


SET = Verb(
    "ddp_set",
    about="Assign a variable on the ranks, where each one is: in the function in which it is "
    "paused, or a global one.",
    examples=(
        ("%ddp_set lr = 0.1", "on all ranks"),
        ("%ddp_set --ranks 1 x = x * 2", "on rank 1, from its own value"),
    ),
    run=_set,
    options=(
        options.ranks("assign it on these ranks only"),
        Option("--up N", "in the frame of yours N above (default: that of %ddp_frame)", type=int),
        Option("assignment", "such as x = 3", is_text=True, nargs="?"),
    ),
    is_python=True,
)


BREAK = Verb(
    "ddp_break",
    about="Stop ranks at a line the next time they reach it, also in code that is already "
    "running. The cell ends when they are paused there; %ddp_step moves them on. While a "
    "breakpoint is set, or the code has breakpoint() in it, collectives do not time out; those "
    "issued before do, and the table says when; so do new_group and a wait with its own timeout. "
    "On Python 3.11 code runs slower while a breakpoint is set (sys.settrace, as under pdb), "
    "and threads that torch starts do not stop at it. For an editor, call debugpy.listen on the "
    "rank yourself: it asks for no password. "
    "A cell that was edited and runs again has the breakpoints of its old version. --on nan "
    "means the first such value of a run, on whichever rank; a step that a GradScaler skips "
    "counts only if its scale is down to 1. Without a place: list the breakpoints.",
    examples=(
        ("%ddp_break train.py:42", "line 42 of a file, imported or not"),
        ("%ddp_break 7 --ranks 1", "line 7 of the last cell, rank 1 alone"),
        ('%ddp_break "cell 2:7"', "line 7 of cell 2"),
        ('%ddp_break Model.forward --if "x.isnan().any()"', "a function, on a condition"),
        ('%ddp_break 7 --log "step {i} loss {loss}"', "does not stop: prints a line each time"),
        ("%ddp_break --on nan", "at the first loss or gradient that is not finite"),
        ("%ddp_break --clear 1", "removes breakpoint 1; without a number, all"),
    ),
    run=_break,
    options=(
        options.ranks("stop these ranks only"),
        Option("--if CONDITION", "stop where this Python expression is true", dest="condition"),
        Option("--count N", "stop from the Nth time on", default=1),
        Option("--once", "stop one time only"),
        Option("--log MESSAGE", "print this instead of stopping, filled in as an f-string is"),
        Option("--clear", "remove the breakpoint with this number, or all"),
        Option("--off", "pass all breakpoints, breakpoint() too, until --on"),
        Option(
            "--on WHAT",
            f"stop not at a line but where one of these happens: {', '.join(ON)}; without a word, "
            "stop at breakpoints again",
            nargs="?",
            const="",
            default=None,
            completer=options.one_of(ON),
        ),
        Option("place", "FILE:LINE, a function, or a line of the last cell", nargs="?", default=""),
    ),
    button=VerbButton(_break_by_click, str),
    is_python=True,
)
