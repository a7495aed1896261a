"""A whole program in a cell: its group is the ranks' own, and no ranks are started within ranks."""

from __future__ import annotations

import psutil
import pytest
from results import rank_pids, texts

from ddp_notebook.model import Category
from ddp_notebook.session import Session

PROGRAM = """
import os
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def main(rank, world_size, epochs=1):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("{backend}", rank=rank, world_size=world_size)
    group = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print("total", total.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    {start}
"""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_program_with_its_own_group_runs_again_and_again(ranks2: Session, backend: str) -> None:
    program = PROGRAM.format(backend=backend, start="main(rank, world_size)")
    for _ in range(2):
        result = ranks2.run_cell(program)
        result.raise_for_error()
        assert "total 2.0" in texts(result)
    after = ranks2.run_cell("print(len(dist.distributed_c10d._world.pg_map))")
    assert texts(after) == "1\n"  # the program's own group is gone, the ranks' is not
    assert "No problem" in str(ranks2.why()) or not ranks2.why().findings


def test_the_group_is_kept_in_words_once(ranks2: Session) -> None:
    ranks2.abort()  # makes a new group
    first, second = (
        texts(ranks2.run_cell("dist.init_process_group()\ndist.destroy_process_group()"))
        for _ in range(2)
    )
    assert "have a group already (gloo, 2 ranks)" in first and not second


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.init_process_group('gloo', world_size=4)", "4 ranks (here: 2)"),
        ("dist.init_process_group('mpi')", "backend mpi (here: gloo)"),
    ],
)
def test_another_group_is_refused(ranks2: Session, call: str, words: str) -> None:
    result = ranks2.run_cell(call)
    assert result.diagnosis is not None
    [finding] = result.diagnosis.findings
    assert finding.category is Category.DOUBLE_INIT and words in finding.cause
    assert "%ddp_init" in finding.remedy


@pytest.mark.parametrize(
    ("start", "remedy"),
    [
        ("mp.spawn(main, args=(2,), nprocs=2)", "main(rank, world_size)"),
        ("mp.spawn(main, args=(0,), nprocs=0)", "main(rank, world_size)"),
        ("elastic_launch(LaunchConfig(1, 1, 2), main)(2)", "main(rank, world_size)"),
        ("!torchrun --nproc-per-node 2 train.py --lr 1", "%ddp_run train.py --lr 1"),
        ("!{sys.executable} -m torch.distributed.run a.py", "%ddp_run a.py"),
    ],
)
def test_what_would_start_ranks_within_ranks_is_refused_first(
    ranks2: Session, start: str, remedy: str
) -> None:
    before = [psutil.Process(pid).children(recursive=True) for pid in rank_pids(ranks2)]
    start = "import sys\n    " * ("sys." in start) + start
    result = ranks2.run_cell(PROGRAM.format(backend="gloo", start=start))
    assert result.diagnosis is not None
    [finding] = result.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.NOTEBOOK_LAUNCH, (0, 1))
    assert remedy in finding.remedy
    now = [psutil.Process(pid).children(recursive=True) for pid in rank_pids(ranks2)]
    assert now == before


def test_processes_that_are_no_ranks_start_as_ever(ranks2: Session) -> None:
    """By a fork, in which torch decides, or of a module's function."""
    source = (
        "import math, os, torch.multiprocessing as mp\n"
        "def own(n):\n"
        "    try:\n"
        "        dist.init_process_group('gloo')\n"
        "    except ValueError as error:\n"
        "        os._exit('twice' not in str(error))\n"
        "mp.start_processes(own, nprocs=1, start_method='fork')\n"
        "mp.spawn(math.sqrt, nprocs=1)\n"
        "def shown():\n"
        "    word = 'torchrun'\n"
        "    !echo {word}\n"
        "shown()\n"
        "print('done')"
    )
    result = ranks2.run_cell(source)
    result.raise_for_error()
    assert "torchrun" in texts(result) and "done" in texts(result)


def test_a_cell_has_no_prompt_and_no_arguments(ranks2: Session) -> None:
    """Lightning refuses to run where somebody types at a prompt; argparse reads the arguments."""
    source = "import sys\n(sys.argv[1:], [name for name in vars(sys) if name.startswith('ps')])"
    result = ranks2.run_cell(source)
    result.raise_for_error()
    assert result.outputs[0].items[-1].data["text/plain"] == "([], [])"
