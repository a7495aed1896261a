"""`ddp-notebook mcp`: the jobs of this user for a program, over stdio.

It only looks; with `--allow-control` it has tools that act on a job as well.

The protocol is the package `mcp`'s, which is an extra: ``pip install "ddp-notebook[mcp]"``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import listing, targets
from ddp_notebook.jobs.acting.control import Control, table_to_json
from ddp_notebook.jobs.commandline import ALLOW_CONTROL
from ddp_notebook.jobs.verdict import places_to_json

_LOOKS = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
_ACTS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_ENDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
_ABOUT = (
    "Says what is wrong with distributed PyTorch jobs of this user on this host, alive or ended. "
)
_ONLY_LOOKS = "Nothing changes what a job does."
_MAY_ACT = (
    "take_over, step, abort and give_back change what a job does, on this host, if it was started "
    "with DDP_NOTEBOOK=1; the others change nothing."
)


def server(allow_control: bool = False) -> MCPServer:
    """The server with its tools; with those that act on a job only where that is allowed."""
    about = _ABOUT + (_MAY_ACT if allow_control else _ONLY_LOOKS)
    made = MCPServer("ddp-notebook", instructions=about)
    for tool in (jobs, why, where):
        made.add_tool(tool, annotations=_LOOKS)
    if allow_control:
        control = _Acts()
        for acts in (control.take_over, control.step, control.give_back):
            made.add_tool(acts, annotations=_ACTS)
        made.add_tool(control.abort, annotations=_ENDS)
    return made


class _Acts:
    """The tools that act on a job; the end of this process gives it back."""

    def __init__(self) -> None:
        self._control = Control()

    def take_over(self, target: list[str]) -> dict[str, Any]:
        """Take over a job that runs on this host, so that it can be stepped and aborted.

        `target` is a pid, as of why. Nothing changes in it yet. A job that was taken over before
        is given back.
        """
        return _in_words(lambda: self._control.take_over(target))

    def step(self, ranks: str | None = None, to: str | None = None) -> dict[str, Any]:
        """Pause each rank before its next collective; then let it do that, and pause it again.

        `ranks` such as 0,2-3; all by default. `to` is a collective such as all_reduce: on until
        one is next. "end": no rank is paused any more. Returns a table of where each rank is.
        """
        return _in_words(lambda: table_to_json(self._control.step(ranks, to)))

    def abort(self, ranks: str | None = None) -> dict[str, Any]:
        """End what the job runs: each rank is interrupted as by Ctrl-C, and loses connections.

        Returns the pids of processes that run all the same.
        """
        return _in_words(lambda: self._control.abort(ranks))

    def give_back(self) -> dict[str, Any]:
        """Give the job back: no rank stays paused, and it goes on as before."""
        return _in_words(self._control.give_back)


def jobs() -> dict[str, Any]:
    """The distributed jobs of this user on this host: pids, ranks, which run, which are stuck."""
    return listing.to_json(listing.listed())


def why(target: list[str] | None = None) -> dict[str, Any]:
    """What is wrong with a job: findings with ranks, cause, remedy, evidence; or undecided.

    `target` is a pid (a rank's or the launcher's), or the folder or files that a job left: logs,
    dumps of torch's flight recorder. Without one: the job that runs, or the last one.
    """
    return _of_job(target, lambda job: job.why().to_json(job.name))


def where(target: list[str] | None = None) -> dict[str, Any]:
    """At which lines of the user's code each rank of a job is, or was last; `target` as of why."""
    return _of_job(target, lambda job: places_to_json(job.places(), job=job.name))


def _of_job(
    target: list[str] | None, answer: Callable[[targets.Target], dict[str, Any]]
) -> dict[str, Any]:
    return _in_words(lambda: answer(targets.on_this_host(target or [])))


def _in_words(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """An answer. Raises ToolError, whose words the program gets, where the call was wrong."""
    try:
        return answer()
    except UsageMistake as mistake:
        raise ToolError(str(mistake)) from mistake


if __name__ == "__main__":
    server(ALLOW_CONTROL in sys.argv[1:]).run("stdio")
