"""A session whose ranks are on two far hosts, reached by ssh: what a user does, and each end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support
from far_agents import two_hosts
from far_hosts import FarHosts
from results import last_values, rank_pids, texts
from support import eventually, spared_processes

from ddp_notebook.errors import CellFailed, Stuck
from ddp_notebook.launch.placement import parse_hosts
from ddp_notebook.launch.process_ids import host_of
from ddp_notebook.model import Category, Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

OPTIONS = InitOptions(
    world_size=4, device="cpu", hosts=parse_hosts("far-a:2,far-b"), python=sys.executable
)
ALL = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def hosts(
    nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FarHosts]:
    with two_hosts(tmp_path_factory.mktemp("far")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(hosts: FarHosts) -> Iterator[Session]:
    with support.shared_session(OPTIONS) as session:
        client: Any = processes_of(session).fork_server
        with spared_processes([host.ssh.pid for host in client._far.values()]):
            yield session
    hosts.nothing_left()


@pytest.fixture
def ranks(shared: Session) -> Iterator[Session]:
    """Its ranks, free before and after."""
    yield shared
    if not shared.record.snapshot.ready:
        shared.abort()


def test_ranks_meet_over_the_network_between_the_hosts(ranks: Session, hosts: FarHosts) -> None:
    assert [host_of(pid) for pid in rank_pids(ranks)] == [1, 1, 2, 2]
    assert hosts.address("far-a") in ranks.status().headline
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME"
    seen = last_values(
        ranks, f"import os, socket\n[socket.gethostname(), *map(os.getenv, {names})]"
    )
    assert seen == {
        (0,): "['far-a', '0', '2', '0', 'eth0']",
        (1,): "['far-a', '1', '2', '0', 'eth0']",
        (2,): "['far-b', '0', '2', '1', 'eth0']",
        (3,): "['far-b', '1', '2', '1', 'eth0']",
    }
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}
    assert [row.host for row in ranks.status().rows] == ["far-a", "far-a", "far-b", "far-b"]
    log = processes_of(ranks).folder / "log" / "controller.log"
    assert "control" not in log.read_text(), "the hub logs nothing of what agents are sent"


def test_setup_goes_stage_by_stage(ranks: Session) -> None:
    ranks.init(InitOptions(**{**OPTIONS.__dict__, "step": True}), replace=True)
    steps = 0
    while not ranks.record.snapshot.ready:
        ranks.step()
        steps += 1
    assert steps > 3
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}


def test_a_conditional_collective_is_named_across_hosts(ranks: Session) -> None:
    result = ranks.run_cell("if rank != 3:\n    dist.all_reduce(torch.ones(1))")
    assert isinstance(result.error, Stuck)
    assert result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (3,))
    assert "dist.all_reduce" in str(ranks.where())
    before = rank_pids(ranks)
    ranks.abort()
    assert rank_pids(ranks) == before
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}


def test_a_healthy_training_has_no_finding(ranks: Session) -> None:
    code = (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))\n"
        "for _ in range(50):\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
    )
    result = ranks.run_cell(code)
    result.raise_for_error()
    assert result.diagnosis is None or not result.diagnosis.findings
    assert not ranks.why().findings


def test_a_stopped_rank_is_found_on_its_host(ranks: Session) -> None:
    code = (
        "import os, signal\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()"
    )
    result = ranks.run_cell(code)
    assert result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert finding.ranks == (2,)
    assert finding.cause.startswith("Rank 2 is stopped")
    ranks.abort()
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}


def test_the_end_of_a_rank_is_known_and_it_starts_again(ranks: Session) -> None:
    code = "import os\nif rank == 3:\n    os.write(2, b'last words\\n')\n    os._exit(7)"
    result = ranks.run_cell(code)
    assert isinstance(result.error, CellFailed)
    state = ranks.record.snapshot.ranks[3]
    assert (state.status, state.exit_code) == (Status.DEAD, 7)
    assert state.last_words == "last words\n"
    before = rank_pids(ranks)
    ranks.restart((3,))
    after = rank_pids(ranks)
    assert after[:3] == before[:3]
    assert host_of(after[3]) == 2
    assert after[3] != before[3]
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}


def test_what_a_rank_prints_is_whole(ranks: Session) -> None:
    ranks.run_cell("print('é' * 1_500_000) if rank == 2 else print(rank)").raise_for_error()
    assert ranks.output(2) == "é" * 1_500_000 + "\n"
    assert ranks.output(1) == "1\n"


def test_a_script_runs_on_the_hosts_of_its_ranks(ranks: Session, hosts: FarHosts) -> None:
    script = Path(f"/tmp/job-{os.getpid()}.py")
    source = (
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\n"
        "print(socket.gethostname(), os.environ['LOCAL_RANK'], x.item())\n"
    )
    try:
        for path in (script, *(hosts.tmp(name) / script.name for name in hosts.names)):
            path.write_text(source)
        result = ranks.run_script(str(script))
        result.raise_for_error()
        for line in ("far-a 0 4.0", "far-a 1 4.0", "far-b 0 4.0", "far-b 1 4.0"):
            assert line in texts(result)
    finally:
        script.unlink()


def test_a_cut_in_a_cell_loses_nothing(ranks: Session, hosts: FarHosts) -> None:
    code = "import time\nfor n in range(50):\n    print(n, flush=True)\n    time.sleep(0.1)"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ranks.run_cell, code)
        client: Any = processes_of(ranks).fork_server
        eventually(lambda: any(s.cell for s in ranks.record.snapshot.ranks), 10)
        with hosts.cut("far-b"):
            eventually(lambda: client.silent_s(2) > 3.0, 15)
        result = running.result(60)
    result.raise_for_error()
    for group in result.outputs:
        text = "".join(item.text for item in group.items)
        assert text.split() == [str(n) for n in range(50)], group.ranks
    assert not any(state.lost_events for state in ranks.record.snapshot.ranks)
    assert last_values(ranks, ALL) == {(0, 1, 2, 3): "4.0"}
