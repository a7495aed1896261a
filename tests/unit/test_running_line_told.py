"""The kernel's side of the line above a running cell's output: what it tells a page, and when."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from ddp_notebook.board.running_line import RunningLine

STATE = {"text", "age_s", "over", "busy", "answers"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the values in each message to the pages."""
    messages: list[set[str]] = []

    def send_state(_: Any, key: Any = None) -> None:
        messages.append({key} if isinstance(key, str) else set(key or ()))

    monkeypatch.setattr(RunningLine, "send_state", send_state)
    return messages


def test_a_page_that_heard_nothing_for_long_is_told_the_end_that_it_missed(
    told: list[set[str]],
) -> None:
    line = RunningLine(cast(Any, None), {}, "Cell 3 runs", time.monotonic())
    line.end("finished in 3 s")
    told.clear()
    line._handle_custom_msg({"kind": "here"}, [])
    assert told == [STATE]


def test_a_sign_of_life_brings_all_that_a_page_may_have_missed(
    told: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = RunningLine(cast(Any, None), {}, "Cell 3 runs", time.monotonic())
    told.clear()
    line.look("Cell 3 runs")
    assert not told
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 6.0)
    line.look("Cell 3 runs")
    assert set().union(*told) == STATE
