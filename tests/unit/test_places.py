"""A script's processes in the ranks' places: who is heard meanwhile, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import eventually

from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.launch.placement import place
from ddp_notebook.model import (
    CellStarted,
    Event,
    Output,
    OutputKind,
    Pulse,
    RankExited,
    RankSpawned,
    Stage,
    StageFinished,
    Status,
)
from ddp_notebook.rank.calls import Breakpoints, Script
from ddp_notebook.rank.cells.output import whole_characters
from ddp_notebook.rank.events import EventSender
from ddp_notebook.session.record import Record
from ddp_notebook.session.script_processes import ScriptProcesses


@pytest.fixture
def record() -> Record:
    record = Record()
    record.begin(2)
    for rank in range(2):
        record.hear(
            (
                RankSpawned(rank=rank, pid=10 + rank, device="cpu", heard_ns=1),
                StageFinished(rank=rank, stage=Stage.VERIFIED, heard_ns=2),
            )
        )
    return record


def script_on(
    record: Record, elsewhere: Any, folder: Path, ranks: tuple[int, ...]
) -> ScriptProcesses:
    """Make the processes of a script; `elsewhere` is all that they act on besides the record."""
    others = (record, elsewhere, elsewhere, elsewhere, folder / "script", folder, ranks)
    return ScriptProcesses(elsewhere, place(4, ()), *others)


def test_a_scripts_processes_have_the_ranks_places_until_they_are_taken_back(
    record: Record,
) -> None:
    record.lend((1,))
    record.lent_to(1, 77)
    record.add((CellStarted(rank=1, cell=3, heard_ns=3),))
    record.hear((Pulse(rank=1, doing="idle in the engine", heard_ns=4),))
    mine, lent = record.snapshot.ranks
    assert (mine.pid, mine.status) == (10, Status.READY)
    assert (lent.pid, lent.status, lent.doing) == (77, Status.RUNNING, "")
    record.add((RankExited(rank=1, pid=77, exit_code=-9, heard_ns=5),))
    assert record.snapshot.ranks[1].status is Status.DEAD
    record.take_back()
    assert (record.snapshot.ranks[1].pid, record.snapshot.ranks[1].status) == (11, Status.READY)


def test_what_becomes_of_the_sessions_own_process_meanwhile_is_known_afterwards(
    record: Record,
) -> None:
    record.lend((0, 1))
    record.hear((RankExited(rank=0, pid=10, exit_code=-11, heard_ns=3),))
    assert record.snapshot.ranks[0].status is Status.READY
    record.take_back()
    assert [each.status for each in record.snapshot.ranks] == [Status.DEAD, Status.READY]


def test_what_a_scripts_process_has_said_is_not_of_the_ranks_once_they_are_back(
    record: Record, tmp_path: Path
) -> None:
    """A message that was read before the script was ended may be handed over after it."""
    told: list[Event] = []
    record.subscribe(told.extend)
    elsewhere = Mock()  # the cluster, the logs and the receiver: what is told is tested here
    script = script_on(record, elsewhere, tmp_path, (0, 1))
    (hand_over,) = elsewhere.add_source.call_args.args
    hand_over((CellStarted(rank=1, cell=3, heard_ns=3),))
    assert record.snapshot.ranks[1].status is Status.RUNNING
    script.end()
    last = Output(rank=1, cell=3, what=OutputKind.STDOUT, text="last words", heard_ns=4)
    late = (CellStarted(rank=1, cell=3, heard_ns=4), last)
    hand_over(late)
    assert record.snapshot.ready
    assert tuple(told[-2:]) == late, "the script's run hears of them"


def test_a_script_is_ended_only_once_the_end_of_each_process_was_reported(
    record: Record, tmp_path: Path
) -> None:
    """The next run would take a later report for the end of its own rank."""
    elsewhere = Mock()
    elsewhere.question.return_value = None
    order, ended = list[str](), threading.Event()
    elsewhere.peak_bytes = {}
    script = script_on(record, elsewhere, tmp_path, (1,))
    elsewhere.spawn.side_effect = lambda spec, report, begun: begun(77)
    what = Script(4, 1, "train.py", "train.py", (), 1, Breakpoints(()))
    script.start({1: what}, {1: {}}, {}, lambda host: str(tmp_path))
    report = elsewhere.spawn.call_args.args[1]

    def report_slowly(events: Sequence[Event]) -> None:
        if any(isinstance(event, RankExited) for event in events):
            ended.wait(0.2)  # an `end` that does not wait for it comes to its own end meanwhile
            order.append(f"reported, of cell {events[-1].cell}")

    record.subscribe(report_slowly)
    elsewhere.signal.side_effect = lambda *_: threading.Thread(target=report, args=(-9,)).start()
    elsewhere.remove_source.side_effect = lambda _: (order.append("ended"), ended.set())
    script.end()
    assert order == ["reported, of cell 4", "ended"]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[EventReceiver, list[Event]]]:
    heard: list[Event] = []
    receiver = EventReceiver(tmp_path, heard.extend)
    yield receiver, heard
    receiver.close()


def test_two_processes_of_one_rank_count_their_events_apart(
    receiver: tuple[EventReceiver, list[Event]],
) -> None:
    listening, of_session = receiver
    of_script: list[Event] = []

    def take(events: Sequence[Event]) -> None:
        of_script.extend(each for each in events if isinstance(each, CellStarted))

    source = listening.add_source(take)
    own = EventSender(0, listening.url, listening.source)
    other = EventSender(0, listening.url, source)
    stranger = EventSender(0, listening.url, "9")
    for sender, cells in (
        (own, (1, 2)),
        (other, (7,)),
        (own, (3,)),
        (stranger, (9,)),
        (other, (8,)),
    ):
        for cell in cells:
            sender.emit_now(CellStarted, cell=cell)
    eventually(lambda: len(of_script) == 2, 10, "the script's events")
    eventually(lambda: len(_cells(of_session)) == 3, 10, "the session's events")
    assert _cells(of_session) == [1, 2, 3] and _cells(of_script) == [7, 8]
    assert {type(each) for each in of_session} <= {CellStarted, Pulse}, "none counts as lost"
    listening.remove_source(source)
    other.emit_now(CellStarted, cell=10)
    own.emit_now(CellStarted, cell=4)
    eventually(lambda: 4 in _cells(of_session), 10, "an event of the session")
    assert 10 not in _cells(of_script)
    for sender in (own, other, stranger):
        sender.close()


def _cells(events: Sequence[Event]) -> list[int]:
    return [each.cell for each in events if isinstance(each, CellStarted)]


@pytest.mark.parametrize("text", ["a", "ä", "€", "😀", "ab€"])
def test_a_character_is_not_cut_in_two(text: str) -> None:
    data = text.encode()
    for end in range(len(data) + 1):
        whole = whole_characters(data[:end])
        assert whole.decode() == text[: len(whole.decode())]
    assert whole_characters(data) == data


def test_a_death_while_a_script_gives_the_places_back_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record()
    record.begin(1)
    record.hear((RankSpawned(rank=0, pid=7, device="cpu"),))
    record.lend((0,))
    change_all = record._change_all

    def meanwhile(change: Any) -> None:
        record.hear((RankExited(rank=0, pid=7, exit_code=-9),))
        change_all(change)

    monkeypatch.setattr(record, "_change_all", meanwhile)
    record.take_back()
    assert record.snapshot.ranks[0].status is Status.DEAD
