"""The wire between the notebook and a host's agent, over links that lose, repeat and reorder."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from ddp_notebook.launch.wire import (
    AGAIN_AT_MOST_S,
    AGAIN_S,
    BEAT_S,
    WINDOW,
    WINDOW_BYTES,
    Stream,
    packed,
    unpacked,
)

KEY = b"k" * 32
STEP_S = 0.05


class Link:
    """Two ends and what is between them, in virtual time."""

    def __init__(self, deliver: Callable[[float, random.Random], list[float]]) -> None:
        self.ends = {True: Stream(KEY, 0.0, near=True), False: Stream(KEY, 0.0, near=False)}
        self.taken: dict[bool, list[bytes]] = {True: [], False: []}
        self.now_s = 0.0
        self.packets = 0
        self.largest = 0
        self._deliver = deliver
        """When a packet that is sent now arrives: never, once or several times."""
        self._random = random.Random(7)
        self._order = count()
        self._way: list[tuple[float, int, bool, bytes]] = []

    def run(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s and not done():
            for near, end in self.ends.items():
                due = end.due(self.now_s)
                self.packets += len(due)
                self.largest = max(self.largest, len(due))
                for packet in due:
                    for at_s in self._deliver(self.now_s, self._random):
                        heapq.heappush(self._way, (at_s, next(self._order), not near, packet))
            self.now_s += STEP_S
            while self._way and self._way[0][0] <= self.now_s:
                _, _, near, packet = heapq.heappop(self._way)
                body = self.ends[near].take(packet, self.now_s)
                if body is not None:
                    self.taken[near].append(body)


def healthy(now_s: float, _: random.Random) -> list[float]:
    return [now_s + 0.001]


def bad(now_s: float, chance: random.Random) -> list[float]:
    """Loses a fifth, repeats a tenth, and the ways differ in length, so that packets overtake."""
    if chance.random() < 0.2:
        return []
    return [now_s + chance.random() * 0.4 for _ in range(1 + (chance.random() < 0.1))]


def cut(begin_s: float, end_s: float) -> Callable[[float, random.Random], list[float]]:
    return lambda now_s, _: [] if begin_s <= now_s < end_s else [now_s + 0.001]


def numbered(of: str, number: int) -> list[bytes]:
    return [f"{of} {n}".encode() for n in range(number)]


@pytest.mark.parametrize("way", [healthy, bad])
def test_everything_arrives_once_and_in_order_both_ways(way: Callable) -> None:
    link = Link(way)
    for near in (True, False):
        for body in numbered(str(near), 300):
            link.ends[near].put(body)
    link.run(600, lambda: all(end.empty for end in link.ends.values()))
    assert link.taken == {True: numbered("False", 300), False: numbered("True", 300)}


def test_a_packet_is_taken_from_the_other_end_alone() -> None:
    near, far = Stream(KEY, 0.0, near=True), Stream(KEY, 0.0, near=False)
    stranger = Stream(b"x" * 32, 0.0, near=False)
    for end in (near, far, stranger):
        end.put(b"x")
    (own,), (theirs,), (strange,) = (end.due(1.0) for end in (near, far, stranger))
    for wrong in (own, strange, theirs[:-1], theirs + b"x", b"", b"short", theirs[:40]):
        with pytest.raises(ValueError, match="not signed"):
            near.take(wrong, 5.0)
    assert near.heard_s == 0.0  # nothing of that counts as a sign of life
    assert near.take(theirs, 5.0) == b"x"
    assert near.take(theirs, 6.0) is None  # said twice, taken once


def test_an_end_that_has_nothing_to_say_beats() -> None:
    link = Link(healthy)
    link.run(10)
    assert 2 * 10 / BEAT_S / 2 <= link.packets <= 2 * 10 / STEP_S
    assert all(link.now_s - end.heard_s <= BEAT_S + 2 * STEP_S for end in link.ends.values())


def test_what_is_on_its_way_is_bounded() -> None:
    end = Stream(KEY, 0.0, near=True)
    for _ in range(WINDOW - 1):
        end.put(b"x")
    assert not end.full
    end.put(b"x")
    assert end.full
    end.put(b"x")
    assert len(end.due(0.0)) == WINDOW  # the rest waits for its turn
    large = Stream(KEY, 0.0, near=True)
    for _ in range(3):
        large.put(bytes(WINDOW_BYTES // 2))
    assert large.full
    assert len(large.due(0.0)) == 2


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0])
def test_after_a_cut_all_is_there_within_two_seconds(seconds: float) -> None:
    link = Link(cut(1.0, 1.0 + seconds))
    link.run(2)  # both ends know each other, and the cut has begun
    for near in (True, False):
        for body in numbered(str(near), 200):
            link.ends[near].put(body)
    link.run(seconds - 1.5)
    assert link.taken == {True: [], False: []}
    link.packets = 0
    link.run(2.5, lambda: all(end.empty for end in link.ends.values()))
    assert link.taken == {True: numbered("False", 200), False: numbered("True", 200)}
    assert link.packets < 4 * 2 * 200


def test_while_the_other_end_is_silent_one_packet_knocks() -> None:
    link = Link(cut(1.0, 100.0))
    link.run(2)
    for body in numbered("", WINDOW):
        link.ends[True].put(body)
    link.run(STEP_S)
    assert link.largest == WINDOW  # they are on their way once
    link.run(2 * AGAIN_AT_MOST_S)
    link.packets = link.largest = 0
    link.run(40)
    assert link.largest == 1
    assert link.packets <= 2 * 40 / BEAT_S + 40 / AGAIN_S


def test_a_message_is_json_and_bytes() -> None:
    assert unpacked(packed(["part", "log", 7], b"\0\xff")) == ("part", ["log", 7], b"\0\xff")
    for wrong in (b"", b"\0\0\0\x02{", b"\0\0\0\x021]", b"\0\0\0\x02[]", b"\0\0\0\x04null"):
        with pytest.raises(ValueError):
            unpacked(wrong)
