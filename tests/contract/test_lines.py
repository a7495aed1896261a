"""Stopping real ranks at lines: breakpoints, steps, and what frees ranks that are paused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from results import last_values, rank_pids, texts, values
from support import eventually

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import StepTable
from ddp_notebook.rank.calls import Breakpoint, How
from ddp_notebook.session import InitOptions, Session


@pytest.fixture(autouse=True)
def nothing_set(ranks2: Session) -> Iterator[None]:
    """Each test begins without breakpoints and with idle ranks."""
    yield
    ranks2.breakpoints.clear()
    ranks2.breakpoints.enable(True)
    if any(not run.done for run in ranks2.runs.all):
        ranks2.abort()


def where(table: StepTable | None) -> dict[tuple[int, ...], str]:
    """By ranks, at which line or in what they are."""
    assert table is not None
    return {row.ranks: row.text.partition(":")[0] for row in table.rows}


def test_a_cell_ends_where_its_ranks_stop_and_steps_move_them(ranks2: Session) -> None:
    source = (
        "import torch\nprint('begin')\nbreakpoint()\nx = rank\nif rank == 1:\n    x += 1\n"
        "t = torch.ones(2)\ndist.all_reduce(t)\nprint(x)\n"
    )
    result = ranks2.run_cell(source)
    number = ranks2.runs.all[-1].number
    assert texts(result) == "begin\n"
    assert result.pending == (0, 1)
    assert where(result.steps) == {(0, 1): f"cell {number}, line 4"}
    ranks2.step()
    ranks2.step()
    parted = ranks2.step()
    assert where(parted) == {(0,): f"cell {number}, line 8", (1,): f"cell {number}, line 7"}
    assert "rank 1 at line 7" in parted.title
    assert [line for line in parted.details if line.startswith("→")] == [
        "→  7      x += 1          ← rank 1",
        "→  8  t = torch.ones(2)   ← rank 0",
    ]
    ranks2.step((0,))
    waiting = ranks2.step((0,))
    assert {(row.ranks, row.state, row.waits_for) for row in waiting.rows} == {
        ((0,), "waiting", (1,)),
        ((1,), "paused", ()),
    }
    assert where(ranks2.step((1,), to="10")) == {
        (0, 1): f"cell {number}, line 10",
    }
    assert "finished" in ranks2.step(to="end").title
    assert "2\n" in texts(ranks2.wait())


def test_a_rank_at_a_line_goes_to_a_collective_and_back_to_lines(ranks2: Session) -> None:
    ranks2.run_cell("import torch\nbreakpoint()\na = 1\ndist.barrier()\nb = 2\n")
    table = ranks2.step(to="collective")
    assert [(row.state, row.text[:7]) for row in table.rows] == [("paused", "barrier")]
    assert set(where(ranks2.step(how=How.OUT))) == {(0, 1)}
    assert ranks2.wait().error is None


def test_to_the_end_goes_a_rank_whose_step_is_not_over_too(ranks2: Session) -> None:
    """It waits in a collective when the others are let go, and stops at no line after it."""
    ranks2.run_cell("breakpoint()\ndist.barrier()\na = 1\nb = 2\n")
    ranks2.step()
    waiting = ranks2.step((0,))
    assert {(row.ranks, row.state) for row in waiting.rows} == {((0,), "waiting"), ((1,), "paused")}
    assert "finished" in ranks2.step(to="end").title
    assert ranks2.wait(10).error is None


def test_a_breakpoint_in_a_module_in_hooks_and_in_a_script(ranks2: Session, tmp_path: Path) -> None:
    module = tmp_path / "lines_model.py"
    module.write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.inner = torch.nn.Linear(2, 2)\n\n"
        "    def forward(self, x):\n        y = self.inner(x)\n        return y\n\n"
        "def hook(state, bucket):\n    done = torch.futures.Future()\n"
        "    done.set_result(bucket.buffer())\n    return done\n"
    )
    row = ranks2.breakpoints.add(f"{module}:9", Breakpoint(0, condition="rank_of() == 1"))
    assert "Pending" in row.text
    ranks2.breakpoints.add(f"{module}:13", Breakpoint(0, once=True))
    stopped = ranks2.run_cell(
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\nimport lines_model\n"
        "lines_model.rank_of = lambda: rank\n"
        "net = torch.nn.parallel.DistributedDataParallel(lines_model.Net())\n"
        "net.register_comm_hook(None, lines_model.hook)\n"
        "net(torch.ones(1, 2)).sum().backward()\nprint('trained')\n"
    )
    assert where(stopped.steps)[(1,)].startswith("lines_model.py, line 9")
    hooked = ranks2.step(to="end")
    assert {row.text.split(", ")[1] for row in hooked.rows if row.state == "paused"} == {"line 13"}
    ranks2.step(to="end")
    assert "trained" in texts(ranks2.wait())
    assert [row.text.rpartition(". ")[2] for row in ranks2.breakpoints.rows()] == [
        "Rank 0: no hit yet; rank 1: 1 hit",
        "1 hit, over",
    ]
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = dist.get_rank()\nx += 1\nprint(x)\ndist.destroy_process_group()\n"
    )
    ranks2.breakpoints.add(f"{script}:4", Breakpoint(0, ranks=(0,)))
    assert where(ranks2.run_script(str(script)).steps)[(0,)] == "train.py, line 4"
    ranks2.step(to="end")
    assert ranks2.wait().error is None


def test_a_breakpoint_is_set_while_the_line_runs(ranks2: Session) -> None:
    ranks2.run_cell(
        "import time\nstop = False\nn = 0\nwhile not stop:\n    n += 1\n    time.sleep(0.001)\n",
        detach=True,
    )
    eventually(lambda: bool(ranks2.runs.all[-1].events.started >= {0, 1}))
    ranks2.breakpoints.add("6", Breakpoint(0, once=True))
    result = ranks2.wait(10)
    assert {text.rpartition(" ")[2] for text in where(result.steps).values()} == {"6"}


def test_to_end_from_a_line_passes_collectives_that_were_paused_before(ranks2: Session) -> None:
    """A breakpoint on the way to a collective does not have `--to end` pause before that."""
    ranks2.run_cell("breakpoint()\nbreakpoint()\nfor _ in range(3):\n    dist.barrier()\n")
    assert set(where(ranks2.step(to="collective"))) == {(0, 1)}
    assert "finished" in ranks2.step(to="end").title


def test_a_line_of_an_earlier_cell_is_named_with_it(ranks2: Session) -> None:
    ranks2.run_cell("def part():\n    x = 0\n    if rank:\n        x = 1\n    return x\n")
    cell = f"cell {ranks2.runs.all[-1].number}"
    row = ranks2.breakpoints.add(f"{cell}:4", Breakpoint(0))
    assert row.place == (cell, 4) and ranks2.breakpoints.known == (row,)
    assert where(ranks2.run_cell("part()").steps) == {(0, 1): f"{cell}, line 4, in part"}
    assert f"rank 0 at {cell}, line 6; rank 1 at line 5" in ranks2.step().title
    ranks2.step(to="end")


@pytest.mark.parametrize(
    ("place", "spec", "said"),
    [
        ("nowhere.py:3", {}, "There is no file nowhere.py"),
        ("cell 9999:3", {}, "The ranks have run no cell 9999"),
        ("no_function", {}, "The ranks know no function no_function"),
        ("a b", {}, "neither a line nor a function"),
        ("torch.relu", {}, "it is C code: there is no line of Python"),
        ("2", {"condition": "x ="}, "is no Python expression"),
        ("2", {"log": "{x"}, "cannot be filled in"),
        ("2", {"count": 0}, "--count is 1 or more"),
        ("2", {"ranks": (7,)}, "7"),
        ("999", {}, "no code from line 999 on"),
    ],
)
def test_wrong_breakpoints_are_refused_and_nothing_is_set(
    ranks2: Session, place: str, spec: dict[str, object], said: str
) -> None:
    ranks2.run_cell("import torch\nx = 1\n")
    with pytest.raises(UsageMistake, match=said):
        ranks2.breakpoints.add(place, Breakpoint(0, **spec))  # type: ignore[arg-type]
    assert ranks2.breakpoints.rows() == ()


def test_steps_that_cannot_be_say_why_and_move_nobody(ranks2: Session) -> None:
    ranks2.run_cell("x = 1")
    with pytest.raises(UsageMistake, match="No rank is paused at a line"):
        ranks2.step(how=How.INTO)
    ranks2.run_cell("breakpoint()\ny = 1\n", ranks=(1,))
    with pytest.raises(UsageMistake, match="line 77 is not in"):
        ranks2.step(to="77")
    with pytest.raises(UsageMistake, match="rank 1 can be stepped"):
        ranks2.step((0,))
    with pytest.raises(UsageMistake, match="paused"):
        ranks2.run_cell("1")
    ranks2.step(to="end")


def test_off_passes_every_breakpoint(ranks2: Session) -> None:
    ranks2.breakpoints.enable(False)
    assert ranks2.run_cell("breakpoint()\nprint('through')").steps is None


@pytest.mark.parametrize("members", [None, (1,)])
def test_an_abort_frees_paused_ranks_with_their_variables(
    ranks2: Session, members: tuple[int, ...] | None
) -> None:
    ranks2.run_cell("kept = 5\nbreakpoint()\nfor i in range(100):\n    j = i\n")
    ranks2.step()
    ranks2.abort(members)
    ranks2.abort()
    assert texts(ranks2.run_cell("print(kept)")) == "5\n"
    assert ranks2.run_cell("dist.barrier()").error is None


def test_a_breakpoint_stops_again_in_the_cell_after_an_abort_at_it(ranks2: Session) -> None:
    ranks2.run_cell("def f():\n    x = 1\n    return x\n")
    ranks2.breakpoints.add("f", Breakpoint(0))
    for _ in range(2):
        assert where(ranks2.run_cell("f()").steps)[(0, 1)].endswith("line 3, in f")
        ranks2.abort()


def test_an_interrupt_of_the_wait_frees_paused_ranks(ranks2: Session) -> None:
    """Rank 0 computes, rank 1 is paused: the cell is not over, and its user interrupts it."""
    source = "import time\nif rank == 1:\n    breakpoint()\nwhile True:\n    time.sleep(0.01)\n"

    def interrupt_when_paused() -> None:
        eventually(lambda: bool(ranks2.runs.all[-1].stops))
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt_when_paused)
    started: list[object] = []
    result = ranks2.run_cell(
        source, started=lambda run: (started.append(run), interrupting.start())[0]
    )
    interrupting.join()
    assert "interrupted" in str(result.error)
    assert result.pending == ()


def test_a_restart_of_a_paused_rank_keeps_breakpoints_and_strands_nobody(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    session.run_cell("def f():\n    a = 1\n    return a\nf()\n")
    session.breakpoints.add("3", Breakpoint(0))
    session.run_cell("f()")
    session.abort()
    session.restart((1,))
    result = session.run_cell("def f():\n    a = 1\n    return a\nf()\n")
    assert set(where(result.steps)) == {(0, 1)}


def test_a_restart_of_a_rank_frees_the_others_that_are_paused_with_their_variables(
    session: Session,
) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    pids = rank_pids(session)
    assert set(where(session.run_cell("kept = 5\nbreakpoint()\nlater = 1\n").steps)) == {(0, 1)}
    board = session.restart((1,))
    assert board.snapshot.ready
    assert "Rank 0 was paused: its cell was aborted, its variables stay." in board.notes
    now = rank_pids(session)
    assert now[0] == pids[0] and now[1] != pids[1]
    assert last_values(session, "kept", ranks=(0,)) == {(0,): "5"}
    (run,) = (run for run in session.runs.all if "breakpoint" in str(run.sources))
    assert "rank 1 was ended by %ddp_restart" in str(run.error())
    assert not session.why().wrong, "nobody died but as the user wanted"


def test_expressions_are_evaluated_where_ranks_stand_and_variables_are_assigned(
    ranks2: Session,
) -> None:
    ranks2.run_cell(
        "top = 7\ndef inner(x):\n    y = x + rank\n    breakpoint()\n    return y\n"
        "def outer(z):\n    return inner(z * 2)\nprint(outer(5))\n"
    )
    assert values(ranks2.evaluate("y")) == {(0,): "10", (1,): "11"}
    assert values(ranks2.evaluate("(x, top)")) == {(0, 1): "(10, 7)"}
    assert values(ranks2.evaluate("z", up=1)) == {(0, 1): "5"}
    assert "frames of yours, none 9 up" in next(iter(values(ranks2.evaluate("z", up=9)).values()))
    assert values(ranks2.evaluate("1 // rank")) == {
        (1,): "1",
        (0,): "raised ZeroDivisionError: integer division or modulo by zero",
    }
    with pytest.raises(UsageMistake, match="is not a valid expression"):
        ranks2.evaluate("y =")
    with pytest.raises(UsageMistake, match="is not a valid assignment"):
        ranks2.evaluate("y", assign=True)
    # Functions in an expression know the variables of the frame; ending one ends nothing.
    assert values(ranks2.evaluate("[x for _ in 'ab'], (lambda: x)()")) == {(0, 1): "([10, 10], 10)"}
    assert values(ranks2.evaluate("x: int = sum(x for _ in 'a')", assign=True)) == {}
    for ends in ("exit()", "__import__('sys').exit(1)"):
        assert "SystemExit, which ends nothing" in values(ranks2.evaluate(ends))[(0, 1)]
    assert values(ranks2.evaluate("y = y * 100", (1,), assign=True)) == {}
    assert values(ranks2.evaluate("x, top = 0, 9", (0,), assign=True)) == {}
    assert values(ranks2.evaluate("(x, top)", (0,))) == {(0,): "(0, 9)"}
    assert (
        "inner has no variable nowhere"
        in values(ranks2.evaluate("nowhere = 1", (0,), assign=True))[(0,)]
    )
    ranks2.evaluate("top = 7", (0,), assign=True)
    ranks2.step(to="end")
    assert texts(ranks2.wait()) == "10\n1100\n"
    assert "SystemExit" in values(ranks2.evaluate("__import__('sys').exit(1)"))[(0, 1)]
    assert values(ranks2.evaluate("top")) == {(0, 1): "7"}
    ranks2.evaluate("top = 8", assign=True)
    assert texts(ranks2.run_cell("print(top)")) == "8\n"
