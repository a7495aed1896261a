"""The ledger of a training step: facts of real ranks, and nothing of it where nobody asked."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddp_notebook.model import LAST_STEP, Ledger, LedgerRow
from ddp_notebook.session import Session

CASES = Path(__file__).parent.parent / "cases"
NET = """
import contextlib
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
torch.manual_seed(100 + rank)
batch = lambda: torch.randn(3, 4)
loss_of = lambda model: (model(batch()) - 3).pow(2).mean()
"""
PLAIN = """
net = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
STEPS = """
for i in range(3):
    opt.zero_grad()
    loss_of(net).backward()
    opt.step()
"""

HEALTHY = {
    "DDP": (PLAIN + STEPS, "mean of 2 ranks"),
    "gradients that are averaged by hand": (
        """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(3):
    opt.zero_grad()
    loss_of(net).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    opt.step()
""",
        "mean of 2 ranks",
    ),
    "gradients that hooks of the user's own average": (
        """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def averaged(gradient):
    dist.all_reduce(gradient)
    return gradient / world_size
for p in net.parameters():
    p.register_hook(lambda gradient: averaged(gradient.clone()))
"""
        + STEPS,
        "mean of 2 ranks",
    ),
    "gradients that a hook of the optimizer averages": (
        """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def average(opt, *_):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size
opt.register_step_pre_hook(average)
"""
        + STEPS,
        "mean of 2 ranks",
    ),
    "accumulation under no_sync": (
        PLAIN
        + """
for i in range(8):
    last = i % 4 == 3
    with contextlib.nullcontext() if last else net.no_sync():
        (loss_of(net) / 4).backward()
    if last:
        opt.step()
        opt.zero_grad()
""",
        "mean of 2 ranks",
    ),
    "a GradScaler": (
        PLAIN
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i in range(3):
    opt.zero_grad()
    scaler.scale(loss_of(net)).backward()
    scaler.step(opt)
    scaler.update()
""",
        "mean of 2 ranks x 0.000977",
    ),
    "LBFGS, which computes gradients in its step": (
        """
net = DDP(net)
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=1)
def closure():
    opt.zero_grad()
    loss = loss_of(net)
    loss.backward()
    return loss
for i in range(3):
    opt.step(closure)
""",
        "mean of 2 ranks",
    ),
    "FSDP2": (
        """
from torch.distributed.fsdp import fully_shard
for layer in (net[0], net[2]):
    fully_shard(layer)
fully_shard(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
        + STEPS,
        "mean of 2 ranks",
    ),
    "FSDP2 that accumulates": (
        """
from torch.distributed.fsdp import fully_shard
fully_shard(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(8):
    net.set_requires_gradient_sync(i % 4 == 3)
    loss_of(net).backward()
    if i % 4 == 3:
        opt.step()
        opt.zero_grad()
""",
        "mean of 2 ranks",
    ),
}


def run(ranks: Session, source: str, step: int = LAST_STEP) -> Ledger:
    result = ranks.run_cell(NET + textwrap.dedent(source).strip(), ledger=step)
    assert result.error is None, result.tracebacks
    assert result.ledger is not None
    assert not result.ledger.notes, result.ledger.notes
    return result.ledger


def fact(row: LedgerRow, column: str) -> str:
    return row.facts[column]


def row_of(ledger: Ledger, parameter: str) -> LedgerRow:
    return next(row for row in ledger.rows if parameter in row.parameters)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_marked_where_ranks_train_together(ranks2: Session, name: str) -> None:
    source, used = HEALTHY[name]
    ledger = run(ranks2, source)
    assert {name for row in ledger.rows for name in row.parameters} == {
        "net.0.weight",
        "net.0.bias",
        "net.2.weight",
        "net.2.bias",
    }
    assert not any(row.marked for row in ledger.rows), ledger
    assert {fact(row, "optimizer_used") for row in ledger.rows} == {used}
    assert {fact(row, "across_ranks") for row in ledger.rows} <= {"same", "sharded"}
    assert {fact(row, "changed") for row in ledger.rows} == {"yes"}


def test_two_optimizers_are_each_shown_at_their_own_step(ranks2: Session) -> None:
    ledger = run(
        ranks2,
        """
other = DDP(nn.Linear(4, 1))
net = DDP(net)
first = torch.optim.SGD(net.parameters(), lr=0.1)
second = torch.optim.Adam(other.parameters(), lr=0.01)
for i in range(4):
    first.zero_grad()
    (loss_of(net) + loss_of(other)).backward()
    first.step()
    if i % 2:
        second.zero_grad()
        loss_of(other).backward()
        second.step()
""",
    )
    assert not any(row.marked for row in ledger.rows), ledger
    assert fact(row_of(ledger, "net.0.weight"), "held_by") == "SGD, step 4, lr 0.1"
    assert fact(row_of(ledger, "other.weight"), "held_by") == "Adam, step 2, lr 0.01"
    assert {fact(row, "optimizer_used") for row in ledger.rows} == {"mean of 2 ranks"}


