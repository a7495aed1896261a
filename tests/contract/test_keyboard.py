"""What asks for a person at a terminal, on ranks: `exit()`, debuggers, `input()`."""

from __future__ import annotations

import pytest
from results import rank_pids

from ddp_notebook.errors import CellFailed
from ddp_notebook.session import Session
from ddp_notebook.session.runs.endings import CellResult


def text(result: CellResult) -> str:
    """What every rank printed, the same on all of them."""
    assert [group.ranks for group in result.outputs] == [(0, 1)]
    return "".join(item.text for item in result.outputs[0].items)


@pytest.mark.parametrize(
    ("ending", "raised"),
    [
        ("exit()", "raised SystemExit (cell line 3)"),
        ("quit(2)", "raised SystemExit: 2 (cell line 3)"),
        ("get_ipython().ask_exit()", "raised SystemExit (cell line 3)"),
        ("import sys; sys.exit(0)", "raised SystemExit: 0 (cell line 3)"),
        ("import asyncio; await asyncio.sleep(0); exit()", "raised SystemExit (cell line 3)"),
        ("import textwrap; (lambda: quit('no data'))()", "raised SystemExit: no data"),
    ],
)
def test_exit_ends_the_cell_and_neither_the_rank_nor_its_variables(
    ranks2: Session, ending: str, raised: str
) -> None:
    pids = rank_pids(ranks2)
    # A filter of the user's own would show IPython's "To exit: use 'exit', 'quit', or Ctrl-D".
    ranks2.run_cell("import warnings; warnings.simplefilter('always')").raise_for_error()
    result = ranks2.run_cell(f"kept = 'still there'\n{ending}\nprint('not reached')")
    assert isinstance(result.error, CellFailed)
    assert raised in str(result.error)
    assert "exit() ends the cell on a rank, not the rank" in str(result.error)
    assert result.outputs == ()
    assert "%tb" not in result.tracebacks[0].items[0].text
    seen = ranks2.run_cell("import os\nprint(kept, os.getpid())")
    assert {g.items[0].text for g in seen.outputs} == {f"still there {pid}\n" for pid in pids}


def test_exit_in_a_callback_of_the_event_loop_ends_the_callback_and_not_the_rank(
    ranks2: Session,
) -> None:
    pids = rank_pids(ranks2)
    later = "import asyncio, os, sys\nloop = asyncio.get_running_loop()\nended = asyncio.Event()\n"
    stop = "def stop():\n    loop.call_soon(ended.set)\n    sys.exit(3)\nloop.call_soon(stop)\n"
    seen = ranks2.run_cell(later + stop + "await ended.wait()\nprint(os.getpid())")
    seen.raise_for_error()
    assert {g.items[-1].text for g in seen.outputs} == {f"{pid}\n" for pid in pids}


def test_a_process_that_a_rank_forked_ends_when_it_is_asked_to(ranks2: Session) -> None:
    """It had the engine's handler of SIGTERM, which did nothing there: `join` never came back."""
    source = (
        "import multiprocessing, time\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start(); child.terminate(); child.join(20); print(child.exitcode); child.kill()"
    )
    seen = ranks2.run_cell(source)
    assert {g.items[-1].text for g in seen.outputs} == {"-15\n"}


def test_exit_without_brackets_ends_a_cell_that_is_nothing_else(ranks2: Session) -> None:
    assert "raised SystemExit (cell line 2)" in str(ranks2.run_cell("exit").error)
    shown = ranks2.run_cell("x = 1\nexit").outputs[0].items[0].data["text/plain"]
    assert shown == "Type exit() to end the cell on this rank. To end the ranks: %ddp_shutdown"


def test_exit_in_a_module_that_a_cell_calls_ends_the_cell(ranks2: Session) -> None:
    source = (
        "import types\nm = types.ModuleType('m')\n"
        "exec('def leave():\\n    exit(5)', vars(m))\nm.leave()"
    )
    assert "raised SystemExit: 5 (cell line 5)" in str(ranks2.run_cell(source).error)


@pytest.mark.parametrize(
    "stop",
    [
        "breakpoint()",
        "__import__('pdb').set_trace()",
        "__import__('pdb').Pdb().set_trace()",
        "__import__('IPython.core.debugger').core.debugger.set_trace()",
        "__import__('IPython').embed()",
    ],
)
def test_whatever_stops_a_process_elsewhere_stops_a_rank(ranks2: Session, stop: str) -> None:
    result = ranks2.run_cell(f"{stop}\nprint('end')")
    assert result.steps is not None
    assert "ranks 0 and 1 at cell" in result.steps.title
    assert result.steps.rows[0].text.count("line 2") == 1
    ranks2.step(to="end")
    assert text(ranks2.wait()) == "end\n"


def test_torchs_own_breakpoint_stops_one_rank_and_shows_the_others_waiting_for_it(
    ranks2: Session,
) -> None:
    result = ranks2.run_cell("dist.breakpoint()\nprint('end')")
    assert result.steps is not None
    assert {(row.ranks, row.state, row.waits_for) for row in result.steps.rows} == {
        ((0,), "paused", ()),
        ((1,), "waiting", (0,)),
    }
    ranks2.step(to="end")
    assert ranks2.wait().error is None


def test_a_breakpoint_in_an_expression_says_why_it_does_not_stop(ranks2: Session) -> None:
    ranks2.run_cell("breakpoint()\nx = 1\n")
    ranks2.evaluate("breakpoint()")
    ranks2.step(to="end")
    shown = text(ranks2.wait(10))
    assert "An expression that is evaluated stops nowhere" in shown
    assert "No cell" not in shown


def test_a_breakpoint_in_a_process_that_a_rank_started_says_why_it_does_not_stop(
    ranks2: Session,
) -> None:
    source = (
        "import os\npid = os.fork()\nif not pid:\n    breakpoint()\n    os._exit(0)\n"
        "os.waitpid(pid, 0)[1]"
    )
    result = ranks2.run_cell(source)
    assert result.steps is None
    assert result.error is None


@pytest.mark.parametrize("look", ["%debug", "import pdb; pdb.pm()"])
def test_debug_after_an_error_shows_the_users_line_and_variables(
    ranks2: Session, look: str
) -> None:
    ranks2.run_cell("def scale(model, factor):\n    return model(factor / 0)\nscale(None, 7)")
    shown = text(ranks2.run_cell(look))
    assert "  model = None\n  factor = 7\n" in shown
    assert "A debugger cannot ask for commands on a rank" in shown


@pytest.mark.parametrize("ask", ["input('name? ')", "from getpass import getpass; getpass()"])
def test_a_rank_that_asks_the_user_says_how_to_send_the_answer(ranks2: Session, ask: str) -> None:
    result = ranks2.run_cell(f"try:\n    {ask}\nexcept EOFError as error:\n    print(error)")
    assert "Ask in a cell without %%ddp" in text(result)
    assert "%ddp_push answer" in text(result)


def test_a_magic_of_the_notebook_in_a_cell_for_ranks_says_where_it_belongs(
    ranks2: Session,
) -> None:
    shown = text(ranks2.run_cell("x = 1\nboard = %ddp_status"))
    assert shown.endswith(
        "%ddp_status belongs to the notebook, not to a rank: type it in a cell without %%ddp\n"
    )
