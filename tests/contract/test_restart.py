"""Ranks that die are named, and come back in place while the others keep what they have."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from results import last_values, rank_pids
from support import GONE_WITHIN_S, eventually, pids_of

from ddp_notebook.cluster import cluster as cluster_module
from ddp_notebook.cluster.ipyparallel_private import unregister
from ddp_notebook.errors import SessionLost, SetupFailed, Stuck, UsageMistake
from ddp_notebook.launch.process_groups import is_running
from ddp_notebook.model import Status
from ddp_notebook.rank import calls
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.session_processes import StoreProcess
from ddp_notebook.testing import cluster_of, processes_of

ALL_REDUCE = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


KINDS = ("guard", "splits", "mp")
"""Of files that each process of a rank has for itself, with its pid in their names."""


@pytest.fixture
def session(session: Session) -> Session:
    """Three ranks that a test may end."""
    session.init(InitOptions(world_size=3, device="cpu"))
    return session


def kill(session: Session, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(session.record.snapshot.ranks[rank].pid, how)
    dead = session.record.wait_for(
        lambda: session.record.snapshot.ranks[rank].status is Status.DEAD, GONE_WITHIN_S
    )
    assert dead, "the death of a rank is known by itself, without a heartbeat"


def test_a_killed_rank_is_known_with_its_signal_and_the_others_keep_their_variables(
    session: Session, tmp_path: Path
) -> None:
    session.run_cell("mine = rank * 10").raise_for_error()
    kill(session, 1)
    assert session.status().rows[1].text == "killed by SIGKILL"
    why = session.why()
    assert why.run is None, "it died when the cell was over, and was not found in that"
    assert [finding.ranks for finding in why.findings] == [(1,)]
    assert last_values(session, "mine", ranks=(0, 2)) == {(0,): "0", (2,): "20"}
    # Asked politely, it ends at once and as it was asked, after what is to run at its exit.
    leaves = (
        f"import atexit; atexit.register(lambda: open({str(tmp_path / 'left')!r}, 'w').close())"
    )
    session.run_cell(leaves, ranks=(2,)).raise_for_error()
    kill(session, 2, signal.SIGTERM)
    assert session.status().rows[2].text == "killed by SIGTERM"
    assert (tmp_path / "left").exists()


def test_a_cell_on_a_dead_rank_is_refused_with_what_to_type(session: Session) -> None:
    kill(session, 1)
    with pytest.raises(UsageMistake) as caught:
        session.run_cell("x = 1")
    assert str(caught.value) == (
        "Rank 1 is dead. Bring it back: %ddp_restart --ranks 1, or leave it out: %%ddp --ranks 0,2"
    )


def test_a_restarted_rank_takes_its_place_and_the_group_works(session: Session) -> None:
    session.run_cell("mine = rank * 10").raise_for_error()
    pids = rank_pids(session)
    kill(session, 1)
    board = session.restart((1,))
    assert board.snapshot.ready
    now = [state.pid for state in board.snapshot.ranks]
    assert (now[0], now[2]) == (pids[0], pids[2])
    assert now[1] != pids[1]
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}
    assert last_values(session, "globals().get('mine')", ranks=(0, 2)) == {(0,): "0", (2,): "20"}
    assert last_values(session, "'mine' in globals()", ranks=(1,)) == {(1,): "False"}
    assert last_values(session, "rank, world_size", ranks=(1,)) == {(1,): "(1, 3)"}


def test_a_rank_that_waits_for_one_that_waited_for_the_dead_one_keeps_its_variables(
    session: Session,
) -> None:
    session.run_cell("mine = rank * 10").raise_for_error()
    pids = rank_pids(session)
    result = session.run_cell(
        "import os, signal\n"
        "if rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.recv(torch.ones(1), {0: 2, 2: 1}[rank])"
    )
    assert isinstance(result.error, Stuck), result.error
    assert session.record.snapshot.ranks[0].status is Status.RUNNING
    now = [state.pid for state in session.restart((1,)).snapshot.ranks]
    assert (now[0], now[2]) == (pids[0], pids[2])
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}
    assert last_values(session, "mine", ranks=(0, 2)) == {(0,): "0", (2,): "20"}


def test_all_ranks_can_be_restarted_again_and_again(session: Session) -> None:
    for _ in range(3):
        session.restart()
        assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_restart_waits_until_the_hub_has_forgotten_the_old_engine(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new engine that comes before that would get an id that is no rank's."""
    asked: list[threading.Timer] = []

    def ask_late(client: Any, rank: int) -> None:
        asked.append(threading.Timer(0.5, unregister, (client, rank)))
        asked[-1].start()

    monkeypatch.setattr(cluster_module, "unregister", ask_late)
    assert session.restart((1,)).snapshot.ready
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}
    assert len(asked) == 1


