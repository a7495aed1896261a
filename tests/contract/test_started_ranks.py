"""Ranks that a script starts itself are ranks of the run: judged, located, shown, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.errors import CellFailed, Stuck, UsageMistake
from ddp_notebook.model import Category, Status
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import os, random, socket, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE = 3


def work(rank, port):
    port += rank == 2 and "port" in sys.argv
    if rank == 2 and "absent" in sys.argv:
        return
    meet = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=SIZE)
    train(rank)
    dist.destroy_process_group()


def train(rank):
    torch.manual_seed(rank)
    net = torch.nn.Linear(4, 1)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        batch = torch.randn(2, 4)
        if rank == 1 and step == 4 and "skip" in sys.argv:
            continue
        if rank == 1 and step == 4 and "raise" in sys.argv:
            raise ValueError("a bad batch")
        if rank == 1 and step == 4 and "exit" in sys.argv:
            os._exit(3)
        optimizer.zero_grad()
        (net if "bypass" in sys.argv else model)(batch).square().sum().backward()
        optimizer.step()
    dist.barrier()
    os.write(1, f"{rank}: {net.weight.double().sum().item()!r}\\n".encode())


def by_launcher():
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()


def free_port():
    # Below those of connections: until a rank that loads torch listens, one could take it.
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return port


def main(how, port):
    if how == "spawn":
        mp.spawn(work, args=(port,), nprocs=SIZE)
    elif how == "fork":
        mp.start_processes(work, args=(port,), nprocs=SIZE, start_method="fork")
    elif how == "launcher":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(1, 1, SIZE, start_method="fork", run_id="none",
                              rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
        elastic_launch(config, by_launcher)()
    else:
        fork = mp.get_context("fork")
        ranks = range(1, SIZE) if how == "main" else range(SIZE)
        started = []
        for rank in ranks:
            if "late" in sys.argv:
                time.sleep(1.5)
            started.append(fork.Process(target=work, args=(rank, port)))
            started[-1].start()
        if how == "main":
            work(0, port)
        for each in started:
            each.join()
    print("torchrun's:", sorted(name for name in os.environ if "RANK" in name))


if __name__ == "__main__":
    main(sys.argv[1], free_port())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "spawns.py"
    path.write_text(SCRIPT)
    return path


def run(session: Session, script: Path, *arguments: str) -> Any:
    return session.run_script(str(script), arguments, as_python=True)


@pytest.fixture(scope="module")
def by_python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What plain Python has the script write."""
    path = tmp_path_factory.mktemp("python") / "spawns.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), "fork"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("how", ["fork", "process", "main", "launcher"])
def test_a_healthy_script_computes_what_it_does_by_python(
    ranks2: Session, script: Path, by_python: list[str], how: str
) -> None:
    result = run(ranks2, script, how)
    result.raise_for_error()
    assert result.diagnosis is None
    written = sorted(ranks2.output(0).splitlines())
    assert written == by_python
    assert written[-1] == "torchrun's: []"
    assert ranks2.why().findings == ()


@pytest.mark.parametrize("how", ["fork", "process", "main", "launcher"])
def test_a_hang_is_judged_located_shown_and_ended(ranks2: Session, script: Path, how: str) -> None:
    result = run(ranks2, script, how, "skip")
    assert isinstance(result.error, Stuck), result.error
    finding = result.diagnosis.findings[0]
    assert finding.ranks == (1,), finding
    assert ("spawns.py", 35) in [(s.place.file, s.place.line) for s in finding.sides if s.place]
    assert ranks2.why().findings[0].ranks == (1,)
    where = str(ranks2.where())
    assert ranks2.where().world_size == 3 and "train" in where, where
    assert [branch.ranks for branch in ranks2.where((2,)).branches] == [(2,)]
    board = ranks2.status()
    assert [rank for row in board.rows for rank in row.ranks] == [0, 1, 2]
    assert board.notes == ("These are the ranks that spawns.py has started itself.",)
    states = ranks2.abort().snapshot.ranks
    assert [state.status for state in states] == [Status.READY] * 2, "the session's own"
    ranks2.run_cell("dist.barrier()").raise_for_error()


def test_ranks_of_mp_spawn_are_judged(ranks2: Session, script: Path) -> None:
    """Each loads torch anew, and prepares itself then."""
    result = run(ranks2, script, "spawn", "skip")
    assert isinstance(result.error, Stuck), result.error
    finding = result.diagnosis.findings[0]
    assert finding.ranks == (1,), finding
    ranks2.abort()


def test_what_one_of_them_raised_is_the_finding(ranks2: Session, script: Path) -> None:
    result = run(ranks2, script, "fork", "raise")
    assert isinstance(result.error, CellFailed)
    finding = result.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
    assert "a bad batch" in finding.cause


def test_one_that_exits_is_named_with_its_code(ranks2: Session, script: Path) -> None:
    """The script waits for the end of rank 0 first, and has not asked for that of rank 1."""
    result = run(ranks2, script, "process", "exit")
    assert result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert finding.ranks == (1,), finding


def test_ranks_that_were_told_another_port_are_told_apart(ranks2: Session, script: Path) -> None:
    result = run(ranks2, script, "fork", "port")
    assert isinstance(result.error, Stuck)
    finding = result.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (2,))
    ranks2.abort()


def test_a_rank_that_never_comes_is_missing_and_one_that_comes_late_is_not(
    ranks2: Session, script: Path
) -> None:
    late = run(ranks2, script, "process", "late")
    late.raise_for_error()
    assert late.diagnosis is None
    absent = run(ranks2, script, "process", "absent")
    assert isinstance(absent.error, Stuck)
    finding = absent.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (2,))
    ranks2.abort()


@pytest.mark.parametrize("how", ["fork", "main"])
def test_what_they_trained_is_checked(ranks2: Session, script: Path, how: str) -> None:
    result = run(ranks2, script, how, "bypass")
    result.raise_for_error()
    assert result.diagnosis is not None
    assert result.diagnosis.findings[0].category is Category.DDP_BYPASS


FORKS = """
import os, sys
child = os.fork()
if child == 0:
    if "raise" in sys.argv:
        raise ValueError("in the child")
    sys.exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_child_that_comes_to_the_scripts_end_ends(ranks2: Session, tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    run(ranks2, path).raise_for_error()
    assert ranks2.pull("code") == {0: 3}
    run(ranks2, path, "raise").raise_for_error()
    assert ranks2.pull("code") == {0: 1}
    assert "ValueError: in the child" in ranks2.output(0)


def test_python_runs_a_script_once(ranks2: Session, script: Path) -> None:
    with pytest.raises(UsageMistake, match="once"):
        ranks2.run_script(str(script), ranks=(0, 1), as_python=True)
    with pytest.raises(UsageMistake, match="--step"):
        ranks2.run_script(str(script), as_python=True, hold=True)
    assert "RANK" not in os.environ


def test_ranks_that_start_ranks_are_judged_and_told_that_these_are_too_many(
    ranks2: Session, script: Path
) -> None:
    result = ranks2.run_script(str(script), ("fork", "skip"))
    assert isinstance(result.error, Stuck)
    assert result.diagnosis is not None
    assert result.diagnosis.findings[0].ranks == (1,)
    (remark,) = result.diagnosis.remarks
    assert remark.text.startswith(
        "This script starts its own ranks, and %ddp_run started it 2 times (6 ranks in"
    )
    assert remark.text in ranks2.status().snapshot.notes
    ranks2.abort()
    ranks2.run_script(str(script), ("fork",)).raise_for_error()
    assert [each.text for each in ranks2.why().remarks if "6 ranks in all" in each.text]
