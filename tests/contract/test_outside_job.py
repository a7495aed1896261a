"""A job that torchrun started without the variable, seen from outside by py-spy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import eventually

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import hosts, pyspy
from ddp_notebook.jobs.target import Target
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.rank.prepared import job_folder

SCRIPT = """\
import os, torch, torch.distributed as dist

def train(rank):
    stop = torch.zeros(1)
    while not stop:
        stop = torch.tensor([float(rank == 0 and os.path.exists("hang"))])
        dist.all_reduce(stop)
    if rank == 1:
        dist.barrier()
    dist.broadcast(stop, 0)
    dist.all_reduce(stop)

dist.init_process_group("gloo")
train(dist.get_rank())
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The pid of torchrun, with two ranks."""
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, f"/tmp/ddpnb-test-{os.getpid()}")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DDP_NOTEBOOK": ""}
    port = free_port("127.0.0.1")
    words = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", "train.py"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield launcher.pid
    launcher.terminate()  # torchrun ends its ranks
    launcher.wait()


def target_of(pid: int) -> Target | None:
    try:
        target = hosts.named([str(pid)])
    except UsageMistake:  # its ranks are not there yet
        return None
    return target if set(target.places()) == {0, 1} else None


@pytest.mark.skipif(pyspy.command() is None, reason="py-spy is not installed")
def test_a_job_that_was_not_prepared_is_judged_when_it_hangs_and_not_before(
    job: int, tmp_path: Path
) -> None:
    target = eventually(lambda: target_of(job), 60, "both ranks run")
    assert target is not None
    eventually(
        lambda: any("all_reduce" in path[-1].text for path in target.places().values()),
        60,
        "the loop runs",
    )
    assert not [f for f in target.why().diagnosis.findings if not f.passing]
    (tmp_path / "hang").touch()
    until_s = time.monotonic() + 60
    while (verdict := target.why()).outcome is not Outcome.FINDING:
        assert time.monotonic() < until_s, verdict
    (finding,) = verdict.diagnosis.findings
    assert finding.ranks == (1,) and "if rank == 1" in finding.remedy, finding
    assert "by py-spy" in verdict.basis and "outside" in target.about
    tree = target.where(locals=True)
    assert "barrier" in tree.stack(1).frames[-1].source, tree
    assert [local.name for local in tree.stack(1).frames[-1].locals if local.name == "rank"]