def test_a_rank_that_died_half_registered_leaves_its_place_to_the_next(session: Session) -> None:
    """The hub keeps the id of such an engine for half a minute, and no client knows of it."""
    kill(session, 1)
    client = cluster_of(session)._client
    eventually(lambda: 1 not in client.ids)
    content = {"id": 1, "uuid": "of one that is dead"}
    client._send(client._query_stream, "registration_request", content=content)
    assert session.restart((1,)).snapshot.ready
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_restart_waits_for_the_new_engine_when_word_of_the_old_ones_end_is_late(
    session: Session,
) -> None:
    client = cluster_of(session)._client
    told = client._notification_handlers["unregistration_notification"]
    late = threading.Event()

    def tell_late(message: Any) -> None:
        late.wait(0.3)  # longer than it takes to launch a process
        told(message)

    client._notification_handlers["unregistration_notification"] = tell_late
    assert session.restart((1,)).snapshot.ready
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_restart_during_which_the_machine_slept_goes_on(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then time is up before the word of the old process's end is read."""
    slept: list[float] = []
    ended = cluster_of(session)._ends[1]
    in_time = ended.wait

    def late(timeout_s: float) -> bool:
        slept.append(timeout_s)
        return len(slept) > 1 and in_time(timeout_s)

    monkeypatch.setattr(ended, "wait", late)
    assert session.restart((1,)).snapshot.ready
    assert len(slept) == 2
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_late_word_of_an_old_process_does_not_end_the_engine_in_its_place(
    session: Session,
) -> None:
    cluster = cluster_of(session)
    exited = cluster._fork_server._exit_handlers[session.record.snapshot.ranks[1].pid]
    assert session.restart((1,)).snapshot.ready
    exited(-9)
    client = cluster._client
    client._send(client._query_stream, "connection_request").result(10)  # the hub has come by it
    assert 1 in client.ids
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_rank_killed_in_a_cell_ends_the_cell_with_its_last_words(session: Session) -> None:
    source = (
        "import os, signal\n"
        "print('about to go', rank)\n"
        "if rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)"
    )
    result = session.run_cell(source)
    assert result.error is not None
    text = str(result.error)
    assert "rank 1 died, killed by SIGSEGV" in text
    assert "%ddp_restart --ranks 1" in text
    assert "ranks 0,2 finished" in text


def test_an_abort_of_c_code_leaves_its_message_as_last_words(session: Session) -> None:
    source = "import os\nif rank == 2:\n    os.write(2, b'terminate called: bad\\n'); os.abort()"
    result = session.run_cell(source)
    assert "rank 2 died, killed by SIGABRT (its log ends: terminate called: bad)" in str(
        result.error
    )


def test_what_an_earlier_cell_wrote_are_not_the_last_words(session: Session) -> None:
    session.run_cell(
        "import os, signal\nn = os.write(2, b'of an earlier cell\\n')"
    ).raise_for_error()
    result = session.run_cell("if rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)")
    assert "rank 2 died, killed by SIGKILL;" in str(result.error)
    state = session.record.snapshot.ranks[2]
    assert state.peak_bytes > 1 << 20
    assert state.oom_kills in (0, -1), "nobody lacked memory"


def test_ranks_that_wait_for_a_killed_one_are_freed_by_its_restart(session: Session) -> None:
    run_ended = threading.Event()

    def run() -> None:
        session.run_cell("x = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(x)")
        run_ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    eventually(
        lambda: "all_reduce" in session.record.snapshot.ranks[0].doing, 10, "rank 0 in all_reduce"
    )
    kill(session, 1)
    assert run_ended.wait(10)
    thread.join()
    session.restart((1,))
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_a_rank_that_died_before_a_script_has_met_comes_back_as_the_finding_says(
    session: Session, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "import torch.distributed as dist\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.init_process_group('gloo')\n"
    )
    result = session.run_script(str(script))
    assert result.diagnosis is not None
    assert result.diagnosis.findings[0].commands == ("%ddp_abort",)
    session.abort()
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


def test_processes_that_ended_leave_no_files_in_the_folder_of_a_session_that_goes_on(
    session: Session,
) -> None:
    folder = processes_of(session).folder
    gone = pids_of(session).ranks[1:]
    os.kill(gone[0], signal.SIGKILL)
    session.restart((1, 2))
    # A file of an all_to_all is there from the first one on.
    session.run_cell("got = torch.ones(3)\ndist.all_to_all_single(got, got.clone())")
    there = [path.name.split("-") for path in folder.rglob("*-*")]
    of = {kind: {int(pid) for name, pid, *_ in there if name == kind} for kind in KINDS}
    living = set(pids_of(session).ranks)
    assert all(pids == living for pids in of.values()), of
    session.restart()
    assert not list(folder.rglob("splits-*"))


def test_a_store_process_that_was_killed_is_replaced_at_the_next_restart(session: Session) -> None:
    os.kill(pids_of(session).store, signal.SIGKILL)
    eventually(lambda: not processes_of(session).store_alive, 5)
    session.restart((0,))
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}


