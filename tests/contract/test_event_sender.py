"""The rank's voice: without gaps, and out of the way when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from ddp_notebook.cluster.channels import EventReceiver
from ddp_notebook.model import CellStarted, Event, EventsLost, Pulse
from ddp_notebook.rank.events import EventSender


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def receiver(tmp_path: Path, heard: list[Event]) -> Iterator[EventReceiver]:
    made = EventReceiver(tmp_path, heard.extend)
    yield made
    made.close()


@pytest.fixture
def sender(receiver: EventReceiver) -> Iterator[EventSender]:
    made = EventSender(3, receiver.url, receiver.source)
    yield made
    made.close()


def test_events_arrive_in_order_with_their_rank(sender: EventSender, heard: list[Event]) -> None:
    for cell in range(1, 101):
        sender.emit(CellStarted, cell=cell)
    assert sender.flush()
    eventually(lambda: len([e for e in heard if isinstance(e, CellStarted)]) == 100, 5)
    cells = [event.cell for event in heard if isinstance(event, CellStarted)]
    assert cells == list(range(1, 101))
    assert {event.rank for event in heard} == {3}
    assert not [event for event in heard if isinstance(event, EventsLost)]


def test_a_rank_with_nothing_to_say_gives_signs_of_life(
    sender: EventSender, heard: list[Event]
) -> None:
    eventually(lambda: len([e for e in heard if isinstance(e, Pulse)]) >= 2, 5)


def test_a_gap_in_the_counting_is_a_loss_that_is_said(
    sender: EventSender, heard: list[Event], receiver: EventReceiver
) -> None:
    sender.emit(CellStarted, cell=1)
    eventually(lambda: any(isinstance(event, CellStarted) for event in heard), 5)
    with sender._lock:
        sender._seq += 5  # five events that were never sent
    sender.emit(CellStarted, cell=2)
    eventually(lambda: any(isinstance(event, EventsLost) for event in heard), 5)
    assert [event.count for event in heard if isinstance(event, EventsLost)] == [5]


def test_an_observer_that_fails_takes_itself_out_and_the_rank_goes_on(
    sender: EventSender, heard: list[Event]
) -> None:
    def broken() -> float | None:
        raise RuntimeError("a defect of ours")

    sender.collect = broken
    sender.wake()
    eventually(
        lambda: any(isinstance(e, Pulse) and "a defect of ours" in e.doing for e in heard), 5
    )
    sender.emit(CellStarted, cell=9)
    eventually(lambda: any(isinstance(event, CellStarted) for event in heard), 5)


def test_what_comes_from_no_source_of_the_session_is_dropped(
    receiver: EventReceiver, heard: list[Event]
) -> None:
    stranger = EventSender(1, receiver.url, "9")
    stranger.emit(CellStarted, cell=1)
    assert stranger.flush()
    stranger.close()
    known = EventSender(2, receiver.url, receiver.source)
    known.emit(CellStarted, cell=1)
    eventually(lambda: heard, 5)
    known.close()
    assert {event.rank for event in heard} == {2}


def test_values_that_are_not_json_do_not_stop_the_voice(
    sender: EventSender, heard: list[Event]
) -> None:
    from ddp_notebook.model import Output, OutputKind

    strange: Any = {"application/x": object()}
    sender.emit(Output, cell=1, what=OutputKind.DISPLAY, data=strange)
    eventually(lambda: any(isinstance(event, Output) for event in heard), 5)
    assert json.dumps([event.data for event in heard if isinstance(event, Output)])


def test_one_event_that_cannot_be_taken_in_does_not_end_the_listening(tmp_path: Path) -> None:
    """The package was upgraded under a running kernel, or a listener of the record failed."""
    heard: list[Event] = []

    def take(events: Sequence[Event]) -> None:
        if any(isinstance(event, CellStarted) and event.cell == 13 for event in events):
            raise KeyError(13)
        heard.extend(events)

    receiver = EventReceiver(tmp_path, take)
    sender = EventSender(0, receiver.url, receiver.source)
    try:
        sender.emit(CellStarted, cell=13)
        assert sender.flush()
        eventually(lambda: any(isinstance(event, EventsLost) for event in heard), 5)
        sender.emit(CellStarted, cell=14)
        eventually(lambda: any(isinstance(event, CellStarted) for event in heard), 5)
    finally:
        sender.close()
        receiver.close()
