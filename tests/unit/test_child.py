"""What a forked process does when it ends, and what is told of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from ddp_notebook.launch.called_process import CalledProcess
from ddp_notebook.launch.client import ForkServerClient

CODE = """
import os, sys, weakref
from ddp_notebook.launch import child

class Thing: pass

things = [Thing(), Thing()]
say = lambda text: print(text, flush=True)
weakref.finalize(things[0], say, "loaded before the fork")
child.disown_finalizers()
if os.fork() == 0:
    weakref.finalize(things[1], say, "made by the child")
    child.leave(0)
os.wait()
say("the child is gone")
"""


def test_a_fork_takes_apart_what_it_made_and_not_what_was_loaded_before() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [
        "made by the child",
        "the child is gone",
    ]


RAISES = """
import os, sys
from ddp_notebook.launch import child

class Broken:
    def write(self, text): pass

if os.fork() == 0:
    try:
        sys.stdout = Broken()  # without `closed`, as many loggers are
        child.run({"calls": []})
    finally:  # as the fork server, which ends its session's processes and removes their folder
        os.write(1, b"it is in the frames of the server ")
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fork_never_returns_to_the_fork_server_even_if_its_streams_raise() -> None:
    said = subprocess.run(
        [sys.executable, "-c", RAISES], capture_output=True, text=True, check=True
    )
    assert said.stdout == "0\n"


def test_a_fork_server_that_ends_by_itself_is_named_and_not_the_children_it_ends(
    tmp_path: Path,
) -> None:
    server, lost, ends = ForkServerClient("process"), threading.Event(), list[str]()
    try:
        server.ready.result(60)
        CalledProcess(server, "signal:pause", {}, tmp_path / "log", lambda: ends.append("paused"))
        server.on_lost(lost.set)
        server._send({"cmd": "own"})  # without a folder: it raises
        assert lost.wait(60)
        assert not ends
    finally:
        server.close()
