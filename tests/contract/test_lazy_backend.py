"""Ranks whose collectives return at once, as NCCL's do, and end later, on what stands for a GPU.

There is no GPU here: see `lazy` for what stands for one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lazy import BEGIN, lazily
from results import last_values, texts
from support import eventually, stuck

from ddp_notebook.errors import CellFailed, CellInterrupted, Stuck, UsageMistake
from ddp_notebook.model import Activity, Category, Status
from ddp_notebook.session import Session
from ddp_notebook.session.tools.ddp_construction import WrapOptions

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def lazy(ranks3: Session) -> Iterator[Any]:
    """Three such ranks; afterwards they are ordinary ones again."""
    with lazily(ranks3):
        yield ranks3


@pytest.mark.parametrize("reads", ["pass", "x.tolist()"], ids=["unread", "read"])
def test_a_cell_ends_when_the_gpu_does(lazy: Session, reads: str) -> None:
    """Each rank has issued all of it at once, and the last one comes late to the collective."""
    result = lazy.run_cell(
        "import hashlib\n"
        "if rank == 2:\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 6_000_000)\n"
        "x = torch.ones(4)\n"
        f"dist.all_reduce(x)\n{reads};"
    )
    assert result.error is None and result.diagnosis is None
    assert last_values(lazy, "__import__('lazy').is_working(), x.tolist()") == {
        (0, 1, 2): "(False, [3.0, 3.0, 3.0, 3.0])"
    }


@pytest.mark.parametrize("reads", ["pass", "x.tolist()"], ids=["unread", "read"])
def test_what_some_never_issue_is_a_hang_whether_or_not_a_value_is_read(
    lazy: Session, reads: str
) -> None:
    began_s = time.monotonic()
    found = stuck(
        lazy,
        f"x = torch.ones(4)\nif rank == 0:\n    dist.all_reduce(x)\n    {reads}\nmine = rank + 5",
    )
    took_s = time.monotonic() - began_s
    [finding] = found.findings
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert took_s < 30, "the time of a machine with other work"
    assert lazy.where().stack(0).doing.activity is Activity.WAITING
    lazy.abort()
    assert last_values(lazy, "mine if rank else x.numel()", ranks=(1, 2)) == {
        (1,): "6",
        (2,): "7",
    }
    assert lazy.record.snapshot.ready


def test_a_model_that_trains_so_trains_as_ever(lazy: Session) -> None:
    result = lazy.run_cell(
        "torch.manual_seed(0)\n"
        "model = DDP(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4) * (rank + step)).mean().backward()\n"
        "    optimizer.step()\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "print(round(sum(p.sum().item() for p in model.parameters()), 5))"
    )
    assert result.error is None
    assert result.diagnosis is None or not result.diagnosis.findings
    assert len({group.ranks for group in result.outputs}) == 1, texts(result)


def test_the_wait_for_the_gpu_at_the_end_of_a_cell_can_be_interrupted(lazy: Session) -> None:
    """With the ranks that wait in it shown as such, and their variables kept."""
    source = "kept = [torch.ones(1)]\nif rank == 0:\n    dist.all_reduce(torch.ones(4))"
    lazy.run_cell(source, wait="forever", detach=True)
    rank = lambda: lazy.record.snapshot.ranks[0]  # noqa: E731
    eventually(lambda: "the GPU works" in rank().doing, 10, "rank 0's wait for its GPU")
    assert rank().status is Status.RUNNING
    current = lazy.runs.current
    assert current is not None
    current.stop()
    result = lazy.wait()
    assert isinstance(result.error, CellInterrupted)
    # The GPU hangs as before: whatever is issued next would wait behind that.
    refused = lazy.run_cell("again = 1")
    assert isinstance(refused.error, CellFailed) and refused.error.ranks == (0,)
    assert "collective of an earlier cell" in str(refused.error)
    assert "%ddp_abort" in str(refused.error)
    with pytest.raises(UsageMistake, match="its GPU is still working"):
        lazy.pull("kept")
    lazy.abort()
    assert last_values(lazy, "kept") == {(0, 1, 2): "[tensor([1.])]"}


TRAINS = """\
import lazy, torch.utils.data
from torch.optim.lr_scheduler import ReduceLROnPlateau
torch.manual_seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
model = DDP(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
scheduler = ReduceLROnPlateau(optimizer)
data = torch.utils.data.TensorDataset(torch.rand(12, 4))
sampler = torch.utils.data.DistributedSampler(data)
for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler):
    lazy.compute(0.1)
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step(loss.detach())
held = {"weights": [torch.ones(3)], "loss": loss.detach()}
if rank == 0:
    dist.all_reduce(torch.ones(4))"""


def test_nothing_of_ours_reads_a_value_while_the_gpu_works(lazy: Session, tmp_path: Path) -> None:
    """Not in a training step, not at the end of a run, not when ranks are asked."""
    found = stuck(lazy, TRAINS)
    assert [finding.ranks for finding in found.findings] == [(0,)]
    lazy.why_now()
    lazy.where(locals=True)
    assert lazy.variables().sections
    lazy.evaluate("held")
    lazy.evaluate("optimizer.state")
    lazy.status()
    lazy.save(tmp_path / "run.json")
    lazy.abort()
    later = "threading.Timer(0.05, lazy.compute, (1.0,)).start()"
    assert lazy.run_cell(f"import threading\ninner = model.module\n{later}").error is None
    lazy.wrap("inner", WrapOptions())
    read = last_values(lazy, "lazy.readings")
    assert read == {(0, 1, 2): "[]"}
    # A reading of ours would be noted.
    ours = "from ddp_notebook.rank.training import digests"
    cell = f"{ours}\nlazy.compute(0.5)\ndigests._norm_and_sample(torch.ones(2))"
    assert lazy.run_cell(cell).error is None
    [noted] = last_values(lazy, "set(lazy.readings)").values()
    assert "ddp_notebook.rank.training.digests:" in noted


def test_a_script_ends_when_the_gpu_does(ranks3: Session, tmp_path: Path) -> None:
    script = tmp_path / "lazily.py"
    begin = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"{BEGIN}x = torch.ones(4)\n"
    )
    script.write_text(f"{begin}if dist.get_rank() == 0:\n    dist.all_reduce(x)\n")
    result = ranks3.run_script(str(script))
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    [finding] = result.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    ranks3.abort()
    script.write_text(f"{begin}dist.all_reduce(x)\nprint(x.tolist())\n")
    assert ranks3.run_script(str(script)).error is None
