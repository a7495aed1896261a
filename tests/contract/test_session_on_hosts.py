"""A session on two hosts of their own, reached by ssh: one start, and what users do with it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from far_hosts import FarHosts, need_far_hosts
from results import last_values, rank_pids, texts
from support import eventually

from ddp_notebook.errors import CellFailed, SetupFailed, Stuck, UsageMistake
from ddp_notebook.launch.placement import parse_hosts
from ddp_notebook.launch.process_ids import host_of, pid_of
from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

pytestmark = pytest.mark.timeout(180)
OPTIONS = InitOptions(
    world_size=4, device="cpu", hosts=parse_hosts("far-a,far-b"), python=sys.executable
)
SUM = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarHosts]:
    """Two hosts."""
    need_far_hosts()
    made = FarHosts(tmp_path_factory.mktemp("hosts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.ssh)
        holders = [holder.pid for holder in made._holders.values()]
        with support.spared_processes(holders, str(made.folder)):
            yield made
    made.close()


@pytest.fixture(scope="module")
def shared(hosts: FarHosts) -> Iterator[Any]:
    """A session with two ranks on each of them."""
    with support.shared_session(OPTIONS) as session:
        far = processes_of(session).fork_server._far.values()
        with support.spared_processes([host.ssh.pid for host in far]):
            yield session
    hosts.nothing_left()


@pytest.fixture
def ranks(shared: Session) -> Iterator[Session]:
    """Its ranks, free before and after."""
    yield shared
    if not shared.record.snapshot.ready:
        shared.abort()


def test_ranks_on_both_hosts_compute_together(ranks: Session) -> None:
    assert last_values(ranks, SUM) == {(0, 1, 2, 3): "4.0"}
    rows = ranks.status().rows
    assert [row.host for row in rows] == ["far-a", "far-a", "far-b", "far-b"]
    assert [row.pid for row in rows] == [pid_of(pid) for pid in rank_pids(ranks)]
    shown = last_values(ranks, "import os\n(os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'])")
    assert shown == {
        (0,): "('0', '0')",
        (1,): "('1', '0')",
        (2,): "('0', '1')",
        (3,): "('1', '1')",
    }


def test_a_rank_that_skips_a_collective_is_found_and_all_are_freed(ranks: Session) -> None:
    result = ranks.run_cell("if rank != 3:\n    dist.barrier()")
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    assert result.diagnosis.findings[0].ranks == (3,)
    before = rank_pids(ranks)
    ranks.abort()
    assert rank_pids(ranks) == before, "no rank needed a new process"


def test_a_rank_stopped_on_its_host_is_found_and_replaced_there(ranks: Session) -> None:
    before = rank_pids(ranks)
    stop = "import os, signal\nif rank == 3:\n    os.kill(os.getpid(), signal.SIGSTOP)"
    result = ranks.run_cell(f"{stop}\ndist.barrier()")
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert finding.cause.startswith("Rank 3 is stopped")
    assert f"`kill -CONT {pid_of(before[3])}`" in finding.remedy
    ranks.abort()
    after = rank_pids(ranks)
    assert after[:3] == before[:3] and after[3] != before[3] and host_of(after[3]) == 2
    assert last_values(ranks, SUM) == {(0, 1, 2, 3): "4.0"}


def test_a_killed_rank_is_known_with_its_last_words_and_restarted(ranks: Session) -> None:
    words = "import os\nif rank == 2:\n    os.write(2, b'so long')\n    os.kill(os.getpid(), 9)"
    result = ranks.run_cell(f"{words}\ndist.barrier()")
    assert isinstance(result.error, CellFailed)
    state = ranks.record.snapshot.ranks[2]
    assert (state.status, state.exit_code, state.last_words) == (Status.DEAD, -9, "so long")
    assert state.peak_bytes > 1 << 20 and state.oom_kills <= 0
    ranks.abort()
    ranks.restart((2,)) if not ranks.record.snapshot.ready else None
    assert last_values(ranks, SUM) == {(0, 1, 2, 3): "4.0"}


def test_long_output_of_a_far_rank_is_read_in_full(ranks: Session) -> None:
    ranks.run_cell("print('é' * 400_000) if rank == 3 else None").raise_for_error()
    assert ranks.output(3) == "é" * 400_000 + "\n"


def test_a_script_runs_on_the_hosts_that_have_it(
    ranks: Session, hosts: FarHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(os.environ['LOCAL_RANK'], x.item())\n"
        "dist.destroy_process_group()\n"
    )
    with pytest.raises(UsageMistake, match=r"job\.py cannot run on host far-a: no such file is at"):
        ranks.run_script(str(script))
    for name in hosts.names:
        there = hosts.folder / name / "tmp" / script.relative_to("/tmp")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, there)
    result = ranks.run_script(str(script))
    result.raise_for_error()
    assert {"0 4.0", "1 4.0"} <= {*texts(result).splitlines()}
    there.write_text("print('another')")
    with pytest.raises(UsageMistake, match="cannot run on host far-b: another file is at"):
        ranks.run_script(str(script))


def test_a_host_whose_link_is_cut_is_named_and_goes_on_when_it_is_back(
    ranks: Session, hosts: FarHosts
) -> None:
    server = processes_of(ranks).fork_server
    before = rank_pids(ranks)
    with hosts.cut("far-b"):
        eventually(lambda: server.silent_s(2) > 3.5)
        with pytest.raises(SetupFailed, match="Host far-b has not been heard for"):
            ranks.restart((3,))
    eventually(lambda: server.silent_s(2) < 1.0)
    assert rank_pids(ranks) == before
    assert last_values(ranks, "rank // 2") == {(0, 1): "0", (2, 3): "1"}
