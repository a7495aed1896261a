"""`%ddp_break`, `%ddp_print`, `%ddp_set`: stop ranks at lines, and look into them there."""

from __future__ import annotations

import argparse

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics import options
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import CallerUi, NotebookUi, chosen_ranks
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.model import VariableTable, name_ranks
from ddp_notebook.rank.calls import Breakpoint

_NONE = (
    "There are no breakpoints. %ddp_break 7 stops at line 7 of the last cell, %ddp_break "
    "train.py:42 and %ddp_break Model.forward elsewhere"
)


def _break(ui: CallerUi, args: argparse.Namespace) -> None:
    ranks = chosen_ranks(ui.session, args)
    if args.clear:
        number = int(args.place) if args.place.isdecimal() else None
        if args.place and number is None:
            raise UsageMistake("--clear takes the number of a breakpoint, or none for all.")
        count = ui.session.clear_breakpoints(number)
        ui.say(f"{count} breakpoint{'' if count == 1 else 's'} cleared.")
        return
    if args.off or args.on:
        ui.session.enable_breakpoints(args.on)
        off = "Breakpoints are passed, breakpoint() too. On again: %ddp_break --on"
        ui.say("Breakpoints stop ranks." if args.on else off)
        return
    if not args.place:
        rows = ui.session.breakpoints()
        ui.say("\n".join(row.text for row in rows) or _NONE)
        return
    wanted = Breakpoint(
        0,
        ranks=ranks,
        condition=args.condition,
        count=args.count,
        once=args.once,
        log=args.log,
    )
    ui.say(ui.session.set_breakpoint(args.place, wanted).text)


def _print(ui: NotebookUi, args: argparse.Namespace) -> VariableTable:
    source = " ".join(args.expression)
    return ui.session.evaluate(source, chosen_ranks(ui.session, args), args.up)


PRINT = Verb(
    "ddp_print",
    about="Evaluate an expression on the ranks, where each stands: paused at a line, blocked in a "
    "collective, or idle. Equal values are shown once. Unlike %ddp_vars it runs your code. Returns "
    "a VariableTable.",
    examples=(
        ("%ddp_print loss.item() * 2", "on all ranks"),
        ("%ddp_print --ranks 1 --up 1 batch", "on rank 1, in the function that called this one"),
    ),
    run=_print,
    options=(
        options.ranks("evaluate it on these ranks only"),
        Option("--up N", "in the frame of yours N above", default=0),
        Option("expression", "a Python expression", nargs=argparse.REMAINDER),
    ),
)


def _set(ui: NotebookUi, args: argparse.Namespace) -> None:
    source = " ".join(args.assignment)
    table = ui.session.evaluate(source, chosen_ranks(ui.session, args), args.up, assign=True)
    failed = {rank for unread in table.unread for rank in unread.ranks}
    ranks = chosen_ranks(ui.session, args) or tuple(range(ui.session.record.snapshot.world_size))
    done = tuple(rank for rank in ranks if rank not in failed)
    lines = [f"{source} → {name_ranks(done)}"] if done else []
    lines += [f"{name_ranks(each.ranks)}: {each.why}" for each in table.unread]
    ui.say("\n".join(lines))


SET = Verb(
    "ddp_set",
    about="Assign a variable on the ranks, where each stands: of the function in which it is "
    "paused, or a global one.",
    examples=(
        ("%ddp_set lr = 0.1", "on all ranks"),
        ("%ddp_set --ranks 1 x = x * 2", "on rank 1, from its own value"),
    ),
    run=_set,
    options=(
        options.ranks("assign it on these ranks only"),
        Option("--up N", "in the frame of yours N above", default=0),
        Option("assignment", "such as x = 3", nargs=argparse.REMAINDER),
    ),
)


BREAK = Verb(
    "ddp_break",
    about="Stop ranks at a line, from the next time that they come to it, also in code that runs "
    "already. The cell ends when they are paused there; %ddp_step moves them on. Without a place: "
    "list the breakpoints.",
    examples=(
        ("%ddp_break train.py:42", "line 42 of a file, imported or not"),
        ("%ddp_break 7 --ranks 1", "line 7 of the last cell, rank 1 alone"),
        ('%ddp_break "cell 2:7"', "line 7 of cell 2"),
        ('%ddp_break Model.forward --if "x.isnan().any()"', "a function, on a condition"),
        ('%ddp_break 7 --log "step {i} loss {loss}"', "does not stop: prints a line each time"),
        ("%ddp_break --clear 1", "breakpoint 1 is no more; without a number, none is"),
    ),
    run=_break,
    options=(
        options.ranks("stop these ranks only"),
        Option("--if CONDITION", "stop where this Python expression is true", dest="condition"),
        Option("--count N", "stop from the Nth time on", default=1),
        Option("--once", "stop one time only"),
        Option("--log MESSAGE", "print this instead of stopping, filled in as an f-string is"),
        Option("--clear", "take away the breakpoint of this number, or all"),
        Option("--off", "pass all breakpoints, breakpoint() too, until --on"),
        Option("--on", "stop at breakpoints again"),
        Option("place", "FILE:LINE, a function, or a line of the last cell", nargs="?", default=""),
    ),
    button=VerbButton(_break, str),
)
