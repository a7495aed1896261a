"""Training steps: the split against a bare loop, the model against what it predicts, a late rank.

The rival of the split is a loop as anybody would write it, in a cell on the same ranks just before
and just after: the whole step, and no stamp within it.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from observing import Ranks
from rows import Measurement, Numbers, Row

from ddp_notebook.bench.steps import StepBenchResult, StepPlan
from ddp_notebook.session import Session

MODELS = ("cnn", "mlp", "transformer")
WORLD_SIZES = (2, 4)
BATCHES = (8, 32, 128)
BUDGET_S = 15.0
LATE_RANK = 1

BARE = """
import time
from ddp_notebook.rank import runtime
from ddp_notebook.rank.bench import steps_data, steps_models

def bare(model, batches, steps):
    subject = steps_models.prepare(model, {}, "cpu")
    feed = steps_data.feed(subject, "", "", {})
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

# 2 ms before each bucket is ready, on one rank.
LATE = """
import time
from torch import nn

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.002 if rank == late else 0)
        return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(Late.apply(x)).relu()
        return x

net = Net()
"""


class Stepping(Measurement):
    """`Session.bench_steps` on two and four ranks, with the models that ship."""

    name = "stepping"

    def round(self) -> Numbers:
        """Every model at every number of ranks, and a late rank, and none, at each."""
        numbers: dict[str, float] = {}
        for world_size in WORLD_SIZES:
            with Ranks(world_size) as session:
                for model in MODELS:
                    numbers.update(_measure(session, model, world_size))
                numbers.update(_late(session, world_size))
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """The bars, and what they are made of."""
        rows = []
        for world_size in WORLD_SIZES:
            for model in MODELS:
                rows += _rows(model, world_size, medians)
            named, wrong = medians[f"late {world_size}"], medians[f"wrong {world_size}"]
            what = f"rank {LATE_RANK} of {world_size}, 2 ms late before each bucket, is named"
            text = f"{medians[f'late ms {world_size}']:.1f} ms late" if named == 1 else "not named"
            rows.append(Row(what, text, wanted="named", met=named == 1))
            text = "somebody" if wrong else "nobody"
            what = f"{world_size} ranks, none of them late: who is named"
            rows.append(Row(what, text, wanted="nobody", met=not wrong))
        for model in MODELS:
            rows.append(_foretold(model, medians))
        return rows


def _measure(session: Session, model: str, world_size: int) -> dict[str, float]:
    before = _bare_us(session, model)
    plan = StepPlan(model=model, batches=BATCHES, budget_s=BUDGET_S)
    result = session.bench_steps(plan, predict_for=2 * world_size)
    after = _bare_us(session, model)
    numbers = {}
    for point in result.points:
        key = f"{model} {world_size} {point.batch}"
        numbers[f"{key} parts"] = sum(
            (point.forward_us, point.backward_us, point.exposed_us, point.optimizer_us)
        )
        numbers[f"{key} step"] = point.step_us
        numbers[f"{key} bare"] = median([*before[point.batch], *after[point.batch]])
    prediction = result.prediction
    foretold = {} if prediction is None else {p.batch: p.step_us for p in prediction.steps}
    for batch in BATCHES:
        numbers[f"{model} {2 * world_size} {batch} foretold"] = foretold.get(batch, math.nan)
    numbers[f"{model} {2 * world_size} within"] = (
        prediction.within if prediction and foretold else math.nan
    )
    return {**numbers, **_predicted(result, model, world_size)}


def _bare_us(session: Session, model: str) -> dict[int, list[float]]:
    """By batch, the time of each step on its slowest rank."""
    source = f"model, batches = {model!r}, {BATCHES!r}\n{BARE}"
    session.run_cell(source).raise_for_error()
    ranks: Any = list(session.pull("bare_us").values())
    return {b: [max(each) for each in zip(*(r[b] for r in ranks), strict=True)] for b in BATCHES}


def _predicted(result: StepBenchResult, model: str, world_size: int) -> dict[str, float]:
    """How far off the model is, at its median and its worst point; nan where there is no fit."""
    prediction = result.prediction
    errors = prediction.errors if prediction is not None else ()
    return {
        f"{model} {world_size} off": median(errors) if errors else math.nan,
        f"{model} {world_size} worst": max(errors) if errors else math.nan,
    }


def _late(session: Session, world_size: int) -> dict[str, float]:
    plan = StepPlan(model="net", batches=(32,), buckets=("1",), budget_s=BUDGET_S)
    session.run_cell(f"late = None\n{LATE}").raise_for_error()
    wrong = session.bench_steps(plan).straggler is not None
    session.run_cell(f"late = {LATE_RANK}\n{LATE}").raise_for_error()
    named = session.bench_steps(plan).straggler
    right = named is not None and named.rank == LATE_RANK
    return {
        f"wrong {world_size}": float(wrong),
        f"late {world_size}": float(right),
        f"late ms {world_size}": named.late_us / 1e3 if named is not None else 0.0,
    }


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
    off, worst = medians[f"{model} {world_size} off"], medians[f"{model} {world_size} worst"]
    rows.append(
        Row(
            f"{model}, {world_size} ranks: prediction off by",
            "refused" if math.isnan(off) else f"median {off:.0%}, worst {worst:.0%}",
            wanted="within 20 %",
            met=not math.isnan(worst) and worst <= 0.20,
        )
    )
    return rows


def _foretold(model: str, medians: Numbers) -> Row:
    """What the model said of the larger number of ranks, against what was measured there."""
    few, many = WORLD_SIZES
    errors = [
        abs(
            medians[f"{model} {many} {batch} foretold"] / medians[f"{model} {many} {batch} step"]
            - 1
        )
        for batch in BATCHES
    ]
    within = medians[f"{model} {many} within"]
    refused = any(map(math.isnan, errors))
    return Row(
        f"{model}: {many} ranks foretold from {few}, off by",
        "refused" if refused else f"median {median(errors):.0%}, worst {max(errors):.0%}",
        wanted="no more than it says" + ("" if refused else f", {within:.0%}"),
        met=refused or max(errors) <= within,
    )