def test_a_model_that_is_gone_by_the_end_is_shown_too(ranks2: Session) -> None:
    ledger = run(
        ranks2,
        """
def first():
    teacher = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(teacher.parameters(), lr=0.1)
    loss_of(teacher).backward()
    opt.step()
first()
"""
        + PLAIN
        + STEPS,
    )
    assert not any(row.marked for row in ledger.rows), ledger
    assert sum(len(row.parameters) for row in ledger.rows) == 6
    assert row_of(ledger, "teacher.weight") and row_of(ledger, "net.0.weight")


def test_a_parameter_outside_ddp_stands_first(ranks2: Session) -> None:
    ledger = run(
        ranks2,
        """
head = nn.Linear(1, 1)
whole = lambda x: head(net(x))
net = DDP(net)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
for i in range(3):
    opt.zero_grad()
    loss_of(whole).backward()
    opt.step()
""",
    )
    first = ledger.rows[0]
    assert first.marked and set(first.parameters) == {"head.weight", "head.bias"}
    assert fact(first, "in") == "-"
    assert fact(first, "optimizer_used") == "own gradient, not averaged"
    assert fact(first, "across_ranks") == "differs"
    assert not any(row.marked for row in ledger.rows[1:])


def test_a_parameter_that_no_optimizer_has_stands_first(ranks2: Session) -> None:
    ledger = run(
        ranks2,
        """
net = DDP(net)
opt = torch.optim.SGD(net.module[0].parameters(), lr=0.1)
for i in range(3):
    net.zero_grad()
    loss_of(net).backward()
    opt.step()
""",
    )
    first = ledger.rows[0]
    assert first.marked and set(first.parameters) == {"net.2.weight", "net.2.bias"}
    assert (fact(first, "held_by"), fact(first, "changed")) == ("none", "no")
    assert not any(row.marked for row in ledger.rows[1:])


def test_gradients_that_were_never_set_to_zero_are_told(ranks2: Session) -> None:
    ledger = run(ranks2, PLAIN + "for i in range(3):\n    loss_of(net).backward()\n    opt.step()")
    assert fact(ledger.rows[0], "own_gradients") == "includes 2 backwards of earlier steps"


def test_the_step_is_chosen_and_the_last_one_is_shown_in_place_of_one_that_is_not(
    ranks2: Session,
) -> None:
    ledger = run(ranks2, PLAIN + STEPS, step=2)
    assert ledger.title.startswith("Step 2 of each optimizer on ranks 0 and 1: 4 parameters")
    assert fact(ledger.rows[0], "held_by") == "SGD, step 2, lr 0.1"
    ledger = run(ranks2, PLAIN + STEPS, step=7)
    assert ledger.title.startswith("The last step of each optimizer (there is no step 7)")
    assert fact(ledger.rows[0], "held_by") == "SGD, step 3, lr 0.1"


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("c049", "own gradient, not averaged"),
        ("c052", "own gradient, not averaged"),
        ("c055", "neither the ranks' own nor their mean"),
        ("h01", "mean of 2 ranks"),
    ],
)
def test_a_script_has_a_ledger(ranks2: Session, name: str, used: str) -> None:
    ledger = ranks2.run_script(str(CASES / f"{name}.py"), store="rank0", ledger=LAST_STEP).ledger
    assert ledger is not None and fact(ledger.rows[0], "optimizer_used") == used
    assert ledger.rows[0].marked == (name != "h01")


def test_a_run_that_was_not_asked_for_one_leaves_torch_as_it_was(ranks2: Session) -> None:
    run(ranks2, PLAIN + STEPS)
    source = """
import torch.optim.optimizer as each
hooks = len(each._global_optimizer_pre_hooks), len(each._global_optimizer_post_hooks)
print(hooks, torch.autograd.backward.__wrapped__.__module__,
      [len(p._backward_hooks or ()) for p in net.parameters()])
"""
    result = ranks2.run_cell(source)
    assert result.error is None and result.ledger is None
    (group,) = result.outputs
    assert group.items[0].text.strip() == "(1, 1) torch.autograd [0, 0, 0, 0]"


def test_a_rank_loads_nothing_of_it_before_it_is_asked_for(session: Session) -> None:
    from ddp_notebook.session import InitOptions

    session.init(InitOptions(world_size=2, device="cpu"))
    asked = "import sys; print('ddp_notebook.rank.training.ledger' in sys.modules)"
    for ledger, loaded in ((0, "False"), (LAST_STEP, "True")):
        result = session.run_cell(asked, ledger=ledger)
        assert result.outputs[0].items[0].text.strip() == loaded
