"""`ddp-notebook jobs | why | where | save | mcp`: arguments, texts, JSON, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ddp_notebook import files
from ddp_notebook.archive.save import check_target, line, write
from ddp_notebook.diagnosis import error_texts
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import find, hosts
from ddp_notebook.jobs.target import Target, ranks_of
from ddp_notebook.jobs.verdict import Verdict, places_to_json
from ddp_notebook.model import name_ranks
from ddp_notebook.views import findings as view
from ddp_notebook.views import stacks
from ddp_notebook.views.ansi import plain, preformatted

_TARGET = (
    "a pid of a job, a rank's or the launcher's (most is known of one that was started with "
    "DDP_NOTEBOOK=1); or the folder or files that a job left: dumps of torch's flight recorder, "
    "torchrun's log folder, logs, a run written by %%ddp_save; or HOST:PID for a job on another "
    "host, by your ssh. Without one: the job that runs, or the last one"
)
_SLURM = "the number of a job of Slurm's that runs: its hosts are asked by srun --overlap"
_MOST_CHARACTERS = 2**22
"""The most that is read of a log that is to be explained."""
_MCP = "ddp_notebook.jobs.mcp"
_CODES = "Exit codes: 0 no problem, 1 a finding, 2 undecided, 3 wrong usage."


def add(commands: Any) -> None:
    """Add the commands to a parser's."""
    for name, about, run in (
        ("jobs", "list your distributed jobs on this host", _jobs),
        ("why", "say what is wrong with a job, alive or ended", _why),
        ("where", "say where each rank of a job is in its code, or was", _where),
    ):
        command = commands.add_parser(
            name, help=about, description=f"{about.capitalize()}. {_CODES}", allow_abbrev=False
        )
        if run is _jobs:
            command.add_argument("host", nargs="?", help="another host, by your ssh")
        else:
            command.add_argument("target", nargs="*", help=_TARGET)
            command.add_argument("--slurm", metavar="JOB", help=_SLURM)
        if run is _where:
            add = command.add_argument
            add("--stacks", action="store_true", help="the stacks of all ranks, as one tree")
            add("--locals", action="store_true", help="the same, with the user's variables")
            add("--ranks", help="the stacks of these ranks only, as in 0,2-3")
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(run=run)
    about = "write what is known of a job to a file, for `why` and for a notebook"
    save = commands.add_parser("save", help=about, description=about, allow_abbrev=False)
    save.add_argument("target", help=_TARGET)
    save.add_argument("file", help="the file to write; - writes it to the output")
    save.add_argument("--force", action="store_true", help="replace a file that exists")
    save.set_defaults(run=_save)
    about = "explain an error text of torch, gloo, NCCL or torchrun, or a category of findings"
    explain = commands.add_parser("explain", help=about, description=about, allow_abbrev=False)
    explain.add_argument("text", nargs="*", help="the text, or a file; without one, stdin is read")
    explain.set_defaults(run=_explain)
    about = "run a script as a rank that can be asked, where DDP_NOTEBOOK=1 does nothing"
    # None of the arguments is an option of ours: all are the script's; the first may be -m.
    run = commands.add_parser(
        "run", help=about, description=about, prefix_chars="\0", add_help=False
    )
    run.add_argument("words", nargs=argparse.REMAINDER, help="[-m] train.py [args]")
    run.set_defaults(run=_become, module="ddp_notebook.run")
    about = "answer a program that speaks MCP, over stdin and stdout: jobs, why and where"
    mcp = commands.add_parser("mcp", help=about, description=about, allow_abbrev=False)
    mcp.set_defaults(run=_become, module=_MCP, words=[])


def _become(args: argparse.Namespace) -> NoReturn:
    """Execute a module as a new program in this process: it loads only what it needs."""
    if args.module == _MCP and find_spec("mcp") is None:  # an extra
        raise UsageMistake(
            'The package mcp is not installed. Type: pip install "ddp-notebook[mcp]"'
        )
    # The process is replaced, so that stdin and stdout are the MCP server's alone: what an import
    # here had printed would break the protocol.
    os.execv(sys.executable, [sys.executable, "-m", args.module, *args.words])  # noqa: S606


def _explain(args: argparse.Namespace) -> int:
    text = " ".join(args.text)
    if not text:
        text = sys.stdin.read(_MOST_CHARACTERS)
    elif len(args.text) == 1 and files.exists(Path(text)):
        text = files.tail(Path(text), _MOST_CHARACTERS)  # the errors are at its end
    if explained := error_texts.explain(text):
        print("\n".join(preformatted(explained)))
        return 0
    names = error_texts.near(text)
    more = f" Did you mean {' or '.join(names)}?" if names else ""
    raise UsageMistake(f"No error text that is known here is in it.{more}")


def _save(args: argparse.Namespace) -> int:
    target = hosts.named([args.target])
    if args.file == "-":
        print(line(target.saved()))
        return 0
    file = check_target(args.file, args.force, "ddp-notebook save JOB")
    write(file, target.saved(), args.force)
    print(f"{args.file}: {target.name}. Read it: ddp-notebook why {args.file}")
    return 0


def _jobs(args: argparse.Namespace) -> int:
    if args.host is not None:
        print(hosts.listed(args.host, *(["--json"] if args.json else [])))
        return 0
    jobs = find.listed()
    _print(find.to_json(jobs) if args.json else find.text(jobs))
    return 0


def _why(args: argparse.Namespace) -> int:
    target = hosts.named(args.target, args.slurm)
    verdict = target.why()
    if args.json:
        _print(verdict.to_json(target.name))
    else:
        _print(_chosen(args, target) + as_text(verdict))
    return verdict.outcome.value


def as_text(verdict: Verdict) -> str:
    """Return a verdict for a terminal."""
    lines = [
        view.text(verdict.diagnosis, "ddp-notebook explain {}"),
        "",
        f"This stands on: {verdict.basis}.",
    ]
    return "\n".join([*lines, *(f"Note: {note}" for note in verdict.unread)])


def _chosen(args: argparse.Namespace, target: Target) -> str:
    """Say which job was looked at, where none is named."""
    if args.target or args.slurm:
        return ""
    return (
        f"Of {plain(target.name)}: {plain(target.about)}. All jobs that left a record, which one "
        "that ended before it imported torch did not: ddp-notebook jobs\n\n"
    )


def _where(args: argparse.Namespace) -> int:
    target = hosts.named(args.target, args.slurm)
    tree = None
    if args.stacks or args.locals or args.ranks is not None:
        tree = target.where(ranks_of(target, args.ranks), args.locals)
    if args.json:
        _print(places_to_json(target.places(), tree, target.name))
        return 0
    if tree is not None:
        text = stacks.text(tree)
    elif paths := target.places():
        lines = []
        for rank, path in paths.items():
            at = " → ".join(map(str, path))
            lines.append(plain(": ".join(filter(None, (f"rank {rank}", at, path[-1].text)))))
        if unknown := tuple(rank for rank in range(target.world_size) if rank not in paths):
            why = f"ddp-notebook why {' '.join(args.target)}".rstrip()
            lines.append(f"{name_ranks(unknown)}: no line is known; what is: {why}")
        text = "\n".join(lines)
    else:
        about = f"{target.about[:1].upper()}{target.about[1:]}"
        text = f"No line of the user's code is known of any rank. {about}."
    _print(_chosen(args, target) + text)
    return 0


def _print(what: str | dict[str, Any]) -> None:
    print(what if isinstance(what, str) else json.dumps(what, indent=2))
