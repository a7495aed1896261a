"""Bringing real ranks up: every stage, every way to meet, and what is said when it fails."""

from __future__ import annotations

import os
import signal
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from results import last_values, rank_pids
from support import eventually, is_alive, pids_of

from ddp_notebook.errors import NoSession, SetupFailed, UsageMistake
from ddp_notebook.model import Event, RankExited, Stage, StageFinished, Status
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import processes_of

ALL_REDUCE = "x = torch.ones(3) * (rank + 1)\ndist.all_reduce(x)\nx.tolist()"


def test_every_rank_passes_every_stage_in_order(session: Session) -> None:
    passed: dict[int, list[Stage]] = {}

    def watch(events: Any) -> None:
        for event in events:
            if isinstance(event, StageFinished):
                passed.setdefault(event.rank, []).append(event.stage)

    session.record.subscribe(watch)
    board = session.init(InitOptions(world_size=3, device="cpu"))
    assert passed == {rank: list(Stage) for rank in range(3)}
    assert board.snapshot.ready
    assert [row.status for row in board.rows] == [Status.READY] * 3
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "[6.0, 6.0, 6.0]"}


def test_ranks_find_the_environment_torchrun_would_give_them(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu", threads_per_rank=1))
    shown = last_values(
        session,
        "import os\n"
        "[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')], torch.get_num_threads(),"
        " int(os.environ['MASTER_PORT']) > 0, os.environ['MASTER_ADDR']",
    )
    assert shown == {
        (0,): "(['0', '0', '2'], 1, True, '127.0.0.1')",
        (1,): "(['1', '1', '2'], 1, True, '127.0.0.1')",
    }


@pytest.mark.parametrize("init_method", ["tcp", "file"])
def test_ranks_meet_by_other_ways_too(session: Session, init_method: str) -> None:
    board = session.init(InitOptions(world_size=2, device="cpu", init_method=init_method))
    assert board.snapshot.init_method.startswith(f"{init_method}://")
    assert last_values(session, ALL_REDUCE) == {(0, 1): "[3.0, 3.0, 3.0]"}


def test_ranks_can_be_ordinary_processes(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu", launcher="process"))
    assert last_values(session, ALL_REDUCE) == {(0, 1): "[3.0, 3.0, 3.0]"}


def test_the_sockets_of_a_session_listen_on_loopback_alone(session: Session) -> None:
    import psutil

    session.init(InitOptions(world_size=2, device="cpu"))
    pids = {state.pid for state in session.record.snapshot.ranks}
    parents = {psutil.Process(pid).ppid() for pid in pids}
    ours = {child.pid for parent in parents for child in psutil.Process(parent).children(True)}
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert all(ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in listening)


def test_a_port_in_use_is_said_with_who_holds_it_and_the_ranks_are_kept(session: Session) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(SetupFailed) as caught:
            session.init(InitOptions(world_size=2, device="cpu", master_port=port))
    text = str(caught.value)
    assert text.startswith(f"Port {port} on 127.0.0.1 is in use by pid ")
    assert "Leave --master-port out" in text
    pids = rank_pids(session)
    session.init(InitOptions(world_size=2, device="cpu"))
    assert session.record.snapshot.ready
    assert rank_pids(session) == pids


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("203.0.113.7", "MASTER_ADDR 203.0.113.7 is not an address of this machine."),
        ("no-such-host.invalid", "MASTER_ADDR 'no-such-host.invalid' does not resolve"),
    ],
)
def test_an_address_that_cannot_be_is_said(session: Session, address: str, cause: str) -> None:
    with pytest.raises(SetupFailed) as caught:
        session.init(InitOptions(world_size=2, device="cpu", master_addr=address))
    assert str(caught.value).startswith(cause)
    assert "Fix: Leave --master-addr out" in str(caught.value)


def test_a_rank_that_dies_in_setup_is_named_with_its_stage(session: Session) -> None:
    def kill_one(events: Any) -> None:
        import os
        import signal

        for event in events:
            if event.rank == 1 and isinstance(event, StageFinished):
                os.kill(event.pid, signal.SIGKILL)

    session.record.subscribe(kill_one)
    with pytest.raises(SetupFailed) as caught:
        session.init(InitOptions(world_size=3, device="cpu"))
    assert "Rank 1 died in stage launched, killed by SIGKILL." in str(caught.value)
    assert caught.value.board is not None
    assert caught.value.board.snapshot.ranks[1].status is Status.DEAD


