"""An editor at a rank: it gets a paused rank at its frame, steps it, and gives it back."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from editors import EditorClient, port_of
from kernels import Kernel
from results import rows, texts, values
from support import GONE_WITHIN_S, eventually, is_alive

from ddp_notebook.errors import UsageMistake
from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session import InitOptions, Session


@pytest.fixture(autouse=True)
def nothing_left(ranks2: Session) -> Iterator[None]:
    """Each test begins without editors and breakpoints, and with idle ranks."""
    yield
    ranks2.editors.close(None)
    ranks2.breakpoints.clear()
    if any(not run.done for run in ranks2.runs.all):
        ranks2.abort()


def refused(port: int) -> bool:
    """Whether nobody listens there any more."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def shown(session: Session) -> str:
    """Where rank 1 stands, as the session heard last."""
    stop = session.runs.all[-1].stops.get(1)
    return f"{stop.line} {stop.why}" if stop is not None else ""


def undebugged(session: Session) -> bool:
    """Whether nothing of debugpy is at work on rank 1 any more: no trace, no port, no thread."""
    session.run_cell(
        "import sys, threading\nnames = {t.name.partition('-')[0] for t in threading.enumerate()}\n"
        "left = sys.gettrace(), sys.settrace.__module__, 'pydevd.Reader' in names\n"
        "assert left == (None, 'sys', False), left\n"
    ).raise_for_error()
    return session.editors.close(None) == "Ranks 0-1 had no port open for an editor."


PAUSED = (
    "def work(n):\n    a = n + rank\n    breakpoint()\n    b = a * 2\n"
    "    c = b + 1\n    return c\ntotal = work(10)\ndist.barrier()\nprint('total', total)\n"
)


def test_a_paused_rank_is_handed_to_an_editor_and_comes_back(ranks2: Session) -> None:
    assert set(rows(ranks2.run_cell(PAUSED).steps)) == {(0, 1)}
    text = ranks2.editors.open((1,))
    port = port_of(text)
    assert f"Rank 1 waits for an editor at 127.0.0.1:{port}" in text
    assert port_of(ranks2.editors.open((1,))) == port
    editor = EditorClient(port).attach()
    editor.ask("configurationDone")
    thread, function, line = editor.stopped()
    assert (function, line) == ("work", 4)
    assert editor.variables(thread)["a"] == "11"
    assert editor.value(thread, "a * 100") == "1100"
    eventually(lambda: "in the editor" in shown(ranks2))
    assert values(ranks2.evaluate("a")) == {(0,): "10", (1,): "11"}
    assert refused(port)
    assert "has an editor already" in ranks2.editors.open((1,))
    editor.ask("next", threadId=thread)
    assert editor.stopped()[1:] == ("work", 5)
    eventually(lambda: shown(ranks2) == "5 in the editor")
    with pytest.raises(UsageMistake, match="an editor has it: set a breakpoint"):
        ranks2.step((1,), to="7")
    assert "line 6" in rows(ranks2.step((1,)))[(1,)]
    assert editor.stopped()[1:] == ("work", 6)
    assert values(ranks2.evaluate("b", (1,))) == {(1,): "22"}
    editor.ask("disconnect", terminateDebuggee=True)
    eventually(lambda: "the editor has left it here" in shown(ranks2))
    with pytest.raises(UsageMistake, match="has left it in debugpy: first %ddp_step --to end"):
        ranks2.editors.open((1,))
    assert "line 7" in rows(ranks2.step((1,)))[(1,)]
    assert values(ranks2.evaluate("c", (1,))) == {(1,): "23"}
    assert "finished" in ranks2.step(to="end").title
    result = ranks2.wait(20)
    assert result.error is None
    assert "total 23" in texts(result)
    assert undebugged(ranks2)
    editor.close()


