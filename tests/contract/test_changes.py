"""The change that a finding shows, applied to the program that it was found in: that runs clean."""

from __future__ import annotations

from pathlib import Path

import page_programs
import pytest

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import Category
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)

CASES = Path(__file__).parent.parent / "cases"
BEGIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, distributed

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
"""
OWN = {
    "conditional-collective: a mean that only rank 1 prints": f"""{BEGIN}
class Meter:
    def __init__(self):
        self.total = torch.tensor(float(rank))

    def mean(self):
        dist.all_reduce(self.total)
        return self.total.item() / dist.get_world_size()

meter = Meter()
if rank == 1:
    print("the mean is", meter.mean())
dist.barrier()
""",
    "unused-params: a layer of which two ranks go past": f"""{BEGIN}
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers if rank == 0 else self.layers[:2]:
            x = layer(x)
        return x

model = DistributedDataParallel(Deep(), bucket_cap_mb=1)
{TRAIN}""",
    "sampler-misuse: a loop in a function": f"""{BEGIN}
def train(model, epochs):
    dataset = TensorDataset(torch.arange(96.0).view(24, 4) / 96)
    shards = distributed.DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(epochs):
        losses = []
        for i, (x,) in enumerate(loader):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

train(DistributedDataParallel(nn.Linear(4, 1)), 3)
""",
    "sampler-misuse: a sampler beside the loop": f"""{BEGIN}
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.arange(96.0).view(24, 4) / 96)
sampler = distributed.DistributedSampler(dataset, seed=5)
for epoch in range(2):
    for (x,) in DataLoader(dataset, batch_size=2, sampler=sampler):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
""",
    "env-mismatch: a port by the rank": f"""
import os
base = 20000 + os.getpid() % 10000
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MASTER_PORT"] = (
    f"{{base}}"
)
{BEGIN}
""",
    "async-misuse: a gradient whose handle the next one replaces": f"""{BEGIN}
class Reducer:
    def average(self, model):
        for p in model.parameters():
            self.work = dist.all_reduce(p.grad, async_op=True)
            p.grad /= dist.get_world_size()
        self.work.wait()

torch.manual_seed(0)
model, reducer = nn.Linear(900, 900), Reducer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 900)).pow(2).mean().backward()
    reducer.average(model)
    optimizer.step()
dist.barrier()
""",
    "async-misuse: a handle that nothing keeps": f"""{BEGIN}
total = torch.full((1 << 20,), float(rank))
dist.all_reduce(total, async_op=True)
total /= dist.get_world_size()
dist.barrier()
""",
    "ddp-bypass: a loss of several terms": f"""{BEGIN}
net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    x = torch.randn(8, 4)
    out = net.module(x)
    loss = nn.functional.mse_loss(out, x.sum(1, keepdim=True)) + out.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "ddp-bypass: within a function": f"""{BEGIN}
def step(ddp_model, optimizer, batch):
    loss = ddp_model.module(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

ddp_model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
for _ in range(3):
    step(ddp_model, optimizer, torch.randn(8, 4))
""",
}
"""Programs beside those of the pages and of `cases`, by category and what they are."""
PAGES = ("conditional-collective", "unused-params", "async-misuse", "ddp-bypass", "env-mismatch")
REPORTED = {
    "c001": "env-mismatch",
    "c026": "conditional-collective",
    "c049": "unused-params",
    "c065": "sampler-misuse",
}


def check(session: Session, category: str, program: str, script: Path | None) -> None:
    """Run it, apply the change that its finding shows, and run that."""
    shown = ""
    for _ in range(2):
        text = catalogue.corrected(program, shown) if shown else program
        if script is not None:
            script.write_text(text)
            result = session.run_script(str(script), store="rank0")
        else:
            result = session.run_cell(text)
        found = (result.diagnosis or session.why()).findings
        if result.error is not None:
            session.restart()
        if not shown:
            assert found[0].category.value == category
            shown = found[0].patch
            assert shown, found
        else:
            assert result.error is None and not found, shown


@pytest.mark.parametrize("category", PAGES)
def test_the_program_of_a_page_runs_once_it_is_changed_as_its_finding_shows(
    ranks3: Session, category: str, tmp_path: Path
) -> None:
    page = Category(category)
    script = tmp_path / "page.py" if page_programs.page(page).get("how") == "script" else None
    check(ranks3, category, page_programs.programs(page)[0], script)


@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_program_runs_once_it_is_changed_as_its_finding_shows(
    ranks3: Session, name: str, tmp_path: Path
) -> None:
    check(ranks3, REPORTED[name], (CASES / f"{name}.py").read_text(), tmp_path / f"{name}.py")


@pytest.mark.parametrize("name", OWN)
def test_a_program_runs_once_it_is_changed_as_its_finding_shows(
    ranks3: Session, name: str, tmp_path: Path
) -> None:
    category, program = name.partition(":")[0], OWN[name]
    check(ranks3, category, f"{program}dist.destroy_process_group()\n", tmp_path / "train.py")


NOT_CERTAIN = {
    "a tensor of the forward that the loss leaves out": ("self.a(x), self.b(x)", "model(x)[0]"),
    "a forward whose backward comes after another": ("self.a(x)", "(model(x) + model(-x))"),
}


@pytest.mark.parametrize("name", NOT_CERTAIN)
def test_no_change_is_shown_that_might_be_wrong(ranks3: Session, name: str, tmp_path: Path) -> None:
    given, output = NOT_CERTAIN[name]
    script = tmp_path / "train.py"
    script.write_text(f"""{BEGIN}
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return {given}

model = DistributedDataParallel(Two())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)
{output}.pow(2).mean().backward()
optimizer.step()
dist.destroy_process_group()
""")
    result = ranks3.run_script(str(script), store="rank0")
    (finding,) = (result.diagnosis or ranks3.why()).findings
    assert finding.category is Category.UNUSED_PARAMS and not finding.patch
