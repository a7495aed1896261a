"""`%ddp_vars`, `%ddp_push`, `%ddp_pull`, `%ddp_output`: variables and output of the ranks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.magics import options
from ddp_notebook.magics.options import files, variables
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi, chosen_ranks, value_or_json
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model import VariableTable, name_ranks


def _vars(ui: NotebookUi, args: argparse.Namespace) -> VariableTable | None:
    table = ui.session.variables(args.names, chosen_ranks(ui.session, args))
    return value_or_json(ui, args, table)


VARS = Verb(
    "ddp_vars",
    about="Show the variables of the ranks in one table, at any time: equal values once, what "
    "differs between ranks with ≠. Of ranks that are blocked also those of the function that they "
    "are in. Runs none of your code. Returns a VariableTable.",
    examples=(
        ("%ddp_vars", "all of them"),
        ("%ddp_vars loss lr --ranks 0,2", "two of them, on two ranks"),
    ),
    run=_vars,
    options=(
        options.ranks("show those of these ranks only"),
        Option("names", "variables of the ranks", nargs="*"),
        options.JSON,
    ),
)


def _push(ui: NotebookUi, args: argparse.Namespace) -> None:
    names = " ".join(args.names).replace(",", " ").split()  # with commas, as in Python
    if any("=" in name for name in names):
        raise UsageMistake(
            "%ddp_push takes names: assign the variable in a line of its own, without a magic, and "
            "name it here. On the ranks: %ddp_set x = 3"
        )
    for name in names:
        if name not in ui.variables:
            raise UsageMistake(f"The notebook has no variable {name!r}.")
    values = {name: ui.variables[name] for name in names}
    ranks = ui.session.push(values, chosen_ranks(ui.session, args))
    ui.say(f"{', '.join(names)} → {name_ranks(ranks)}")


PUSH = Verb(
    "ddp_push",
    about="Send variables of the notebook to the ranks.",
    examples=(
        ("%ddp_push batch", "the notebook's batch, to all ranks"),
        ("%ddp_push batch lr --ranks 1", "two variables, to rank 1"),
    ),
    run=_push,
    options=(
        options.ranks("send them to these ranks only"),
        Option("names", "one or more variables of the notebook", nargs="+", completer=variables),
    ),
)


def _pull(ui: NotebookUi, args: argparse.Namespace) -> Any:
    ranks = chosen_ranks(ui.session, args)
    # The kernel does not import torch by itself, which takes seconds: without it tensors come as
    # arrays of NumPy.
    values = ui.session.pull(args.name, ranks, keep_tensors="torch" in sys.modules)
    value = next(iter(values.values())) if ranks is not None and len(ranks) == 1 else values
    ui.variables[args.target or args.name] = value
    return value


PULL = Verb(
    "ddp_pull",
    about="Bring a variable of the ranks into the notebook. Its value is a dict from rank to "
    "value, or the value itself when --ranks names a single rank.",
    examples=(
        ("%ddp_pull loss", "loss = {0: ..., 1: ...}, a value per rank"),
        ("%ddp_pull loss --ranks 0 --as first_loss", "rank 0's own, under another name"),
    ),
    run=_pull,
    options=(
        options.ranks("bring it from these ranks only"),
        Option("name", "a variable of the ranks"),
        Option("--as NAME", "its name in the notebook (default: the same)", dest="target"),
    ),
)


def _output(ui: NotebookUi, args: argparse.Namespace) -> None:
    for rank in chosen_ranks(ui.session, args) or (0,):
        # All of it is in a file of the rank's: a notebook gets a megabyte of a cell at most.
        output = ui.session.values.output(rank, log=args.log)
        if args.save:
            path = named_file(args.save)
            path.write_text(output, "utf-8")
            ui.say(f"Rank {rank}: {len(output):,} characters → {path}")
            continue
        lines = output.splitlines()
        left_out = max(0, len(lines) - args.tail)
        note = f" (the last {args.tail} of {len(lines):,} lines; --save FILE writes all of them)"
        ui.say(f"── rank {rank}{note if left_out else ''} ──")
        ui.say("\n".join(lines[left_out:]) or "(nothing)")


OUTPUT = Verb(
    "ddp_output",
    about="Show what a rank wrote in its last cell: while the cell runs, or when it was too much "
    "to show (over 1 MB).",
    examples=(
        ("%ddp_output --ranks 0", "the last lines that rank 0 wrote"),
        ("%ddp_output --ranks 1 --log", "messages of C code, not written through Python"),
    ),
    run=_output,
    options=(
        options.ranks("show what these ranks wrote", default="0"),
        Option("--tail N", "how many lines", default=100),
        Option("--save FILE", "write all of it to FILE instead", completer=files),
        Option(
            "--log", "messages of C code: output of the process that was not written through Python"
        ),
    ),
)