def test_its_breakpoints_and_ours_stop_in_it_and_a_rank_it_loses_is_ours(
    ranks2: Session, tmp_path: Path
) -> None:
    """A module's and a cell's; then the editor is killed, and the rank stays where it was."""
    module = tmp_path / "edited_module.py"
    module.write_text("def double(x):\n    y = x * 2\n    return y\n")
    ranks2.run_cell(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport edited_module\n")
    editor = EditorClient(port_of(ranks2.editors.open((1,)))).attach()
    editor.stop_at(str(module), 3)
    editor.ask("configurationDone")
    ranks2.breakpoints.add(f"{module}:2", Breakpoint(0, ranks=(1,)))
    result = ranks2.run_cell("z = edited_module.double(rank + 3)\ndist.barrier()\nprint(z)\n")
    assert "edited_module.py:2" in rows(result.steps)[(1,)]
    thread, function, line = editor.stopped()
    assert (function, line, editor.variables(thread)["x"]) == ("double", 2, "4")
    editor.ask("continue", threadId=thread)
    assert editor.stopped()[1:] == ("double", 3)
    assert editor.variables(thread)["y"] == "8"
    eventually(lambda: shown(ranks2) == "3 in the editor")
    editor.ask("continue", threadId=thread)
    assert texts(ranks2.wait(20)) == "6\n8\n"
    ranks2.run_cell("z = edited_module.double(1)\n")
    assert editor.stopped()[2] == 2
    editor.close()
    eventually(lambda: "the editor has left it here" in shown(ranks2))
    assert "edited_module.py:3" in rows(ranks2.step((1,)))[(1,)]
    ranks2.step(to="end")
    assert ranks2.wait(20).error is None
    assert undebugged(ranks2)


def test_an_abort_and_off_free_what_an_editor_holds(ranks2: Session) -> None:
    ranks2.run_cell(PAUSED)
    editor = EditorClient(port_of(ranks2.editors.open((1,)))).attach()
    editor.ask("configurationDone")
    thread, _, _ = editor.stopped()
    editor.ask("next", threadId=thread)
    assert editor.stopped()[2] == 5
    ranks2.abort()
    assert all(run.done for run in ranks2.runs.all)
    ranks2.run_cell("dist.barrier()").raise_for_error()
    ranks2.run_cell(PAUSED)  # and the editor is still there
    assert editor.stopped()[2] == 4
    assert "The editor leaves rank 1" in ranks2.editors.close((1,))
    eventually(lambda: "the editor has left it here" in shown(ranks2))
    assert "finished" in ranks2.step(to="end").title
    ranks2.wait(20)
    assert undebugged(ranks2)
    port = port_of(ranks2.editors.open((0,)))
    assert ranks2.editors.close(None) == "The port of rank 0 is closed."
    assert refused(port)
    editor.close()


def test_a_script_has_editors_too_and_what_cannot_be_is_said(
    ranks2: Session, tmp_path: Path
) -> None:
    for ranks, why in ((None, "has one rank"), ((7,), "Rank 7 does not exist")):
        with pytest.raises(UsageMistake, match=why):
            ranks2.editors.open(ranks)
    script = tmp_path / "edited.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nx = dist.get_rank()\n"
        "breakpoint()\nx += 1\nprint('x', x)\ndist.destroy_process_group()\n"
    )
    ranks2.run_script(str(script))
    editor = EditorClient(port_of(ranks2.editors.open((1,)))).attach()
    editor.stop_at(str(script), 6)
    editor.ask("configurationDone")
    thread, _, line = editor.stopped()
    assert line == 4
    editor.ask("continue", threadId=thread)
    assert editor.stopped()[2] == 6
    assert editor.value(thread, "x") == "2"
    editor.ask("disconnect")
    editor.close()
    eventually(lambda: "the editor has left it here" in shown(ranks2))
    ranks2.step(to="end")
    assert texts(ranks2.wait(20)) == "x 1\nx 2\n"


def held(session: Session) -> EditorClient:
    """An editor that has rank 1 at the line of its `breakpoint()`."""
    editor = EditorClient(port_of(session.editors.open((1,)))).attach()
    editor.ask("configurationDone")
    editor.stopped()
    eventually(lambda: "in the editor" in shown(session))
    return editor


LATE = """
from ddp_notebook.rank import runtime
debugpy = runtime.current().core.editor._debugpy
plain, looks, moved = debugpy.suspend, debugpy.is_suspended, threading.Event()
def late(frame):
    assert moved.wait(60)
    plain(frame)
def is_suspended(thread):
    moved.set()
    return looks(thread)
debugpy.suspend, debugpy.is_suspended = late, is_suspended
"""


