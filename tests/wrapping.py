"""A model that the ranks wrap, and what is asked of them."""

from __future__ import annotations

from typing import Any

from ddp_notebook.session import Session
from ddp_notebook.session.tools.ddp_construction import Wrap, WrapOptions

SOON_S = 10.0
"""A wrap that needs longer than this waits for something: it takes a fraction of a second."""

NET = (
    "from torch import nn\n"
    "torch.manual_seed(rank)\n"
    "model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))\n"
)

STEP = (
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(steps):\n"
    "    optimizer.zero_grad()\n"
    "    model(torch.randn(4, 8) + rank).pow(2).mean().backward()\n"
    "    optimizer.step()\n"
)

STATE = "state = [t.double().sum().item() for t in model.state_dict().values()]"


def run(session: Session, source: str, ranks: tuple[int, ...] | None = None) -> None:
    session.run_cell(source, ranks).raise_for_error()


def begin(session: Session, name: str = "model", **options: Any) -> Wrap:
    return session.wrap(name, WrapOptions(**options))


def train(session: Session, steps: int = 1) -> None:
    run(session, f"steps = {steps}\n{STEP}")


def states(session: Session) -> list[Any]:
    """Sums of all values of the model, for each rank."""
    run(session, STATE)
    return list(session.pull("state").values())


def still_works(session: Session) -> bool:
    """True when the group's collectives still agree on all ranks."""
    run(session, "total = torch.ones(1)\ndist.all_reduce(total)\ntotal = total.item()")
    return set(session.pull("total").values()) == {float(session.record.snapshot.world_size)}


def has_line(made: Wrap, part: str) -> bool:
    return any(part in line for line in made.table.details)
