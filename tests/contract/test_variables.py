"""The variables of real ranks in one table: of idle ones, of blocked ones, without their help."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support import eventually

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity, VariableTable, codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.inspect.variables import MOST_BYTES
from ddp_notebook.session import Session
from ddp_notebook.testing import cluster_of
from ddp_notebook.views import variables as view

SET = """\
import math
class Odd:
    def __repr__(self):
        raise RuntimeError("written out")
    @property
    def shape(self):
        raise RuntimeError("read")
torch.manual_seed(0)
lr = 0.01 if rank == 2 else 0.1
x = torch.tensor([1.0, 2.0]) + (0.5 if rank == 1 else 0)
bad = torch.tensor([1.0, math.nan, 3.0, 4.0, 5.0])
odd = Odd()
net = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=lr)
if rank == 0:
    only = "here\""""
STEP = """\
def step(batch):
    loss = batch.sum() * (rank + 1)
    large = torch.ones(3_000_000)
    if rank != 2:
        dist.all_reduce(loss)
    import time
    while rank == 2:
        time.sleep(0.01)
step(torch.ones(4))"""


@contextmanager
def blocked(session: Session) -> Iterator[None]:
    """Ranks 0 and 1 wait in a collective of `step`, and rank 2 runs in it."""

    def waits(rank: int) -> bool:
        return session.where().stack(rank).doing.activity is Activity.WAITING

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(session.run_cell, STEP, number=7)
        try:
            eventually(lambda: waits(0) and waits(1), 15, "two ranks wait")
            yield
        finally:
            if not future.done():
                session.abort()


def notes(table: VariableTable, name: str) -> list[tuple[tuple[int, ...], bool, str]]:
    return [(cell.ranks, cell.odd, cell.note) for cell in table.row(name).cells]


def test_what_differs_between_idle_ranks_is_marked_and_blocked_ones_show_their_function(
    ranks3: Session,
) -> None:
    session = ranks3
    session.run_cell(SET).raise_for_error()
    table = session.variables()
    assert notes(table, "lr") == [((0, 1), False, ""), ((2,), True, "difference 0.09")]
    assert notes(table, "x") == [((0, 2), False, ""), ((1,), True, "max difference 0.5")]
    assert table.row("bad").cells[0].text == "float32 [5] cpu, mean 3.25, 1 NaN"
    assert [cell.text for cell in table.row("odd").cells] == ["<Odd>"]
    assert [cell.text for cell in table.row("net").cells] == ["DDP(Linear), 3 parameters, train"]
    assert [c.text for c in table.row("optimizer").cells] == ["SGD, lr 0.1", "SGD, lr 0.01"]
    assert [cell.absent for cell in table.row("only").cells] == [False, True]
    names = [row.name for row in table.sections[0].rows]
    assert names == ["lr", "x", "bad", "odd", "net", "optimizer", "only"]
    assert "optimizer" in view.text(table) and "≠" in view.text(table)

    assert [row.name for row in session.variables(["x"], (0, 1)).sections[0].rows] == ["x"]
    with pytest.raises(UsageMistake, match="no variable 'nope' on ranks 0-2"):
        session.variables(["nope"])

    with blocked(session):
        table = session.variables()
        assert [(s.title, s.ranks) for s in table.sections] == [
            ("variables of step (cell 7)", (0, 1, 2)),
            ("global variables", (0, 1, 2)),
        ]
        assert [row.name for row in table.sections[0].rows] == ["batch", "loss", "large"]
        loss = table.row("loss")
        assert [c.text for c in loss.cells if not c.unknown][:1] == ["float32 [] cpu: 4"]
        assert [(c.ranks, c.unknown) for c in loss.cells][-1] == ((2,), True)
        assert [(u.ranks, u.why[:4]) for u in table.unread] == [((2,), "busy")]
        assert "of its values" in table.row("large").cells[0].text
        assert notes(table, "x")[0][0] == (0,)  # what rank 2 has is not read: no majority

        asked = cluster_of(session).ask((0, 1, 2), calls.VARIABLES, calls.VariablesRequest(), 5)
        assert sorted(asked) == [0, 1, 2]
        os.kill(session.record.snapshot.ranks[1].pid or 0, signal.SIGSTOP)
        try:
            table = session.variables()
            assert ((1,), "does not answer") in [(u.ranks, u.why) for u in table.unread]
        finally:
            os.kill(session.record.snapshot.ranks[1].pid or 0, signal.SIGCONT)


def test_a_rank_with_thousands_of_variables_answers_shortly_and_at_once(ranks3: Session) -> None:
    session = ranks3
    session.run_cell(
        "for n in range(3000):\n    globals()[f'v{n}'] = 'é' * 500\n"
        "big = [torch.ones(2_000_000) for _ in range(4)]\n"
        "for n, t in enumerate(big):\n    globals()[f'big{n}'] = t"
    ).raise_for_error()
    began_s = time.monotonic()
    asked = cluster_of(session).ask((0, 1, 2), calls.VARIABLES, calls.VariablesRequest(), 9)
    assert time.monotonic() - began_s < scaled_for_load(1)
    assert asked.keys() == {0, 1, 2}
    for answer in asked.values():
        assert len(json.dumps(codec.encode(answer))) <= MOST_BYTES
    table = session.variables()
    assert table.sections[0].left_out > 2900
    assert "%ddp_vars NAME" in view.text(table)