def test_a_step_that_comes_before_the_editor_holds_the_rank_is_not_lost(ranks2: Session) -> None:
    ranks2.run_cell(f"import threading\n{LATE}").raise_for_error()
    ranks2.run_cell(PAUSED)
    editor = EditorClient(port_of(ranks2.editors.open((1,)))).attach()
    editor.ask("configurationDone")
    eventually(lambda: "in the editor" in shown(ranks2))
    assert "line 5" in rows(ranks2.step((1,)))[(1,)]
    assert [editor.stopped()[2], editor.stopped()[2]] == [5, 5]  # two stops: both at the last line
    editor.ask("disconnect")
    editor.close()
    eventually(lambda: "the editor has left it here" in shown(ranks2))
    ranks2.step(to="end")
    ranks2.wait(20).raise_for_error()
    ranks2.run_cell("debugpy.suspend, debugpy.is_suspended = plain, looks").raise_for_error()
    assert undebugged(ranks2)


def test_an_interrupt_frees_what_an_editor_holds(ranks2: Session) -> None:
    """The cell is not over, for rank 0 computes."""
    busy = (
        "kept = 7\nif rank == 1:\n    breakpoint()\nimport time\nwhile 1:\n    time.sleep(0.01)\n"
    )
    editors: list[EditorClient] = []

    def interrupt_when_held() -> None:
        eventually(lambda: bool(ranks2.runs.all[-1].stops))
        editors.append(held(ranks2))
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt_when_held)
    result = ranks2.run_cell(busy, started=lambda _: interrupting.start())
    interrupting.join()
    assert "interrupted" in str(result.error)
    assert result.pending == ()
    editors[0].close()
    eventually(lambda: "had no port open" in ranks2.editors.close(None))
    assert texts(ranks2.run_cell("dist.barrier()\nprint(kept)")) == "7\n"
    assert undebugged(ranks2)


def test_a_restart_ends_a_rank_that_an_editor_holds_and_a_new_one_has_no_editor() -> None:
    session = Session()
    try:
        session.init(InitOptions(world_size=2, device="cpu"))
        session.run_cell(PAUSED)
        editor = held(session)
        pid = session.record.snapshot.ranks[1].pid
        session.restart()
        assert not is_alive(pid)
        editor.close()
        assert undebugged(session)
        assert session.run_cell("dist.barrier()").error is None
    finally:
        session.shutdown()


def test_nothing_outlives_a_kernel_whose_rank_an_editor_holds() -> None:
    with Kernel() as kernel:
        kernel.init(2)
        kernel.run_well(f"%%ddp\n{PAUSED}")
        port = port_of(kernel.run_well("%ddp_attach_editor --ranks 1").text)
        editor = EditorClient(port).attach()
        editor.ask("configurationDone")
        editor.stopped()
        left = kernel.pids().all
        kernel.kill()
        eventually(lambda: not any(map(is_alive, left)), GONE_WITHIN_S)
        editor.close()


WITHOUT = (
    "from ddp_notebook.rank.editor import debugpy_private\n"
    "there = debugpy_private.is_installed\ndebugpy_private.is_installed = lambda: rank == 0\n"
)
LACKING = (
    "needed = debugpy_private._NEEDED\nhad = needed['pydevd']\n"
    "needed['pydevd'] = (*had, 'PyDB.of_a_release_to_come')\n"
    "print(debugpy_private.Debugpy(print, print).load())\nneeded['pydevd'] = had\n"
)


def test_a_rank_without_debugpy_says_what_to_install(ranks2: Session) -> None:
    ranks2.run_cell(WITHOUT).raise_for_error()
    with pytest.raises(UsageMistake) as caught:
        ranks2.editors.open((0, 1))
    assert str(caught.value) == (
        "No editor can be let in (rank 1: it needs debugpy 1.8.2 or later in the Python of the "
        'ranks, and it is not there). Type: %pip install "ddp-notebook[editor]", or %pip install '
        "debugpy; then %ddp_attach_editor again. Without it: %ddp_step, %ddp_print and %ddp_where"
    )
    assert "had no port open" in ranks2.editors.close(None)
    lacks = ranks2.run_cell(f"debugpy_private.is_installed = there\n{LACKING}")
    assert texts(lacks) == "pydevd.PyDB.of_a_release_to_come\n"
