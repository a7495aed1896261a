"""A run on two ranks beside the same run on one: where do they part by more than rounding?"""

from __future__ import annotations

from pathlib import Path

from ddp_notebook.model.against.comparison import Comparison
from ddp_notebook.session import Session
from ddp_notebook.views.training.comparison import comparison_text

TRAINING = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(70, 6)
y = (x[:, :1] * 2 + x[:, 1:2]).tanh()
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * world)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""


def against_one(session: Session, script: Path, source: str) -> Comparison:
    script.write_text(source)
    result, comparison = session.against.run(
        lambda trails, _: session.run_script(str(script), ranks=tuple(trails), trails=trails)
    )
    result.raise_for_error()
    assert comparison is not None
    return comparison


def changed(*changes: tuple[str, str]) -> str:
    source = TRAINING
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def test_what_is_right_is_equal_but_for_rounding(ranks2: Session, tmp_path: Path) -> None:
    changes = (
        ("x, y)\n", "x[rank::world], y[rank::world])\n"),
        ("sampler = DistributedSampler(data)\n", ""),
        ("batch_size=8, sampler=sampler", "batch_size=8"),
        ("    sampler.set_epoch(epoch)\n", ""),
    )
    for source in (TRAINING, changed(*changes)):
        compared = against_one(ranks2, tmp_path / "train.py", source)
        assert compared.parting is None and not compared.refused, comparison_text(compared)
        assert compared.steps == 10 and compared.relative < 1e-5
        text = comparison_text(compared)
        assert "EQUAL" in text and "another learning rate on one rank" in text


def test_the_first_step_parameter_and_line_at_which_they_part(
    ranks2: Session, tmp_path: Path
) -> None:
    source = changed(("(model(xb)", "((model.module if epoch else model)(xb)"))
    compared = against_one(ranks2, tmp_path / "train.py", source)
    parting = compared.parting
    assert parting is not None, comparison_text(compared)
    assert (parting.step, parting.stage, parting.parameter) == (6, "backward", "0.weight")
    assert parting.place is not None and parting.place.text == "loss.backward()"
    assert "not averaged" in parting.cause and compared.steps == 5
    assert parting.relative > 1e-3 > parting.rounding
    why = ranks2.why()
    assert [finding.category.value for finding in why.findings] == ["ddp-bypass"]


def test_other_samples_on_one_rank_are_told_and_nothing_is_compared(
    ranks2: Session, tmp_path: Path
) -> None:
    source = changed(("model(xb)", "model(torch.randn(len(xb), 6) + rank)"))
    compared = against_one(ranks2, tmp_path / "train.py", source)
    assert compared.parting is None and not compared.steps
    assert "of them are the same" in compared.refused, compared.refused
    assert "CANNOT COMPARE" in comparison_text(compared)
