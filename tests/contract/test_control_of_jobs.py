"""Programs and shells act on a prepared job: only where they say so, and it is given back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prepared_ranks import goes_on, in_its_loop, issued, launch
from support import eventually

from ddp_notebook import __main__

mcp = pytest.importorskip("mcp")
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
OURS = [sys.executable, "-m", "ddp_notebook"]
ACTS = {"take_over", "step", "abort", "give_back"}


def with_server(talk: Callable[[Any], Awaitable[None]], *options: str) -> None:
    """`talk` with a client of `ddp-notebook mcp`."""
    parameters = mcp.StdioServerParameters(
        command=OURS[0], args=[*OURS[1:], "mcp", *options], env=dict(os.environ)
    )

    async def run() -> None:
        async with (
            mcp.stdio_client(parameters) as (reads, writes),
            mcp.ClientSession(reads, writes) as client,
        ):
            await client.initialize()
            await talk(client)

    # In a thread of its own: the browser tests leave a loop running in this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(asyncio.wait_for(run(), 150))).result()


def test_a_job_is_controlled_by_a_program_and_a_shell_that_were_allowed_to(
    tmp_path: Path, started: list[subprocess.Popen], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = launch(tmp_path, started, "steps")
    pid = str(ranks[0].pid)
    job = eventually(lambda: in_its_loop(ranks[0].pid), 120)

    async def acts(client: Any) -> None:
        tools = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        assert {name for name, hints in tools.items() if not hints.read_only_hint} == ACTS
        assert [name for name, hints in tools.items() if hints.destructive_hint] == ["abort"]
        early = await client.call_tool("step", {})
        assert early.is_error and "No job is taken over" in str(early.content)
        taken = (await client.call_tool("take_over", {"target": [pid]})).structured_content
        assert taken["not_taken_over"] == {} and taken["job"] == f"job {pid} (train.py)"
        assert goes_on(job), "nothing has changed in it yet"
        first = (await client.call_tool("step", {})).structured_content
        assert "paused" in str(first["rows"]), first
        at = issued(job)
        await client.call_tool("step", {"to": "all_reduce"})
        assert all(0 <= b - a <= 1 for a, b in zip(at, issued(job), strict=True)), "one each"
        wrong = await client.call_tool("step", {"to": "nowhere"})
        assert wrong.is_error and "There is no goal 'nowhere'" in str(wrong.content)
        back = (await client.call_tool("give_back", {})).structured_content
        assert back == {"job": f"job {pid} (train.py)", "not_given_back": []}
        assert goes_on(job)
        await client.call_tool("take_over", {"target": [pid]})
        await client.call_tool("step", {})

    with_server(acts, "--allow-control")
    assert goes_on(job), "the end of the server gives it back"

    stepped = subprocess.run(
        [*OURS, "step", pid, "--take-over"], input="\nnowhere\n", text=True, capture_output=True
    )
    assert stepped.returncode == 0, stepped.stderr
    assert stepped.stdout.count("paused") > 2 and "There is no goal 'nowhere'" in stepped.stdout
    assert stepped.stdout.endswith("It is given back.\n")
    assert goes_on(job)
    for command in ("step", "abort"):
        with pytest.raises(SystemExit) as refused:
            __main__.main([command, pid])
        assert refused.value.code == 3 and "--take-over" in capsys.readouterr().err
    assert goes_on(job)
    assert __main__.main(["abort", pid, "--take-over"]) == 0
    assert capsys.readouterr().out == f"job {pid} (train.py): its ranks have ended.\n"
    assert {rank.wait(30) for rank in ranks} <= {-signal.SIGINT, 1}
