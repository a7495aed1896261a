"""`%ddp_init`, `%ddp_restart`, `%ddp_abort`, `%ddp_shutdown`: the ranks from start to end."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch.addresses import LOOPBACK
from ddp_notebook.launch.placement import HostSpec, parse_hosts
from ddp_notebook.magics import options
from ddp_notebook.magics.live_board import PLACES, Place
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import CallerUi, NotebookUi, chosen_ranks
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.model import Board, Status, StepTable
from ddp_notebook.session import InitOptions, preflight
from ddp_notebook.session.options import (
    BACKENDS,
    DEVICES,
    INIT_METHODS,
    LAUNCHERS,
    STORES,
    parse_settings,
)
from ddp_notebook.views import board as board_view
from ddp_notebook.views.board_rows import board
from ddp_notebook.views.notebook import mime_bundle

_FRESH = "Fresh ranks: %ddp_restart"


def _init(ui: NotebookUi, args: argparse.Namespace) -> Board | StepTable:
    hosts = _hosts(args)
    world_size = args.world_size
    if world_size is None:
        world_size = sum(host.ranks or 1 for host in hosts) or 4
    return start_ranks(
        ui,
        InitOptions(
            world_size=world_size,
            backend=args.backend,
            device=args.device,
            timeout_s=args.timeout,
            master_addr=args.master_addr,
            master_port=args.master_port,
            init_method=args.init_method,
            gpus=tuple(gpu.strip() for gpu in args.gpus.split(",") if gpu.strip()),
            share_gpu=args.share_gpu,
            launcher=args.launcher,
            threads_per_rank=args.threads_per_rank,
            store=args.store,
            settings=parse_settings(args.set, world_size),
            step=args.step,
            hosts=hosts,
            python=args.python,
            folder=args.folder,
            give_up_after_s=args.give_up_after,
        ),
        replace=args.replace,
        place=args.board,
    )


def _hosts(args: argparse.Namespace) -> tuple[HostSpec, ...]:
    """Return the hosts that a user names. Raises UsageMistake."""
    if args.hosts and args.hostfile:
        raise UsageMistake("Name the hosts by --hosts or by --hostfile: one of the two.")
    if args.hostfile:
        try:
            with files.opened(Path(args.hostfile).expanduser()) as stream:
                return parse_hosts(stream.read(1 << 20).decode("utf-8", "replace"))
        except OSError as error:
            raise UsageMistake(f"--hostfile {args.hostfile}: {error.strerror}.") from None
    alone = [name for name in ("python", "folder") if getattr(args, name)]
    if alone and not args.hosts:
        raise UsageMistake(f"--{alone[0]} is for other hosts: it goes with --hosts.")
    return parse_hosts(args.hosts) if args.hosts else ()


def start_ranks(
    ui: NotebookUi, wanted: InitOptions, *, replace: bool = False, place: Place = "auto"
) -> Board | StepTable:
    """Start ranks under a live board; when setup fails, the finding stands above the error."""
    known = ui.session.record.snapshot
    alive = not known.ended and len(known.with_status(Status.DEAD)) < known.world_size
    if ui.session.ready and alive and not replace:
        # Run All after a change of nothing: the ranks stay, and so do their variables.
        if wanted != ui.session.options or len(known.with_status(Status.READY)) < known.world_size:
            return ui.session.init(wanted)  # which raises, and says what to type
        ui.open_board(place)
        ui.say(f"{known.world_size} ranks run already, and keep their variables. {_FRESH}")
        return ui.session.status()
    # What will be crowded is said before anything is started.
    more = not ui.session.running or wanted.world_size > known.world_size
    if more and (crowded := preflight.warning(wanted)):
        ui.say(crowded)
    ui.open_board(place)
    try:
        with ui.progress():
            board = ui.session.init(wanted, replace=replace)
        if not wanted.step:
            return board
        table = ui.session.stepping.table()
        # The table stays live, so that a step that is taken in another cell is seen here, too.
        if ui.output.is_live:
            ui.runs.follow_set_up(table)
            ui.displays.shown_already(table)
        return table
    # The board is closed with the state in which setup failed: the session goes on to change, as
    # ranks are ended, and would show something else.
    except SetupFailed as failure:
        ui.board.close(failure.board)
        if failure.diagnosis is not None and failure.diagnosis.findings:
            ui.output.publish(mime_bundle(failure.diagnosis))
        raise
    except BaseException:
        ui.board.close()
        raise
    finally:
        ui.board.nudge()


INIT = Verb(
    "ddp_init",
    about="Start one process per rank and bring torch.distributed up, stage by stage. Returns the "
    "board; with --step, a table of where the ranks are.",
    examples=(
        ("%ddp_init --world-size 4", "four ranks, ready for %%ddp cells"),
        ("%ddp_init --world-size 4 --step", "stage by stage: continue with %ddp_step"),
        ("%ddp_init --set 1:MASTER_PORT=23457", "with a mistake of your own on rank 1"),
        ("%ddp_init --world-size 2 --replace", "two ranks; 0 and 1 keep their variables"),
        ("%ddp_init --hosts gpu01:4,gpu02:4", "eight ranks on two hosts that ssh reaches"),
    ),
    run=_init,
    options=(
        Option(
            "-n --world-size N",
            "number of ranks (default 4; with --hosts those that it names, one for a host without "
            "a number)",
            type=int,
        ),
        Option("--backend", "auto: nccl when each rank has a GPU, else gloo", choices=BACKENDS),
        Option("--device", "auto: GPUs if there are any, else CPUs", choices=DEVICES),
        Option("--timeout S", "seconds that a stage of setup may wait", default=60.0),
        Option("--master-addr ADDRESS", "where the store listens", default=LOOPBACK),
        Option("--master-port PORT", "its port (default: a free one)", default=0),
        Option(
            "--init-method",
            "how the ranks find each other: environment variables, a TCP address, a file",
            choices=INIT_METHODS,
        ),
        Option("--gpus LIST", "the GPUs to use, one per rank, such as 0,1,3"),
        Option("--share-gpu", "several ranks on one GPU by NCCL: real hangs, no real speeds"),
        Option(
            "--launcher",
            "fork: fast, less memory; process: ordinary processes; auto: fork if possible",
            choices=LAUNCHERS,
        ),
        Option("--threads-per-rank N", "default: cores / ranks, at least 1", default=0),
        Option(
            "--store",
            "who hosts the store: the session, as torchrun's agent does, or rank 0, as in a plain "
            "script",
            choices=STORES,
        ),
        options.settings("1:MASTER_PORT=23457"),
        Option(
            "--hosts LIST",
            "start the ranks on these hosts, by your ssh, each with so many of them: gpu01,gpu02:4",
        ),
        Option("--hostfile FILE", "a file that names them: a line each, such as gpu02 slots=4"),
        Option("--python PATH", "the Python there (default: where this one is)"),
        Option("--folder PATH", "the current folder there (default: as here, else the home)"),
        Option(
            "--give-up-after S",
            "seconds after which a host ends its ranks when it hears nothing of the notebook",
            default=120.0,
        ),
        Option("--step", "pause before the first stage; %ddp_step continues"),
        Option(
            "--board",
            "in this cell, beside the notebook, nowhere; auto: as the last, the first beside the "
            "notebook where jupyter-widgets' sidecar is installed",
            choices=PLACES,
        ),
        Option(
            "--replace",
            "change to this number of ranks: those that stay keep their variables",
        ),
    ),
)


def _restart(ui: CallerUi, args: argparse.Namespace) -> Board:
    ui.session.pool.need("%ddp_restart")
    ranks = chosen_ranks(ui.session, args)
    ui.open_board()
    return ui.session.restart(ranks)


RESTART = Verb(
    "ddp_restart",
    about="Start new processes for ranks, and build the process group again. Returns the board.",
    examples=(
        ("%ddp_restart --ranks 1", "a new process for rank 1; the others keep theirs"),
        ("%ddp_restart", "new processes for all ranks"),
    ),
    run=_restart,
    options=(options.ranks("restart these ranks only"),),
    button=VerbButton(_restart, board_view.brief, moves_ranks=True),
)


def _abort(ui: CallerUi, args: argparse.Namespace) -> Board:
    return ui.session.abort(chosen_ranks(ui.session, args))


ABORT = Verb(
    "ddp_abort",
    about="Free ranks that are blocked in setup, a cell or a script. A rank whose process "
    "survives keeps its variables. Returns the board.",
    examples=(
        ("%ddp_abort", "free the ranks that are blocked; they keep their variables"),
        ("%ddp_abort --ranks 1", "end what runs there; without its group every rank is freed"),
    ),
    run=_abort,
    options=(options.ranks("end what runs on these ranks only"),),
    button=VerbButton(_abort, board_view.brief),
)


def _shutdown(ui: NotebookUi, _args: argparse.Namespace) -> None:
    had_ranks = ui.session.running
    # Before the ranks end: what they were at last stays in the notebook, as ranks that ended.
    snapshot = replace(ui.session.record.snapshot, ended="the ranks were shut down.")
    ui.board.close(board(snapshot) if had_ranks else None)
    ui.session.shutdown(keep_warm=True)
    ui.say("All ranks have ended." if had_ranks else "There were no ranks.")


SHUTDOWN = Verb(
    "ddp_shutdown",
    about="End the ranks and everything that was started for them.",
    examples=(
        ("%ddp_shutdown", "ends the ranks"),
        ("%unload_ext ddp_notebook", "ends them and takes the magics away"),
    ),
    run=_shutdown,
)
