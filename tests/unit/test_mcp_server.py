"""`ddp-notebook mcp`, asked by the client of the package that it is made with."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

mcp = pytest.importorskip("mcp")
LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 5, in <module>
[rank1]:     load()
[rank1]: ValueError: no rows left
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 8, in <module>
[rank0]:     dist.barrier()
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1
"""


def test_a_program_asks_what_is_wrong_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "job.log"
    log.write_text(LOG)
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "ddp_notebook", "mcp"]
    )

    async def ask() -> None:
        async with (
            mcp.stdio_client(parameters) as (reads, writes),
            mcp.ClientSession(reads, writes) as client,
        ):
            await client.initialize()
            tools = (await client.list_tools()).tools
            assert {tool.name for tool in tools} == {"jobs", "why", "where"}
            assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
            answer = await client.call_tool("why", {"target": [str(log)]})
            verdict = answer.structured_content
            assert verdict is not None and verdict["verdict"] == "finding"
            assert verdict["findings"][0]["ranks"] == [1]
            places = await client.call_tool("where", {"target": [str(log)]})
            assert places.structured_content is not None
            assert set(places.structured_content["ranks"]) == {"0", "1"}
            elsewhere = await client.call_tool("why", {"target": ["gpu07:7"]})
            assert elsewhere.is_error and "jobs on this host only" in str(elsewhere.content)
            wrong = await client.call_tool("why", {"target": [str(tmp_path / "none")]})
            assert wrong.is_error and "does not exist" in str(wrong.content)
            for tool, says in (
                ("why", "why has no argument targets: its only argument is target."),
                ("where", "where has no argument targets: its only argument is target."),
                ("jobs", "jobs has no argument targets: it has no arguments."),
            ):
                misnamed = await client.call_tool(tool, {"targets": [str(log)]})
                assert misnamed.is_error and says in str(misnamed.content)

    # In a thread of its own: the browser tests leave a loop running in this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(asyncio.wait_for(ask(), 120))).result()
