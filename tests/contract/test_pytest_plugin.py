"""`pytest -p ddp_notebook.pytest`: a test whose ranks hang fails with the finding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import with_entry_point

from ddp_notebook.launch.addresses import free_port

ROOT = Path(__file__).parents[2]
TESTS = """\
import subprocess, sys, unittest
import pytest
import torch.multiprocessing as mp
from ranks import hangs, leaves, raises

def test_one_rank_raises_as_it_should():
    with pytest.raises(mp.ProcessRaisedException, match="no rows"):
        mp.spawn(raises, (29512,), nprocs=2)

class TestThatHangs(unittest.TestCase):
    def test_it(self):
        mp.spawn(hangs, (29513,), nprocs=2)

def test_that_one_rank_leaves():
    mp.spawn(leaves, (29514,), nprocs=2)
"""
RANKS = """\
import datetime
import torch, torch.distributed as dist

def set_up(rank, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )

def raises(rank, port):
    set_up(rank, port)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("no rows")
    dist.all_reduce(torch.ones(1))

def hangs(rank, port):
    set_up(rank, port)
    if rank == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(1))

def leaves(rank, port):
    set_up(rank, port)
    for batch in range(3 - rank):
        dist.all_reduce(torch.ones(1))
"""


def run(tests: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest with the plugin, in a folder with these tests and their ranks."""
    for number in (29512, 29513, 29514):
        tests = tests.replace(str(number), str(free_port("127.0.0.1")))
    (folder / "test_ranks.py").write_text(tests)
    (folder / "ranks.py").write_text(RANKS)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ddp_notebook.pytest", "test_ranks.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{with_entry_point(folder)}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_a_test_whose_ranks_hang_fails_with_the_finding_and_others_pass(
    tmp_path: Path,
) -> None:
    ended = run(TESTS, tmp_path)

    assert "2 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    hung, _, left = ended.stdout.partition("_ test_that_one_rank_leaves _")
    assert "The ranks of this test hung, and were ended." in hung
    assert "[conditional-collective]" in hung
    assert "ranks.py, line 20" in hung
    assert "Problems of the ranks of this test" in left
    assert "[uneven-inputs]" in left
