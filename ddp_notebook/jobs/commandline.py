"""`ddp-notebook why | where`: arguments, texts, JSON, exit codes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import dead
from ddp_notebook.jobs.verdict import VERSION, Verdict
from ddp_notebook.model import Place, codec
from ddp_notebook.views import findings as view

_TARGET = (
    "the folder or files that a job left: dumps of torch's flight recorder, torchrun's log folder, "
    "logs, a run written by %%ddp_save"
)
_CODES = "Exit codes: 0 no problem, 1 a finding, 2 undecided, 3 wrong usage."


def add(commands: Any) -> None:
    """Add the commands to a parser's."""
    for name, about, run in (
        ("why", "say what is wrong with a job, by the files that it left", _why),
        ("where", "say where each rank of a job was in its code", _where),
    ):
        command = commands.add_parser(
            name, help=about, description=f"{about.capitalize()}. {_CODES}", allow_abbrev=False
        )
        command.add_argument("target", nargs="+", help=_TARGET)
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(run=run)


def _why(args: argparse.Namespace) -> int:
    verdict = dead.why(_paths(args.target))
    _print(verdict.to_json() if args.json else _as_text(verdict))
    return verdict.outcome.value


def _where(args: argparse.Namespace) -> int:
    paths = dead.where(_paths(args.target))
    _print(_places_json(paths) if args.json else _places_text(paths))
    return 0


def _paths(targets: list[str]) -> list[Path]:
    for target in targets:
        if target.isascii() and target.isdigit() and not Path(target).exists():
            raise UsageMistake(
                f"{target} is no file. Name the folder or files that the job left, as in: "
                "ddp-notebook why LOGS DUMPS"
            )
    return [Path(target).expanduser() for target in targets]


def _as_text(verdict: Verdict) -> str:
    lines = [view.text(verdict.diagnosis), "", f"This stands on: {verdict.basis}."]
    return "\n".join([*lines, *(f"Note: {note}" for note in verdict.unread)])


def _places_text(paths: Mapping[int, tuple[Place, ...]]) -> str:
    if not paths:
        return "No line of the user's code is known of any rank."
    return "\n".join(
        f"rank {rank}: {' → '.join(map(str, path))}"
        + (f": {path[-1].text}" if path[-1].text else "")
        for rank, path in paths.items()
    )


def _places_json(paths: Mapping[int, tuple[Place, ...]]) -> dict[str, Any]:
    return {
        "format": "ddp_notebook places",
        "version": VERSION,
        "ranks": {str(rank): codec.encode(path) for rank, path in paths.items()},
    }


def _print(what: str | dict[str, Any]) -> None:
    print(what if isinstance(what, str) else json.dumps(what, indent=2))
