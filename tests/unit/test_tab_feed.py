"""When the tabs of a board ask the ranks: only for what a page has open, and only what is new."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.board import tab_contents
from ddp_notebook.board.tab_contents import TabFeed
from ddp_notebook.errors import NoSession
from ddp_notebook.model import StackTree, VariableTable


class Asked:
    """A session whose ranks answer at once; how often each was asked."""

    def __init__(self) -> None:
        self.findings = SimpleNamespace(begun=0)
        self.benchmarks = SimpleNamespace(current=None)
        self.runs = SimpleNamespace(current=None, stops={}, past=SimpleNamespace(runs=()))
        self.breakpoints = SimpleNamespace(rows=lambda: self.asked.append("breakpoints"))
        self.asked: list[str] = []
        self.lost = False

    def where(self) -> StackTree:
        self.asked.append("stack")
        if self.lost:
            raise NoSession("%ddp_where")
        return StackTree((), 2)

    def variables(self) -> VariableTable:
        self.asked.append("variables")
        return VariableTable((), (), 2)


@pytest.fixture
def told() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(tab_contents, "_SETTLED_S", -1.0)
    monkeypatch.setattr(tab_contents, "_WRITTEN_S", -1.0)
    return Asked()


def watch(feed: TabFeed, tab: str, view: str = "a") -> None:
    feed.message({"kind": "watch", "tab": tab}, view)


def test_no_rank_is_asked_for_a_tab_that_no_page_has_open(
    session: Asked, told: queue.Queue[Any]
) -> None:
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    feed.turn("key")
    watch(feed, "history")
    feed.turn("key")
    assert told.get(timeout=60) == {"history": []}
    watch(feed, "nonsense")
    feed.turn("other key")
    assert session.asked == [] and told.empty()


def test_ranks_are_asked_once_for_each_change_and_again_when_the_page_asks(
    session: Asked, told: queue.Queue[Any]
) -> None:
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    watch(feed, "variables")
    feed.turn("one")
    told.get(timeout=60)
    feed.turn("one")
    feed.turn("two")
    told.get(timeout=60)
    watch(feed, "variables")
    feed.turn("two")
    assert told.get(timeout=60)["variables"]["world_size"] == 2
    assert session.asked == ["variables"] * 3


def test_beside_the_lines_at_which_ranks_are_paused_stand_their_stacks_and_variables(
    session: Asked, told: queue.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tab_contents, "_SETTLED_S", 600.0)
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    watch(feed, "code")
    feed.turn("one")
    assert told.get(timeout=60).keys() == {"stack"}
    run = SimpleNamespace(stops={0: 1, 1: 1}, pending=(0, 1), sources={}, title="cell 3")
    session.runs.current, session.runs.stops = run, run.stops
    feed.turn("two")
    assert {*told.get(timeout=60), *told.get(timeout=60)} == {"stack", "variables"}
    run.stops = session.runs.stops = {0: 1}
    feed.turn("three")
    asked = sorted(session.asked)
    assert asked == ["breakpoints", "stack", "stack", "variables"], "rank 1 moves"


def test_while_a_benchmark_runs_no_change_asks_the_ranks(
    session: Asked, told: queue.Queue[Any]
) -> None:
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    watch(feed, "code")
    feed.turn("one")
    told.get(timeout=60)
    session.benchmarks.current = SimpleNamespace()
    feed.turn("two")
    assert session.asked == ["stack"]


def test_why_ranks_cannot_be_asked_is_shown(session: Asked, told: queue.Queue[Any]) -> None:
    session.lost = True
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    watch(feed, "code")
    feed.turn("one")
    assert told.get(timeout=60)["stack"]["error"].startswith("%ddp_where needs ranks")


def test_what_ranks_wrote_is_told_when_it_changes(session: Asked, told: queue.Queue[Any]) -> None:
    events = SimpleNamespace(changes=1, withheld={}, live_groups=lambda: ())
    session.runs.current = SimpleNamespace(cell=1, title="cell 3", events=events)
    feed = TabFeed(session, told.put)  # type: ignore[arg-type]
    watch(feed, "output")
    for changes in (1, 1, 2):
        events.changes = changes
        feed.turn("key")
    assert [told.get(timeout=60)["console"]["title"] for _ in range(2)] == ["cell 3"] * 2
    assert told.empty()
