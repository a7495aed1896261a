"""Where ranks are, asked of real ranks: blocked, running, idle, stopped, dead."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from results import rank_pids
from support import eventually

from ddp_notebook.errors import NoSession, UsageMistake
from ddp_notebook.model import Activity, RankStack, StackTree, codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.inspect.stacks import MOST_BYTES
from ddp_notebook.session import Session
from ddp_notebook.testing import cluster_of
from ddp_notebook.views import stacks

PARTED = """\
def step():
    if rank == 1:
        while not over:
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
import time
over = []
step()"""
SLEEPS = ("cell 7", 5, "step", "time.sleep(0.01)")
SCRIPT = """\
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    x = torch.ones(4)
    if dist.get_rank() != 1:
        dist.all_reduce(x)
    else:
        dist.recv(x, 0)


main()
"""
ODD_LOCALS = """\
import time

class Raises:
    def __repr__(self):
        raise RuntimeError("written out")

class Sleeps:
    def __repr__(self):
        time.sleep(600)

def work(mine):
    raises, sleeps, lr = Raises(), Sleeps(), 0.1
    grad = torch.ones(2, 3)
    many = {n: Raises() for n in range(5000)}
    dist.all_reduce(torch.ones(1))

if rank:
    work(20 * rank)"""
DEEP = """\
def down(n):
    a, b, c, d = ("é" * 999,) * 4
    if n:
        down(n - 1)
    dist.all_reduce(torch.ones(1))

if rank == 0:
    down(300)"""
LOOKED_AT = """\
import os, time, weakref

class Big: pass

def work():
    big, gone = Big(), []
    there = weakref.ref(big, gone.append)
    dist.all_reduce(torch.ones(1))
    del big
    return bool(gone) and there() is None

while rank and not os.path.exists({go!r}):
    time.sleep(0.01)
freed = work()"""


@pytest.fixture
def session(ranks3: Session) -> Session:
    """The session, its ranks idle."""
    if not ranks3.record.snapshot.ready:
        ranks3.restart()
    return ranks3


@contextmanager
def running(session: Session, run: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Meanwhile `run` goes on in another thread; afterwards its ranks are freed."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        try:
            yield future
        finally:
            if not future.done():
                session.abort()


def where(session: Session, there: Callable[[StackTree], bool], **options: Any) -> StackTree:
    """The tree once `there` holds of it."""

    def look() -> StackTree | None:
        tree = session.where(**options)
        return tree if there(tree) else None

    found = eventually(look, 15, "the ranks to be there")
    assert found is not None
    return found


def waits_in(*operations: str) -> Callable[[StackTree], bool]:
    """True of a tree whose ranks wait in these operations; "" for one that does not wait."""

    def there(tree: StackTree) -> bool:
        ends = [tree.stack(rank).doing for rank in tree.ranks]
        return [e.operation if e.activity is Activity.WAITING else "" for e in ends] == list(
            operations
        )

    return there


def users(stack: RankStack) -> list[tuple[str, int, str, str]]:
    """The user's frames of a stack."""
    return [(f.file, f.line, f.function, f.source) for f in stack.frames if not f.library]


def test_there_must_be_ranks_and_these(session: Session) -> None:
    with pytest.raises(NoSession):
        Session().where()
    with pytest.raises(UsageMistake, match="Rank 3 does not exist"):
        session.where((0, 3))


def test_idle_ranks_run_nothing(session: Session) -> None:
    tree = session.where()
    assert stacks.text(tree) == "ranks 0-2  idle"
    assert tree.world_size == 3
    assert session.where((0, 2)).ranks == (0, 2)


def test_ranks_in_a_collective_and_one_that_is_elsewhere(session: Session) -> None:
    with running(session, lambda: session.run_cell(PARTED, number=7)):
        there = waits_in("all_reduce", "", "all_reduce")
        tree = where(session, lambda tree: there(tree) and users(tree.stack(1))[-1:] == [SLEEPS])
        (root,) = tree.branches
        assert root.ranks == (0, 1, 2)
        assert [f.source for f in root.frames] == ["step()"]
        assert [child.ranks for child in root.children] == [(0, 2), (1,)]
        assert users(tree.stack(0)) == [
            ("cell 7", 9, "<module>", "step()"),
            ("cell 7", 6, "step", "dist.all_reduce(torch.ones(1))"),
        ]
        torchs = [f for f in tree.stack(0).frames if f.library]
        assert torchs[-1].function == "all_reduce"
        assert torchs[-1].module.startswith("torch.distributed")
        shown = stacks.text(tree)
        assert "├─ ranks 0 and 2  waiting in all_reduce (torch.distributed)" in shown
        assert "└─ rank 1  running  cell 7, line 5  step()  time.sleep(0.01)" in shown


def test_ranks_in_a_backward_are_in_torch_and_not_in_what_observes_it(session: Session) -> None:
    source = (
        "model = DDP(torch.nn.Linear(3, 1))\n"
        "loss = model(torch.ones(1, 3)).sum()\n"
        "if rank != 1:\n"
        "    loss.backward()\n"
        "while rank == 1:\n"
        "    pass"
    )
    with running(session, lambda: session.run_cell(source, number=7)):
        tree = where(session, waits_in("backward", "", "backward"))
        assert "ddp_notebook" not in stacks.text(tree)
        assert users(tree.stack(0))[-1] == ("cell 7", 5, "<module>", "loss.backward()")