def test_starting_twice_says_how_to_restart(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    with pytest.raises(UsageMistake, match="2 ranks are running already") as caught:
        session.init(InitOptions(world_size=4, device="cpu"))
    assert "%ddp_restart" in str(caught.value)
    assert last_values(session, ALL_REDUCE) == {(0, 1): "[3.0, 3.0, 3.0]"}
    first, second = pids_of(session).ranks
    os.kill(second, signal.SIGKILL)
    eventually(lambda: session.record.snapshot.with_status(Status.DEAD) == (1,))
    with pytest.raises(UsageMistake, match=r"Rank 1 is dead\. To bring back"):
        session.init(InitOptions(world_size=2, device="cpu"))
    os.kill(first, signal.SIGKILL)
    eventually(lambda: session.record.snapshot.with_status(Status.DEAD) == (0, 1))
    session.init(InitOptions(world_size=2, device="cpu"))  # there is nothing to lose any more
    assert last_values(session, ALL_REDUCE) == {(0, 1): "[3.0, 3.0, 3.0]"}


def test_verbs_before_init_say_what_to_type(session: Session) -> None:
    with pytest.raises(NoSession, match=r"%%ddp needs ranks.*%ddp_init --world-size 4"):
        session.run_cell("x = 1")


@pytest.mark.usefixtures("cold")  # a fork server of its own, and not the one that tests keep
def test_a_shut_down_session_starts_again_from_the_fork_server_that_stayed(
    session: Session,
) -> None:
    servers = []
    for world_size in (1, 2):
        session.init(InitOptions(world_size=world_size, device="cpu"))
        pids = pids_of(session)
        session.shutdown(keep_warm=True)
        assert not session.running
        left = psutil.Process(pids.fork_server).children(recursive=True)
        assert not left and not Path(pids.folder).exists()
        servers.append(pids.fork_server)
    assert servers[0] == servers[1]
    session.shutdown()
    assert not is_alive(servers[0])


def test_ranks_of_another_number_replace_those_that_there_are(session: Session) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    with pytest.raises(UsageMistake, match="--world-size 3 --replace"):
        session.init(InitOptions(world_size=3, device="cpu"))
    with pytest.raises(UsageMistake, match="GPU"):
        session.init(InitOptions(world_size=3, device="cuda", gpus=("97",)), replace=True)
    assert last_values(session, "7 * 6") == {(0, 1): "42"}, "what cannot be had costs no ranks"
    before = pids_of(session).ranks
    session.run_cell("kept = rank + 10").raise_for_error()
    board = session.init(InitOptions(world_size=3, device="cpu"), replace=True)
    assert board.snapshot.notes[-1] == (
        "Ranks 0 and 1 stayed, with their variables; rank 2 is new. Fresh processes for all: "
        "%ddp_restart"
    )
    assert last_values(session, "dist.get_world_size(), 'kept' in vars()") == {
        (0, 1): "(3, True)",
        (2,): "(3, False)",
    }
    assert pids_of(session).ranks[:2] == before
    session.run_cell("if rank == 0: dist.barrier()")
    with pytest.raises(UsageMistake, match=r", and rank 0 still in a cell \(to free: %ddp_abort\)"):
        session.init(InitOptions(world_size=3, device="cpu"))
    assert not [each for each in session.restart().snapshot.notes if "stayed" in each]


def test_ranks_that_stay_when_others_end_keep_their_variables_whatever_runs(
    session: Session,
) -> None:
    session.init(InitOptions(world_size=4, device="cpu"))
    session.run_cell("kept = rank + 10").raise_for_error()
    before = pids_of(session).ranks
    session.run_cell("if rank != 3: dist.barrier()", detach=True)
    board = session.init(InitOptions(world_size=2, device="cpu"), replace=True)
    note = "Ranks 0 and 1 stayed, with their variables; ranks 2 and 3 have ended."
    assert board.snapshot.notes[-1].startswith(note)
    source = (
        "import os\nt = torch.ones(1)\ndist.all_reduce(t)\n"
        "(t.item(), world_size, os.environ['LOCAL_WORLD_SIZE'])"
    )
    assert last_values(session, source) == {(0, 1): "(2.0, 2, '2')"}
    assert pids_of(session).ranks == before[:2]
    eventually(lambda: not any(map(is_alive, before[2:])))
    os.kill(before[1], signal.SIGKILL)
    eventually(lambda: session.record.snapshot.ranks[1].status is Status.DEAD)
    board = session.init(InitOptions(world_size=2, device="cpu"), replace=True)
    assert board.snapshot.notes[-1].startswith("Rank 0 stayed, with its variables; rank 1 is new.")
    other = InitOptions(world_size=2, device="cpu", threads_per_rank=2)
    board = session.init(other, replace=True)
    assert board.snapshot.notes[-1] == (
        "All processes are new, without variables: --threads-per-rank changes what a process is."
    )
    assert last_values(session, "'kept' in vars()") == {(0, 1): "False"}


def test_messages_that_are_not_signed_are_not_believed(session: Session) -> None:
    import zmq

    session.init(InitOptions(world_size=1, device="cpu"))
    heard: list[Event] = []
    session.record.subscribe(lambda events: heard.extend(events))
    forged = b'[{"kind": "rank_exited", "rank": 0, "pid": 1, "exit_code": 1, "seq": 1}]'
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket_:
        socket_.linger = 1000
        socket_.connect(processes_of(session).receiver.url)
        socket_.send_multipart([b"0" * 32, forged])
        session.run_cell("x = 1").raise_for_error()
    assert not [event for event in heard if isinstance(event, RankExited)]
    assert session.record.snapshot.ready
