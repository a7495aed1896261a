"""Training steps: the split against a bare loop.

The rival of the split is a loop as anybody would write it, in a cell on the same ranks just before
and just after: the whole step, and no stamp within it.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from observing import Ranks
from rows import Measurement, Numbers, Row

from ddp_notebook.bench.steps import StepPlan
from ddp_notebook.session import Session

MODELS = ("cnn", "mlp", "transformer")
WORLD_SIZES = (2, 4)
BATCHES = (8, 32, 128)
BUDGET_S = 15.0

BARE = """
import time
from ddp_notebook.rank import runtime
from ddp_notebook.rank.bench import subject as subjects

def bare(model, batches, steps):
    subject = subjects.prepare(model, {}, "cpu")
    feed = subjects.feed(subject, "", "", {})
    net = DDP(subject.module)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    found = {}
    for size in batches:
        batch = feed.batch(size)
        times = []
        for number in range(steps + 3):
            began = time.perf_counter_ns()
            feed.run(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter_ns() - began) / 1e3)
        found[size] = times[3:]
    return found

with runtime.current().core.observer.suspended(), runtime.current().core.hooks.suspended():
    bare_us = bare(model, batches, 30)
"""


class Stepping(Measurement):
    """`Session.bench_steps` on two and four ranks, with the models that ship."""

    name = "stepping"

    def round(self) -> Numbers:
        """Every model at every number of ranks."""
        numbers: dict[str, float] = {}
        for world_size in WORLD_SIZES:
            with Ranks(world_size) as session:
                for model in MODELS:
                    numbers.update(_measure(session, model, world_size))
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """The bars, and what they are made of."""
        rows = []
        for world_size in WORLD_SIZES:
            for model in MODELS:
                rows += _rows(model, world_size, medians)
        return rows


def _measure(session: Session, model: str, world_size: int) -> dict[str, float]:
    before = _bare_us(session, model)
    plan = StepPlan(model=model, batches=BATCHES, budget_s=BUDGET_S)
    result = session.bench_steps(plan)
    after = _bare_us(session, model)
    numbers = {}
    for point in result.points:
        key = f"{model} {world_size} {point.batch}"
        numbers[f"{key} parts"] = sum(
            (point.forward_us, point.backward_us, point.exposed_us, point.optimizer_us)
        )
        numbers[f"{key} step"] = point.step_us
        numbers[f"{key} bare"] = median([*before[point.batch], *after[point.batch]])
    return numbers


def _bare_us(session: Session, model: str) -> dict[int, list[float]]:
    """By batch, the time of each step on its slowest rank."""
    source = f"model, batches = {model!r}, {BATCHES!r}\n{BARE}"
    session.run_cell(source).raise_for_error()
    ranks: Any = list(session.pull("bare_us").values())
    return {b: [max(each) for each in zip(*(r[b] for r in ranks), strict=True)] for b in BATCHES}


def _rows(model: str, world_size: int, medians: Numbers) -> list[Row]:
    rows = []
    for batch in BATCHES:
        key = f"{model} {world_size} {batch}"
        parts, step, bare = (medians[f"{key} {name}"] for name in ("parts", "step", "bare"))
        off = abs(parts / step - 1)
        rows.append(
            Row(
                f"{model}, {world_size} ranks, batch {batch}: the split adds up",
                f"{parts / 1e3:.1f} of {step / 1e3:.1f} ms",
                f"bare loop {bare / 1e3:.1f} ms",
                step / bare,
                "within 5 % of the step",
                off <= 0.05,
            )
        )
    return rows
