"""`--against 1` as a cell shows it: a script, and a cell that is a whole training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

CELL = """torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(32.0).reshape(8, 4) / 32
mine = data[rank::world_size]
for step in range(2):
    optimizer.zero_grad()
    loss = model(mine).pow(2).{reduced}()
    loss.backward()
    optimizer.step()
"""


def test_a_cell_and_a_script_say_where_they_part(
    shell2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell2.run_cell_magic("ddp", "--against 1", CELL.format(reduced="mean"))
    shown = capsys.readouterr().out
    assert "EQUAL. 2 ranks compute what one rank does in all 2 training steps" in shown, shown

    script = tmp_path / "train.py"
    first = (
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\n"
        "rank, world_size = dist.get_rank(), dist.get_world_size()\n"
    )
    script.write_text(first + CELL.format(reduced="sum"))
    shell2.run_line_magic("ddp_run", f"--against 1 {script}")
    shown = capsys.readouterr().out
    assert "PARTED in step 1, at weight." in shown, shown
    assert "at train.py:13    loss.backward()" in shown
    assert "Each gradient is 1/2 of one rank's" in shown


def test_it_cannot_be_detached_or_stepped(shell2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell2.run_cell("%%ddp --against 1 --detach\nprint(1)")
    assert "leave --detach and --step out" in capsys.readouterr().err
