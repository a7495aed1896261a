"""Two ranks of a script, prepared and started as a launcher does, for tests of such jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import eventually, with_entry_point

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import find, prepared
from ddp_notebook.jobs.records import Job
from ddp_notebook.jobs.verdict import Outcome, Verdict
from ddp_notebook.launch.addresses import free_port

ROOT = Path(__file__).parents[1]
SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
dist.init_device_mesh("cpu", (2,)) if "mesh" in sys.argv else dist.init_process_group("gloo")
rank = dist.get_rank()
net = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    net(torch.ones(3, 4) * (rank + step)).sum().backward()
    optimizer.step()
while "busy" in sys.argv and "ddp_notebook.rank.inspect.answers" not in sys.modules:
    pass
if "hang" in sys.argv and rank == 0:
    dist.barrier()
total = sum(parameter.double().sum() for parameter in net.parameters())
dist.all_reduce(total)
def report(total):  # with a function, Python clears the module's tensors as garbage when it ends
    print(rank, repr(float(total)))
report(total)
while "steps" in sys.argv:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
dist.destroy_process_group()
"""


def launch(
    folder: Path,
    ranks: list[subprocess.Popen],
    *arguments: str,
    variable: str = "1",
    by: Sequence[str] = (),
    numbers: Sequence[int] = (0, 1),
) -> list[subprocess.Popen]:
    """Two ranks of the script, started as a launcher does; `by` is what runs the script.

    `numbers` are what they get as RANK.
    """
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "DDP_NOTEBOOK": variable,
        "PYTHONPATH": f"{ROOT}:{with_entry_point(folder)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    new = [
        subprocess.Popen(
            [sys.executable, *by, str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in numbers
    ]
    ranks += new
    return new


def job_of(pid: int, deadline_s: float) -> Job | None:
    """The job of a process, once it is there."""
    while time.monotonic() < deadline_s:
        try:
            return find.job_of(pid)
        except UsageMistake:
            time.sleep(0.1)
    return None


def found_in(pid: int, timeout_s: float = 120) -> Verdict:
    """The verdict on a job, once it has a finding, or none can come any more."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        job = job_of(pid, deadline_s)
        assert job is not None, "no job appeared"
        verdict = prepared.why(job)
        if verdict.outcome is Outcome.FINDING or time.monotonic() > deadline_s:
            return verdict
        time.sleep(0.2)


def said(shell: Any, capsys: pytest.CaptureFixture[str], source: str) -> str:
    """What a cell of a notebook shows."""
    capsys.readouterr()
    assert shell.run_cell(source).success, source
    return capsys.readouterr().out


def in_its_loop(pid: int) -> Job | None:
    """The job of a process whose ranks do steps; None before."""
    try:
        job = find.job_of(pid)
    except UsageMistake:
        return None
    logs = [process.log(rank, 1).records for rank, process in job.processes.items()]
    return job if len(logs) == 2 and all(of and of[0].number > 9 for of in logs) else None


def issued(job: Job) -> list[int]:
    """How many collectives each rank has issued."""
    logs = (process.log(rank, 1).records for rank, process in job.processes.items())
    return [records[-1].number for records in logs]


def goes_on(job: Job) -> bool:
    """True once each rank has issued more."""
    before = issued(job)
    return bool(
        eventually(lambda: all(b > a for a, b in zip(before, issued(job), strict=True)), 30)
    )
