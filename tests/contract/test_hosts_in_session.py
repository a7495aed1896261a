"""A session whose ranks are on two hosts: the routing alone, as both are this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hosts
import pytest
import support
from results import last_values, rank_pids, texts
from support import eventually, is_alive

from ddp_notebook.errors import SetupFailed, Stuck, UsageMistake
from ddp_notebook.launch.placement import parse_hosts
from ddp_notebook.launch.process_ids import host_of, pid_of
from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session, pool
from ddp_notebook.testing import cluster_of, processes_of

HOSTS = InitOptions(world_size=3, device="cpu", hosts=parse_hosts("near-a:2,near-b"))


@pytest.fixture(scope="module")
def shared(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A session with ranks 0 and 1 on one host and 2 on another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "HostsClient", fake_hosts.FakeHosts)
        with support.shared_session(HOSTS) as session:
            yield session


@pytest.fixture
def ranks(shared: Session) -> Iterator[Session]:
    """Its ranks, free before and after."""
    yield shared
    if not shared.record.snapshot.ready:
        shared.abort()


def test_ranks_are_started_on_their_hosts(ranks: Session) -> None:
    assert [host_of(pid) for pid in rank_pids(ranks)] == [1, 1, 2]
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
    assert last_values(ranks, f"import os\n[os.environ[n] for n in {names}]") == {
        (0,): "['0', '2', '0', '2']",
        (1,): "['1', '2', '0', '2']",
        (2,): "['0', '1', '1', '2']",
    }
    own = last_values(ranks, "os.getpid()")
    assert own == {(r,): str(pid_of(pid)) for r, pid in enumerate(rank_pids(ranks))}
    assert [row.pid for row in ranks.status().rows] == [pid_of(pid) for pid in rank_pids(ranks)]
    assert host_of(processes_of(ranks).store_pid) == 1, "the store is on the first host"


def test_a_stopped_rank_is_found_where_it_is(ranks: Session) -> None:
    before = rank_pids(ranks)
    code = (
        "import os, signal\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()"
    )
    result = ranks.run_cell(code)
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert finding.ranks == (2,) and finding.cause.startswith("Rank 2 is stopped")
    assert f"`kill -CONT {pid_of(before[2])}`" in finding.remedy
    ranks.abort()
    after = rank_pids(ranks)
    assert after[:2] == before[:2] and after[2] != before[2] and host_of(after[2]) == 2
    assert last_values(ranks, "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()") == {
        (0, 1, 2): "3.0"
    }


def test_the_end_of_a_rank_is_known_with_its_last_words_and_restarted(ranks: Session) -> None:
    before = rank_pids(ranks)
    os.kill(pid_of(before[1]), signal.SIGKILL)
    eventually(lambda: ranks.record.snapshot.ranks[1].status is Status.DEAD)
    state = ranks.record.snapshot.ranks[1]
    assert (state.exit_code, state.oom_kills) == (-signal.SIGKILL, 0)
    assert state.peak_bytes > 0
    ranks.restart((1,))
    assert host_of(rank_pids(ranks)[1]) == 1
    assert last_values(ranks, "dist.get_world_size()") == {(0, 1, 2): "3"}


def test_where_and_abort_reach_every_host(ranks: Session) -> None:
    with pytest.raises(UsageMistake):
        ranks.where((7,))
    result = ranks.run_cell("if rank != 1:\n    dist.barrier()")
    assert isinstance(result.error, Stuck)
    assert "dist.barrier" in str(ranks.where())
    before = rank_pids(ranks)
    ranks.abort()
    assert rank_pids(ranks) == before, "no rank needed a new process"


def test_a_script_runs_on_the_hosts_of_its_ranks(ranks: Session, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print({n: os.environ[n] for n in ('LOCAL_RANK', 'GROUP_RANK', 'LOCAL_WORLD_SIZE')},"
        " os.environ['DDP_NOTEBOOK_HOST'], os.getpid())\ndist.barrier()\n"
    )
    result = ranks.run_script(str(script))
    result.raise_for_error()
    shown = texts(result)
    assert "{'LOCAL_RANK': '0', 'GROUP_RANK': '1', 'LOCAL_WORLD_SIZE': '1'} 2" in shown
    assert [host_of(pid) for pid in rank_pids(ranks)] == [1, 1, 2], "shown are the script's"
    result = ranks.run_script(str(script), ranks=(1, 2))
    assert "{'LOCAL_RANK': '0', 'GROUP_RANK': '0', 'LOCAL_WORLD_SIZE': '1'} 1" in texts(result)


def test_an_abort_interrupts_a_script_with_what_it_started(ranks: Session, tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(p.pid))\np.wait()\n"
    )
    run = threading.Thread(target=lambda: ranks.run_script(str(script), ranks=(2,)), daemon=True)
    run.start()
    eventually(lambda: started.exists() and bool(started.read_text()))
    ranks.abort()
    run.join(20)
    assert not run.is_alive() and not is_alive(int(started.read_text()))


def test_the_lab_is_refused(ranks: Session) -> None:
    with pytest.raises(UsageMistake, match="on others"):
        processes_of(ranks).open_lab(("a", "b"), "", 29500)


def test_another_number_of_ranks_has_new_processes(ranks: Session) -> None:
    other = InitOptions(world_size=4, device="cpu", hosts=parse_hosts("near-a:2,near-b"))
    assert "another host" in processes_of(ranks).why_not_kept(other)
    assert "--hosts" in processes_of(ranks).why_not_kept(InitOptions(world_size=3, device="cpu"))


def test_the_end_leaves_the_local_fork_server_for_other_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "HostsClient", fake_hosts.FakeHosts)
        session = Session()
        try:
            session.init(HOSTS)
            pids = [pid_of(pid) for pid in rank_pids(session)]
            session.shutdown(keep_warm=True)
            assert not any(map(is_alive, pids))
            board = session.init(InitOptions(world_size=2, device="cpu"))
            assert [host_of(state.pid) for state in board.snapshot.ranks] == [0, 0]
        finally:
            session.shutdown()


def test_long_output_is_read_where_it_is(ranks: Session) -> None:
    ranks.run_cell("print('é' * 1_500_000) if rank == 2 else None").raise_for_error()
    asked = processes_of(ranks).fork_server.asked
    asked.clear()
    assert ranks.output(2) == "é" * 1_500_000 + "\n"
    assert (2, "file_part") in asked
    ranks.run_cell("import os\nos.write(2, b'from C')").raise_for_error()
    assert "from C" in ranks.output(2, log=True)


def test_each_host_has_the_threads_of_its_cores(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {1: {"cores": 8, "torch": "2.9"}, 2: {"cores": 1, "torch": "2.13"}}
    monkeypatch.setattr(fake_hosts.FakeHosts, "hellos", said)
    monkeypatch.setattr(pool, "HostsClient", fake_hosts.FakeHosts)
    session.init(InitOptions(world_size=4, device="cpu", hosts=parse_hosts("a,b")))
    assert last_values(session, "torch.get_num_threads()") == {(0, 1): "4", (2, 3): "1"}
    notes = "\n".join(session.record.snapshot.notes)
    assert "Ranks 2 and 3 share 1 CPU core on b" in notes
    assert "2.9 on a, 2.13 on b" in notes


def test_a_host_without_memory_is_named_and_nothing_is_left(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_hosts.FakeHosts, "hellos", {2: {"memory_bytes": 1 << 20}})
    monkeypatch.setattr(pool, "HostsClient", fake_hosts.FakeHosts)
    with pytest.raises(SetupFailed, match=r"Host b: 1 rank does not fit into memory.*--hosts b:1"):
        session.init(InitOptions(world_size=2, device="cpu", hosts=parse_hosts("a,b")))


def test_a_host_that_is_not_heard_keeps_its_ranks_and_is_named(
    ranks: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rank_pids(ranks)
    monkeypatch.setitem(processes_of(ranks).fork_server.silent, 2, 12.0)
    with pytest.raises(SetupFailed, match=r"Host near-b was last seen 12 s ago.*No rank was"):
        ranks.restart((2,))
    assert rank_pids(ranks) == before
    assert cluster_of(ranks).stopped(before) == [], "that it cannot be asked is no fact"
    assert not cluster_of(ranks).process(before[2]).state
    with pytest.raises(UsageMistake, match="does not answer"):
        processes_of(ranks).places.file_on(2, Path(__file__))
