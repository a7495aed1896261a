"""`%%ddp`, `%ddp_run`, `%ddp_wait`: a cell or a script on the ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.launchers import launched_by
from ddp_notebook.magics import options
from ddp_notebook.magics.options import files
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi, chosen_ranks, value_or_json
from ddp_notebook.magics.verb import ValueDisplay, Verb
from ddp_notebook.magics.verbs.ranks import start_ranks
from ddp_notebook.model import LAST_STEP, Ledger, name_ranks
from ddp_notebook.session import InitOptions
from ddp_notebook.session.options import STORES, parse_settings
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.run import CellRun


def _run(ui: NotebookUi, args: argparse.Namespace, run: Callable[..., CellResult]) -> Ledger | None:
    """Call `run` as the options of every run say, and show it in this cell."""
    ledger = LAST_STEP if args.ledger else 0
    if args.step not in (None, "collective"):
        ledger = int(args.step) if ledger and args.step.isdecimal() else 0
    if not ledger and (args.json or args.step not in (None, "collective")):
        raise UsageMistake(
            "--step N and --json are for the ledger: %ddp_run --ledger --step 3 train.py. "
            "To pause before each collective: --step collective"
        )

    def begin(begun: Callable[[CellRun], None]) -> CellResult:
        return run(
            number=ui.prompt_number,
            wait=args.wait,
            hold=args.step == "collective",
            detach=args.detach,
            cpu=args.cpu,
            started=begun,
            ledger=ledger,
        )

    if args.detach:
        ui.runs.show_detached(begin)
        return None
    result = ui.runs.show(begin)
    return value_or_json(ui, args, result.ledger) if result.ledger is not None else None


def _run_cell(ui: NotebookUi, args: argparse.Namespace) -> Ledger | None:
    if args.cell is None:
        raise UsageMistake("%%ddp takes a cell: write %%ddp on its first line.")
    run = partial(
        ui.session.run_cell,
        args.cell,
        chosen_ranks(ui.session, args),
        magic_line=f"%%ddp {args.line}".rstrip(),
        transform=ui.shell.transform_cell,
        colors=ui.shell.colors,
    )
    return _run(ui, args, run)


CELL = Verb(
    "ddp",
    kind="line_cell",
    about="Run the cell on the ranks, until every rank has finished it or none can make progress.",
    examples=(
        ("%%ddp --ranks 0,2-3", "the cell on three ranks"),
        ("%%ddp", "on all ranks"),
        ("%%ddp --detach", "a long one: the notebook stays free; %ddp_wait shows its end"),
        ("%%ddp --step collective", "pausing before each collective; %ddp_step continues"),
        ("%%ddp --ledger", "its last training step, parameter by parameter; returns a Ledger"),
    ),
    run=_run_cell,
    options=(options.ranks("run it on these ranks only"), *options.RUN_OPTIONS),
)


_ONLY_OURS = {"--detach", "--wait"}
"""Options of %ddp_run that hardly any script has."""


def _run_script(ui: NotebookUi, args: argparse.Namespace) -> Ledger | None:
    if args.world_size is not None:
        running = ui.session.record.snapshot.world_size
        if not running:
            start_ranks(ui, InitOptions(world_size=args.world_size))
        elif running != args.world_size:
            raise UsageMistake(
                f"{running} ranks are running, not {args.world_size}. Run it on them (leave out "
                f"--world-size, or use --ranks), or type %ddp_shutdown first."
            )
    ui.session.pool.need("%ddp_run")
    if not args.python and not Path(args.script).exists():
        _refuse_launcher([*(["python", "-m"] if args.m else []), args.script, *args.arguments])
    # All words behind the script are the script's own, so this is only said, and the script gets
    # them.
    if behind := sorted(_ONLY_OURS.intersection(args.arguments)):
        ui.say(
            f"{behind[0]} stands behind the script, so the script gets it. Options of %ddp_run "
            f"come first: %ddp_run {behind[0]} {args.script}"
        )
    run = partial(
        ui.session.run_script,
        args.script,
        arguments=args.arguments,
        ranks=chosen_ranks(ui.session, args),
        store=args.store,
        settings=parse_settings(args.set, ui.session.record.snapshot.world_size),
        as_module=args.m,
        as_python=args.python,
    )
    return _run(ui, args, run)


def _refuse_launcher(words: Sequence[str]) -> None:
    """Raise UsageMistake for a command line that would start ranks within ranks."""
    called, program = launched_by(words) or ("", "")
    if words[0] in ("python", "python3") and not called and words[1:2] != ["-m"]:
        called, program = words[0], " ".join(words[1:])
    if called:
        named = program or "train.py"
        raise UsageMistake(f"%ddp_run is the launcher. Leave {called} out: %ddp_run {named}")


SCRIPT = Verb(
    "ddp_run",
    about="Run a torchrun-style script, unchanged, in a new process for each rank: the ranks' own "
    "variables and groups stay as they are. Options come before the script, its own arguments "
    "after it. On some ranks only, they are ranks 0, 1, ... for the script. Its processes stay "
    "until something else runs: %ddp_pull gets what it assigned at its outermost level. Unlike "
    "under torchrun, each process is a fork that has torch loaded and threads of its own: outer "
    "frames in inspect.stack(), the command line in ps, sys.modules, warning filters and the "
    "numbers of file descriptors differ, and sys.getswitchinterval() is 0.5 ms. All ranks share "
    "one seed of hash(), as under torchrun with PYTHONHASHSEED set: a mistake that comes of the "
    "order of a set of strings does not show here. Its "
    "environment is the kernel's (FORCE_COLOR, MPLBACKEND, ...), as with `!torchrun`; "
    "GLOO_SOCKET_IFNAME is loopback, breakpoint() stops the rank, input() raises EOFError, and "
    "objects are not deleted at the end.",
    examples=(
        ("%ddp_run train.py --epochs 2", "a script, as torchrun would"),
        ("%ddp_run --step collective train.py", "pausing before each collective"),
        ("%ddp_run --ledger --step 3 train.py", "with its third training step, by parameter"),
        ("%ddp_run --detach train.py", "a long one: %ddp_wait shows its end"),
        ("%ddp_run --python spawn.py", "a script that starts its ranks itself"),
        ("%ddp_run -m package.train --epochs 2", "a module, as torchrun -m would"),
    ),
    run=_run_script,
    options=(
        options.ranks("run it on these ranks only"),
        Option(
            "--store",
            "who hosts the script's store: the session, or rank 0; torch lets that one listen on "
            "all addresses of this host",
            choices=STORES,
        ),
        options.settings("1:RANK=0"),
        Option("-n --world-size N", "start N ranks first, unless they are running", type=int),
        Option("-m", "run a module by its name, such as package.train, in place of a script"),
        Option(
            "--python",
            "run it once, as python does, without torchrun's variables: a script that starts its "
            "ranks itself, as by mp.spawn; they are diagnosed",
        ),
        *options.RUN_OPTIONS,
        Option("script", "the script", completer=files),
        Option("arguments", "its arguments", nargs=argparse.REMAINDER),
    ),
)


def _wait(ui: NotebookUi, args: argparse.Namespace) -> CellResult:
    if args.timeout is not None and not args.timeout >= 0:  # NaN is not at least 0 either
        raise UsageMistake("--timeout is in seconds, 0 or more: %ddp_wait --timeout 60")
    runs: list[CellRun] = []
    known = ui.session.runs.detached

    def begin(begun: Callable[[CellRun], None]) -> CellResult:
        def started(run: CellRun) -> None:
            runs.append(run)
            if known is not None and known.reported and run is known:
                ui.say(f"{run.heading} is over. Its result again:")
            begun(run)

        return ui.session.wait(args.timeout, started)

    # An interrupt of %ddp_wait interrupts the ranks: it stands for the cell that they are in.
    result = ui.runs.show(begin, to_the_end=False)
    if result.pending and result.steps is None:
        ui.say(
            f"{runs[0].heading} is still running on {name_ranks(result.pending)}. "
            "Continue to wait: %ddp_wait. See where it is: %ddp_where. End it: %ddp_abort"
        )
    if result.ledger is not None and result.error is None:
        ui.show(result.ledger)
    ui.displays.shown_already()
    return result


def _show_value(ui: NotebookUi, result: CellResult) -> None:
    if ui.displays.are_needed:  # not in the cell of the %ddp_wait that gave it
        ui.runs.show_result(result)


WAIT = Verb(
    "ddp_wait",
    about="Wait for the cell or script that was detached, or that ranks are still in, and show "
    "it. An interrupt stops the ranks, as it does with a cell. Returns a CellResult.",
    examples=(
        ("%ddp_wait --timeout 60", "waits for a minute at most"),
        ("%ddp_wait --timeout 0", "only looks at it"),
        ("%ddp_wait", "waits for the end"),
    ),
    run=_wait,
    options=(
        Option(
            "--timeout S",
            "wait S seconds at most; the ranks continue (default: until the end)",
            type=float,
        ),
    ),
    value_display=ValueDisplay(CellResult, _show_value),
)