def test_of_a_rank_that_raised_the_whole_traceback_is_shown(session: Session) -> None:
    result = session.run_cell("import torch.nn as nn\nnn.Linear(3, 3)(torch.ones(2, 2))")
    shown = "".join(item.text for item in result.tracebacks[0].items)
    assert "frames of libraries hidden; all frames: %ddp_where]" in shown
    (branch,) = session.where().branches
    assert branch.ranks == (0, 1, 2)
    first, *libraries = branch.frames
    assert (first.line, first.library) == (3, False)
    assert libraries and all(frame.library for frame in libraries)
    assert "Linear.forward()" in stacks.text(session.where()).splitlines()[-1]


def test_a_script_is_named_by_its_file(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    with running(session, lambda: session.run_script(str(path))):
        tree = where(session, waits_in("all_reduce", "recv", "all_reduce"))
        assert users(tree.stack(2)) == [
            (str(path), 14, "<module>", "main()"),
            (str(path), 9, "main", "dist.all_reduce(x)"),
        ]
        assert users(tree.stack(1))[-1][1:] == (11, "main", "dist.recv(x, 0)")
        shown = stacks.text(tree)
        assert shown.startswith("ranks 0-2  train.py, line 14  main()\n")


def test_a_cell_that_awaits_is_found_though_it_is_on_no_stack(session: Session) -> None:
    code = "import asyncio\nasync def wait():\n    await asyncio.sleep(600)\nawait wait()"
    with running(session, lambda: session.run_cell(code, number=9)):
        tree = where(session, lambda tree: all(tree.stack(r).frames for r in tree.ranks))
        assert [each[:3] for each in users(tree.stack(0))] == [
            ("cell 9", 5, "<module>"),
            ("cell 9", 4, "wait"),
        ]
        assert "in await" in stacks.text(tree)


def test_locals_are_told_without_running_a_repr_of_the_users(session: Session) -> None:
    with running(session, lambda: session.run_cell(ODD_LOCALS)):
        blocked = waits_in("all_reduce", "all_reduce")
        tree = where(session, blocked, ranks=(1, 2), locals=True)
        (frame,) = [f for b in tree.branches for f in b.frames if f.function == "work"]
        values = {(each.name, each.text): each.ranks for each in frame.locals}
        assert values[("mine", "20")] == (1,)
        assert values[("mine", "40")] == (2,)
        for alike in (
            ("raises", "<Raises>"),
            ("sleeps", "<Sleeps>"),
            ("lr", "0.1"),
            ("grad", "tensor(2, 3) float32 cpu"),
        ):
            assert values[alike] == (1, 2), alike
        assert "mine = 20 (rank 1), 40 (rank 2)" in stacks.text(tree)
        assert not any(f.locals for f in session.where().stack(1).frames), "only when asked for"


def test_a_deep_stack_with_long_variables_is_told_in_16_kb(session: Session) -> None:
    cluster = cluster_of(session)
    with running(session, lambda: session.run_cell(DEEP)):
        tree = where(session, waits_in("all_reduce", "", ""), locals=True)
        told = codec.encode(cluster.ask((0,), calls.STACK, calls.StackRequest(True), 5.0)[0])
        assert MOST_BYTES // 2 < len(json.dumps(told)) <= MOST_BYTES
        frames = tree.stack(0).frames
        assert frames[0].function == "<module>"
        assert any("frames left out" in frame.source for frame in frames)
        innermost = [frame for frame in frames if frame.function == "down"][-1]
        assert {each.name for each in innermost.locals} >= {"a", "b", "c", "d", "n"}


def test_a_variable_lives_no_longer_for_having_been_looked_at(
    session: Session, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = LOOKED_AT.format(go=str(go))
    with running(session, lambda: session.run_cell(code)) as run:
        tree = where(session, waits_in("all_reduce", "", ""), locals=True)
        assert "big = <Big>" in stacks.text(tree)
        go.touch()
        run.result(20).raise_for_error()
    assert session.pull("freed") == {0: True, 1: True, 2: True}


def test_a_stopped_rank_is_said_to_be_silent_and_a_dead_one_dead(session: Session) -> None:
    pids = rank_pids(session)
    with running(session, lambda: session.run_cell("dist.all_reduce(torch.ones(1))", (0,))):
        where(session, waits_in("all_reduce", "", ""))
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[2], signal.SIGKILL)
        try:
            tree = where(session, lambda tree: tree.stack(2).doing.activity is Activity.DEAD)
            assert tree.stack(0).doing.operation == "all_reduce", "the others are shown"
            silent = tree.stack(1).doing
            assert silent.activity is Activity.SILENT
            assert f"its process {pids[1]} is stopped" in silent.text
            shown = stacks.text(tree)
            assert "rank 1  does not answer: " in shown
            assert "rank 2  dead: killed by SIGKILL" in shown
        finally:
            os.kill(pids[1], signal.SIGCONT)