# -- an interrupt while ranks are replaced -------------------------------------------------------


def interrupted(session: Session, call: Callable[[], Any], when: Callable[[Any], bool]) -> str:
    """Interrupt `call` as Ctrl-C does, as soon as `when` is true of the session's ranks.

    Return what it raises in words. Its board, and the state, call no rank ready whose process is
    gone.
    """
    over, states = threading.Event(), lambda: session.record.snapshot.ranks

    def press() -> None:
        eventually(lambda: over.is_set() or when(states()), 15, poll_s=0.0005)
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(10)

    thread = threading.Thread(target=press, name="ctrl-c", daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(SetupFailed) as caught:
            call()
        over.set()
        thread.join(30)
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)
    shown = caught.value.board
    assert shown is not None
    for state in (*shown.snapshot.ranks, *states()):
        there = state.status is Status.DEAD or is_running(state.pid)
        assert there, f"rank {state.rank} is called {state.status}, and is gone"
    return str(caught.value)


MOMENTS = {
    "before a process is ended": lambda states: any(s.restarting for s in states),
    "once one has ended": lambda states: any(s.status is Status.DEAD for s in states),
    "while one starts": lambda states: any(s.status is Status.STARTING for s in states),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_restart_says_what_is_left_and_the_next_one_goes_on(
    session: Session, moment: str
) -> None:
    session.run_cell("mine = rank * 10").raise_for_error()
    said = interrupted(session, lambda: session.restart((1,)), MOMENTS[moment])
    assert "was interrupted" in said
    dead = session.record.snapshot.with_status(Status.DEAD)
    assert ("%ddp_restart --ranks 1" in said) == (dead == (1,)), said
    assert session.restart(dead or (1,)).snapshot.ready
    assert last_values(session, ALL_REDUCE) == {(0, 1, 2): "3.0"}
    assert last_values(session, "mine", ranks=(0, 2)) == {(0,): "0", (2,): "20"}


@pytest.mark.parametrize(
    ("world_size", "moment"),
    [(2, "before a process is ended"), (2, "once one has ended"), (4, "while one starts")],
)
def test_an_interrupted_replacement_ends_in_words_and_can_be_started_again(
    session: Session, world_size: int, moment: str
) -> None:
    """With fewer ranks some end, with more some start."""
    session.run_cell("mine = rank * 10").raise_for_error()
    options = InitOptions(world_size=world_size, device="cpu")
    said = interrupted(session, lambda: session.init(options, replace=True), MOMENTS[moment])
    assert "was interrupted" in said
    assert session.init(options, replace=True).snapshot.ready
    everyone = tuple(range(world_size))
    assert last_values(session, ALL_REDUCE) == {everyone: f"{world_size}.0"}
    assert last_values(session, "mine", ranks=(0,)) == {(0,): "0"}


def test_who_still_asks_when_the_session_ends_gets_no_answers(session: Session) -> None:
    cluster = cluster_of(session)
    assert cluster.ask((0,), calls.REPORT, calls.Nothing(), 5.0)
    session.shutdown()
    assert cluster.ask((0, 1), calls.REPORT, calls.Nothing(), 5.0) == {}


def _move(folder: Path, at: Path) -> None:
    folder.rename(at)
    folder.mkdir(0o700)


def _lead_elsewhere(folder: Path, at: Path) -> None:
    shutil.rmtree(folder)
    at.mkdir()
    (at / "kept").touch()
    folder.symlink_to(at)


def _clean(folder: Path, _: Path) -> None:
    """As programs do that remove old files: those in use, too."""
    for path in folder.rglob("*"):
        if not path.is_dir():
            path.unlink()


def _clean_one(folder: Path, _: Path) -> None:
    (folder / "security" / "ipcontroller-ddp-engine.json").unlink()


TAKE = [lambda folder, _: shutil.rmtree(folder), _move, _lead_elsewhere, _clean, _clean_one]


@pytest.mark.parametrize("take", TAKE)
def test_a_restart_whose_folder_was_removed_says_so_at_once_and_init_starts_again(
    session: Session, take: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    session.run_cell("mine = rank").raise_for_error()
    folder = processes_of(session).folder
    take(folder, tmp_path / "elsewhere")
    with pytest.raises(SetupFailed, match=r"gone.*--replace"):
        session.restart((1,))
    assert last_values(session, "mine") == {(0,): "0", (1,): "1", (2,): "2"}, "nobody was ended"
    session.init(InitOptions(world_size=2, device="cpu"), replace=True)
    assert last_values(session, ALL_REDUCE) == {(0, 1): "2.0"}
    if folder.is_symlink():
        folder.unlink()
        assert (tmp_path / "elsewhere" / "kept").exists()
    elif folder.exists():  # not the session's: the session leaves it alone
        folder.rmdir()


def test_a_rank_whose_socket_was_removed_is_not_called_well_and_a_new_process_answers(
    session: Session,
) -> None:
    session.run_cell("x = torch.ones(1)\ndist.all_reduce(x)").raise_for_error()
    (processes_of(session).folder / "ask-1").unlink()
    session.run_cell("dist.all_reduce(x)").raise_for_error()
    why = session.why()
    assert not why.findings and not why.proven
    (note,) = why.notes
    assert note.startswith("Rank 1 cannot be asked: another program removed ask-1 from ")
    assert note.endswith("%ddp_restart --ranks 1")
    session.restart((1,))
    assert session.why().headline == "No problem found." and session.why().proven


def test_a_folder_that_the_end_of_the_session_removed_is_nobody_elses_deed(
    session: Session,
) -> None:
    processes, server = processes_of(session), pids_of(session).fork_server
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not processes.folder.exists())
    with pytest.raises(SessionLost, match="The fork server that started the ranks ended"):
        processes.stop((1,))
    assert not processes.folder_gone


def test_a_restart_ends_at_once_when_the_fork_server_dies_under_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left then to tell of the end of the rank for which it waits."""
    server = processes_of(session).fork_server
    # The test's own limit is shorter.
    monkeypatch.setattr(cluster_module, "_ENDS_WITHIN_S", 600.0)
    monkeypatch.setattr(server, "signal", lambda pid, number: os.kill(server.pid, signal.SIGKILL))
    with pytest.raises(SessionLost, match="Start again: %ddp_init"):
        session.restart()


def test_a_script_whose_store_dies_with_the_fork_server_ends_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = processes_of(session).fork_server
    spawn = server.spawn

    def spawn_and_die(*args: Any, **named: Any) -> int:
        pid = spawn(*args, **named)
        os.kill(server.pid, signal.SIGKILL)
        return pid

    monkeypatch.setattr(server, "spawn", spawn_and_die)
    monkeypatch.setattr(StoreProcess, "_own_answer", lambda self: None)
    script = tmp_path / "empty.py"
    script.touch()
    with pytest.raises(SessionLost, match="Start again: %ddp_init"):
        session.run_script(str(script))


def test_without_a_current_folder_no_rank_is_ended_and_the_next_folder_serves(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run_cell("mine = rank").raise_for_error()
    gone = tmp_path / "gone"
    gone.mkdir()
    with monkeypatch.context() as there:
        there.chdir(gone)
        gone.rmdir()
        with pytest.raises(
            SetupFailed, match=r"current folder was removed.*No rank was ended.*%cd"
        ):
            session.restart((1,))
        assert last_values(session, "mine") == {(0,): "0", (1,): "1", (2,): "2"}
        with pytest.raises(SetupFailed, match=r"current folder was removed.*%cd"):
            Session().init(InitOptions(world_size=1, device="cpu"))
        os.chdir(tmp_path)
    assert session.restart((1,)).snapshot.ready
