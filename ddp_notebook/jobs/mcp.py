"""`ddp-notebook mcp`: the jobs of this user for a program, over stdio.

Its tools only look.

The protocol is the package `mcp`'s, which is an extra: ``pip install "ddp-notebook[mcp]"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import find
from ddp_notebook.jobs.target import Target, on_this_host
from ddp_notebook.jobs.verdict import places_to_json

_LOOKS = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
_ABOUT = (
    "Says what is wrong with distributed PyTorch jobs of this user on this host, alive or ended. "
    "Nothing changes what a job does."
)


class _Server(MCPServer):
    """Refuses arguments of a name that a tool does not have.

    The package ignores them: `{"targets": [...]}` would be answered with the newest job, and the
    program that asked would take that for the job it named.
    """

    async def call_tool(
        self, name: str, arguments: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        """Call a tool. Raises ToolError, in words, for arguments of a wrong name."""
        for tool in await self.list_tools():
            known = tool.input_schema.get("properties", {})
            wrong = [argument for argument in arguments if argument not in known]
            if tool.name == name and wrong:
                has = f"its only argument is {', '.join(known)}" if known else "it has no arguments"
                raise ToolError(f"{name} has no argument {', '.join(wrong)}: {has}.")
        return await super().call_tool(name, arguments, *more, **named)


def server() -> MCPServer:
    """Return the server with its tools."""
    made = _Server("ddp-notebook", instructions=_ABOUT)
    for tool in (jobs, why, where):
        made.add_tool(tool, annotations=_LOOKS)
    return made


def jobs() -> dict[str, Any]:
    """List the distributed jobs of this user on this host: pids, ranks, which run, which are
    stuck."""
    return find.to_json(find.listed())


def why(target: list[str] | None = None) -> dict[str, Any]:
    """Say what is wrong with a job: findings with ranks, cause, remedy, evidence; or undecided.

    `target` is a pid (a rank's or the launcher's), or the folder or files that a job left: logs,
    dumps of torch's flight recorder. Without one: the job that runs, or the last one.
    """
    return _of_job(target, lambda job: job.why().to_json(job.name))


def where(target: list[str] | None = None) -> dict[str, Any]:
    """Say at which lines of the user's code each rank of a job is, or was last; `target` as of
    why."""
    return _of_job(target, lambda job: places_to_json(job.places(), job=job.name))


# An error of ours is an answer for the program, and no crash of the server.
def _of_job(target: list[str] | None, answer: Callable[[Target], dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer(on_this_host(target or []))
    except UsageMistake as mistake:
        raise ToolError(str(mistake)) from mistake  # its words are what the program gets


if __name__ == "__main__":
    server().run("stdio")
