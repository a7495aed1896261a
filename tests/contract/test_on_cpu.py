"""Programs for GPUs, on CPUs with --cpu: as they are, with the numbers of a program for CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from results import texts
from support import run_with_torch

from ddp_notebook.model import Category
from ddp_notebook.session import Session

PROGRAM = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

acc = torch.accelerator.current_accelerator()
assert torch.cuda.is_available() and torch.accelerator.device_count() >= 2
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device(f"cuda:{local}")
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(3)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = DataLoader(data, 4, sampler=DistributedSampler(data), pin_memory=True)
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(local), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=False)
for x, y in loader:
    with torch.autocast(device_type="cuda", enabled=False):
        loss = (model(x.to(device, non_blocking=True)) - y.cuda()).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.cuda.synchronize()
dist.barrier(device_ids=[local])
print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
"""
BY_HAND = (
    (r"acc = .*\nassert .*", ""),
    (r"torch\.cuda\.(set_device|synchronize)\(.*\)", ""),
    (r'torch\.device\(f"cuda:.*"\)', 'torch.device("cpu")'),
    (r'"nccl", device_id=device', '"gloo"'),
    (r", pin_memory=True|, device_ids=\[local\]|device_ids=\[local\]", ""),
    (r"\.to\(local\)|\.cuda\(\)", ""),
    (r'"cuda"', '"cpu"'),
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "gpus.py"
    path.write_text(PROGRAM)
    return path


def test_a_script_gives_the_numbers_of_one_for_cpus(
    ranks2: Session, script: Path, tmp_path: Path
) -> None:
    source = PROGRAM
    for old, new in BY_HAND:
        source = re.sub(old, new, source)
    assert "cuda" not in source and "nccl" not in source
    by_hand = tmp_path / "cpus.py"
    by_hand.write_text(source)
    expected, result = ranks2.run_script(str(by_hand)), ranks2.run_script(str(script), cpu=True)
    result.raise_for_error()
    losses = re.findall(r"loss .*", texts(result))
    assert losses and losses == re.findall(r"loss .*", texts(expected))
    said = texts(ranks2.run_script(str(script), cpu=True, ranks=(0,)))
    assert said.count("--cpu: this program asks for CUDA") == 1


def test_a_cell_runs_so_and_the_next_one_does_not(ranks2: Session) -> None:
    result = ranks2.run_cell(PROGRAM, cpu=True)
    result.raise_for_error()
    assert "loss " in texts(result)
    after = ranks2.run_cell("print(torch.cuda.is_available(), torch.cuda.device_count())")
    assert texts(after) == "False 0\n"


def test_ranks_that_a_script_starts_itself_run_so_too(ranks2: Session, tmp_path: Path) -> None:
    path = tmp_path / "spawns.py"
    path.write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    print(torch.zeros(1, device=rank).device, torch.cuda.device_count(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=torch.cuda.device_count())\n"
    )
    result = ranks2.run_script(str(path), as_python=True, cpu=True)
    result.raise_for_error()
    assert texts(result).count("cpu 2\n") == 2


@pytest.mark.parametrize(
    "line", ["torch.ones(1).cuda()", "torch.zeros(1, device='cuda:0')", "torch.ones(1).to(rank)"]
)
def test_without_it_the_line_that_asks_is_named(ranks2: Session, line: str) -> None:
    result = ranks2.run_cell(f"x = {line}")
    assert result.diagnosis is not None
    [finding] = result.diagnosis.findings
    assert finding.category is Category.BACKEND_DEVICE_MISMATCH
    assert "--cpu" in finding.remedy and line in finding.evidence[0]


LEAVES = """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def verify_gpu_count(least):
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= least

def main():
    if not verify_gpu_count(2):
        print("Unable to locate sufficient 2 gpus to run this example. Exiting.")
        raise SystemExit
    dist.init_process_group("nccl")

if __name__ == "__main__":
    {start}
"""


@pytest.mark.parametrize(
    "start",
    ["main()", "mp.spawn(main, nprocs=torch.cuda.device_count())"],
    ids=["leaves", "starts none"],
)
def test_a_script_that_leaves_because_there_is_no_gpu_is_told_of_it(
    ranks2: Session, tmp_path: Path, start: str
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.format(start=start))
    result = ranks2.run_script(str(script))
    assert result.error is None
    assert (
        "leaves.py ended without init_process_group. There are no GPUs here; if it needs some, run "
        f"it on CPUs as it is: %ddp_run --cpu {script}\n"
    ) in texts(result)
    assert "too many" not in texts(result)


def test_a_script_that_asks_for_gpus_and_goes_on_without_is_told_nothing(
    ranks2: Session, tmp_path: Path
) -> None:
    script = tmp_path / "goes_on.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl' if torch.cuda.device_count() else 'gloo')\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    result = ranks2.run_script(str(script))
    assert result.error is None and texts(result) == ""


RESTORED = """
import torch, torch.distributed as dist, torch._dynamo
from torch.distributed import distributed_c10d
from ddp_notebook.rank.cells import on_cpu

owners = (torch, torch.cuda, torch.accelerator, torch.Tensor, torch.nn.Module, dist,
          distributed_c10d, torch.amp.autocast, torch.utils.data.DataLoader)
before = [dict(vars(owner)) for owner in owners]
on_cpu.cuda_on_cpu.begin(3)
assert torch.cuda.device_count() == 3 and torch.cuda.is_available is not before[1]["is_available"]
x = torch.zeros(3, device="cuda:1")
assert str(x.device) == "cpu" and x.to(1) is x and x.cuda() is x
assert str(torch.empty_like(x, device="cuda").device) == str(x.new_ones(1, device=2).device)
with torch.device("cuda"):
    assert str(torch.ones(1).device) == "cpu"
generator = torch.Generator(device="cuda:1").manual_seed(3)
assert torch.rand(2, generator=generator, device="cuda").equal(
    torch.rand(2, generator=torch.Generator().manual_seed(3)))
for made in (generator, torch.default_generator):
    assert isinstance(made, torch.Generator) and not isinstance(3, torch.Generator)
torch.manual_seed(5)
assert torch.cuda.initial_seed() == 5
free, total = torch.cuda.mem_get_info(1)
assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(0.5, 0)
torch.cuda.ipc_collect()
assert isinstance(torch.cuda.memory_summary(device=1), str)
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (x[None] @ x[:, None]).dtype is torch.bfloat16
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
with torch.cuda.stream(torch.cuda.Stream()):
    start.record()
    end.record()
assert start.elapsed_time(end) >= 0
module = torch.nn.DataParallel(torch.nn.Linear(3, 1).cuda())
module(x[None]).sum().backward()
torch.optim.AdamW(module.parameters(), fused=True).step()
assert torch.compile(module)(x[None]).shape == (1, 1)
on_cpu.cuda_on_cpu.end()
for owner, old in zip(owners, before):
    new = vars(owner)
    assert not [name for name in old if new[name] is not old[name]], owner
    assert not [name for name in new if name not in old and "on_cpu" in repr(new[name])]
compiled = torch.compile(lambda: torch.zeros(2) + 1, backend="eager", fullgraph=True)
assert compiled().sum() == 2
"""


def test_all_of_torch_is_as_before_when_it_ends(tmp_path: Path) -> None:
    run_with_torch(RESTORED, tmp_path)


DEVICE = """
import torch
from ddp_notebook.rank.cells import on_cpu

on_cpu.cuda_on_cpu.begin(2)
assert not isinstance(3, torch.cuda.device)
with torch.cuda.device(1):
    pass
"""


def test_a_device_of_cuda_is_a_class_as_torchs_is(tmp_path: Path) -> None:
    run_with_torch(DEVICE, tmp_path)
