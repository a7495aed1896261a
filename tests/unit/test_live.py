"""A region of a cell's output that is drawn when something changes."""

from __future__ import annotations

import threading
from typing import Any

from support import eventually

from ddp_notebook.views.live_region import LiveRegion


class Publisher:
    """Stands in for IPython's; keeps what was published."""

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []
        self.arrived = threading.Event()

    def publish(self, **message: Any) -> None:
        self.published.append(message)
        self.arrived.set()

    @property
    def texts(self) -> list[str]:
        return [message["data"]["text/plain"] for message in self.published]


def test_the_first_drawing_makes_the_region_and_the_others_update_it() -> None:
    publisher, value = Publisher(), ["a"]
    region = LiveRegion(publisher, lambda: {"text/plain": value[0]}, 0.001)
    region.draw()
    value[0] = "b"
    region.draw()
    assert publisher.texts == ["a", "b"]
    assert [message["update"] for message in publisher.published] == [False, True]
    assert len({message["transient"]["display_id"] for message in publisher.published}) == 1


def test_nothing_is_sent_when_nothing_changed() -> None:
    publisher = Publisher()
    region = LiveRegion(publisher, lambda: {"text/plain": "same"}, 0.001)
    for _ in range(5):
        region.draw()
    assert publisher.texts == ["same"]


def test_a_nudge_draws_from_another_thread_and_closing_shows_the_end() -> None:
    publisher, value = Publisher(), ["a"]
    region = LiveRegion(publisher, lambda: {"text/plain": value[0]}, 0.001)
    region.open()
    eventually(lambda: publisher.texts == ["a"], 5)
    value[0] = "b"
    region.nudge()
    eventually(lambda: publisher.texts[-1] == "b", 5)
    region.close({"text/plain": "end"})
    region.nudge()
    assert publisher.texts == ["a", "b", "end"]


def test_a_cell_that_is_over_before_the_delay_shows_no_region() -> None:
    publisher = Publisher()
    region = LiveRegion(publisher, lambda: {"text/plain": "x"}, 0.001)
    region.open(delay_s=60)
    region.close({"text/plain": "end"})
    assert publisher.texts == []


def test_drawings_keep_their_distance_however_often_something_changes() -> None:
    publisher, count = Publisher(), [0]
    drawn = threading.Event()

    def render() -> dict[str, str]:
        count[0] += 1
        drawn.set()
        return {"text/plain": str(count[0])}

    region = LiveRegion(publisher, render, 0.2)
    region.open()
    timer = threading.Event()
    threading.Timer(0.5, timer.set).start()
    while not timer.is_set():
        region.nudge()
        timer.wait(0.001)
    region.close()
    assert count[0] <= 5


def test_a_region_gives_up_its_place_and_goes_on_below() -> None:
    publisher, places = Publisher(), []

    def render() -> dict[str, str]:
        if len(publisher.published) == 1:
            places.append(region.give_up_place({"text/plain": "a line"}))
        return {"text/plain": f"output {len(publisher.published)}"}

    region = LiveRegion(publisher, render, 0.001)
    region.draw()
    region.draw()
    places[0]({"text/plain": "the end"})
    region.close({"text/plain": "all"})
    assert publisher.texts == ["output 0", "a line", "output 2", "the end", "all"]
    shown_in = [message["transient"]["display_id"] for message in publisher.published]
    assert shown_in[0] == shown_in[1] == shown_in[3] != shown_in[2] == shown_in[4]
    assert [message["update"] for message in publisher.published] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_the_drawing_after_it_is_over_is_the_last() -> None:
    publisher, over = Publisher(), [False]
    region = LiveRegion(
        publisher,
        lambda: {"text/plain": "end" if region.closed else "goes on"},
        0.001,
        over=lambda: over[0],
    )
    region.draw()
    over[0] = True
    region.draw()
    over[0] = False
    region.draw()
    assert region.closed and publisher.texts == ["goes on", "end"]
