"""What a record keeps of its events: enough to see the state come to be, and never too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ddp_notebook.archive import history
from ddp_notebook.archive.history import Kept
from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Event,
    Output,
    OutputKind,
    Pulse,
    RankExited,
    RankSpawned,
    Snapshot,
    Stage,
    StageFailed,
    StageFinished,
    StageStarted,
)
from ddp_notebook.model.fold import state_at
from ddp_notebook.session.record import Record

MS = 1_000_000


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_EVENTS", 12)
    monkeypatch.setattr(history, "_CHAPTER", 4)


def pulse(at_ms: int, doing: str = "", rank: int = 0) -> Pulse:
    return Pulse(rank=rank, doing=doing, heard_ns=at_ms * MS)


def record_of(world_size: int, *batches: list[Event]) -> Record:
    record = Record()
    record.begin(world_size)
    for batch in batches:
        record.add(batch)
    return record


def at_the_end(state: Snapshot, kept: Kept) -> Snapshot:
    # The clock of a machine that has just been started is behind the tests' moments.
    at_ns = max([state.taken_ns, *(max(m.at_ns, m.until_ns) for m in kept.moments)])
    return replace(state_at(kept.start, kept.moments, at_ns), taken_ns=state.taken_ns)


EVENTS: list[Event] = [
    RankSpawned(rank=0, pid=1, device="cpu"),
    StageStarted(rank=0, stage=Stage.STORE),
    StageFinished(rank=0, stage=Stage.VERIFIED),
    StageFailed(rank=0, stage=Stage.STORE, cause="no", remedy="yes"),
    CellStarted(rank=0, cell=1),
    CellFinished(rank=0, cell=1, outcome="ok"),
    Pulse(rank=0, doing="here"),
    Pulse(rank=0, doing="there"),
    RankExited(rank=0, pid=1, exit_code=1),
]
batches = st.lists(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1)), max_size=4)
    | st.sampled_from(["set up", "lose group", "note"]),
    max_size=30,
)


@given(batches)
def test_what_is_kept_adds_up_to_the_state(told: list[list[tuple[Event, int]] | str]) -> None:
    record = record_of(2)
    for number, batch in enumerate(told):
        if batch == "set up":
            record.begin_setup()
        elif batch == "lose group":
            record.lose_group()
        elif batch == "note":
            record.note(notes=(f"note {number}",))
        else:
            record.add([structs.replace(e, rank=rank, heard_ns=number + 1) for e, rank in batch])
    state, kept = record.kept()
    assert at_the_end(state, kept) == state
    # A chapter ends with the batch that fills it.
    assert len(kept.moments) < 12 + 7 + 7


def test_a_long_session_keeps_its_newest_events_and_counts_the_others() -> None:
    cells: list[list[Event]] = [
        [
            CellStarted(rank=0, cell=n, heard_ns=n),
            CellFinished(rank=0, cell=n, outcome="ok", heard_ns=n),
        ]
        for n in range(1, 1001)
    ]
    state, kept = record_of(1, *cells).kept()
    assert kept.dropped_events + len(kept.moments) == 2000
    assert len(kept.moments) < 20
    assert kept.moments[-2].event == CellStarted(rank=0, cell=1000, heard_ns=1000)
    assert kept.start.ranks[0].cell > 900
    assert at_the_end(state, kept) == state


def test_a_night_of_the_same_is_one_moment() -> None:
    """A rank gives four signs of life a second."""
    state, kept = record_of(1, *([pulse(ms)] for ms in range(250, 3_600_000, 250))).kept()
    assert [(m.at_ns, m.until_ns) for m in kept.moments] == [(250 * MS, 3_599_750 * MS)]
    assert state_at(kept.start, kept.moments, 60_000 * MS).ranks[0].heard_ns == 60_000 * MS
    assert kept.dropped_events == 0
    assert at_the_end(state, kept).ranks == state.ranks


def test_a_silence_is_kept() -> None:
    _, kept = record_of(1, [pulse(250)], [pulse(500)], [pulse(9000)]).kept()
    assert [(m.at_ns, m.until_ns) for m in kept.moments] == [
        (250 * MS, 500 * MS),
        (9000 * MS, 0),
    ]
    assert state_at(kept.start, kept.moments, 8000 * MS).ranks[0].heard_ns == 500 * MS


def test_another_thing_that_is_done_is_another_moment() -> None:
    _, kept = record_of(2, [pulse(1, "a")], [pulse(2, "b", 1)], [pulse(3, "a")], [pulse(4)]).kept()
    assert [(m.at_ns // MS, m.until_ns // MS) for m in kept.moments] == [(1, 3), (2, 0), (4, 0)]


def test_output_is_cut_and_pushes_out_no_other_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_OUTPUTS", 10)
    figure = {"text/plain": "<figure>", "image/png": "x" * 100_000}
    out = [
        Output(rank=0, cell=1, what=OutputKind.STDOUT, text="x" * 5000, data=figure, heard_ns=n)
        for n in range(1, 101)
    ]
    _, kept = record_of(1, [RankSpawned(rank=0, pid=1, device="cpu")], list(out)).kept()
    assert len(kept.moments) == 1
    assert kept.dropped_outputs == 90
    assert [len(output.text) for output in kept.outputs] == [1000] * 10
    assert kept.outputs[0].data == {"text/plain": "<figure>"}


def test_a_new_session_begins_anew() -> None:
    record = record_of(1, [RankSpawned(rank=0, pid=1, device="cpu")])
    record.begin(3)
    state, kept = record.kept()
    assert kept.moments == ()
    assert kept.start.ranks == state.ranks
