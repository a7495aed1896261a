"""Many learners on one machine: sessions of two ranks side by side, and what each takes."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from kernels import Kernel
from memory import megabytes, pss, stock_engines
from rows import Row, seconds
from support import eventually, our_processes

LESSON = """%%ddp
import torch.nn as nn
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    net(torch.randn(32, 64)).sum().backward()
    optimizer.step()
sums = torch.tensor([float(rank + 1)])
dist.all_reduce(sums)
assert sums.item() == 3, sums
"""
"""What everybody does: a model of their own is trained, and a sum is right."""


def rows(learners: int) -> list[Row]:
    """All of them start at once, do the lesson at once, and stay until the last is done."""
    stock = stock_engines(2)["all"]
    eventually(lambda: not our_processes(), what="the end of the stock engines")
    rival = f"two stock engines with torch, without it {megabytes(stock)}"
    well, took_s, each = _lesson(learners)
    return [
        Row(
            f"{learners} learners start two ranks each at once, and train",
            f"{well} of {learners}, the last after {seconds(took_s)}",
            wanted=f"{learners} of {learners}",
            met=well == learners,
        ),
        Row(
            "  memory (PSS) of each, with the notebook kernel",
            megabytes(each),
            rival,
        ),
    ]


def _lesson(learners: int) -> tuple[int, float, float]:
    """How many learners did it, the last one's seconds, and the memory of each in bytes."""
    others = {process.pid for process in our_processes()}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(learners) as pool:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # One after the other: kernels that Jupyter starts at once now and then get the same port.
        kernels = [stack.enter_context(Kernel()) for _ in range(learners)]
        for number, kernel in enumerate(kernels):
            kernel.run_well(f"%mkdir {folder}/{number}\n%cd -q {folder}/{number}")
        began = time.monotonic()
        well = sum(pool.map(_takes_part, kernels))
        took_s = time.monotonic() - began
        ours = [p.pid for p in our_processes() if p.pid not in others]
        return well, took_s, pss(ours) / learners


def _takes_part(kernel: Kernel) -> bool:
    try:
        kernel.run_well("%load_ext ddp_notebook", timeout_s=300)
        kernel.run_well("%ddp_init --world-size 2 --timeout 300", timeout_s=600)
        kernel.run_well(LESSON, timeout_s=300)
    except AssertionError as problem:
        print(problem, file=sys.stderr, flush=True)
        return False
    return True
