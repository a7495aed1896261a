"""Where there can be no widgets, the board is text and HTML, as ever."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from test_live import Publisher

from ddp_notebook.board import replay_board
from ddp_notebook.board.controller import StillBoard, open_board
from ddp_notebook.session import Session

WITH_COMMS = SimpleNamespace(comm_manager=object())


def shell(kernel: object) -> Any:
    """A shell with this kernel."""
    return SimpleNamespace(kernel=kernel, display_pub=Publisher())


@pytest.mark.parametrize("kernel", [None, SimpleNamespace()])
def test_without_a_kernel_or_comms_there_are_no_widgets(kernel: object) -> None:
    assert not replay_board.can_show_widgets(shell(kernel))


@pytest.mark.parametrize("missing", ["anywidget", "ipywidgets"])
def test_without_their_packages_there_is_the_picture_alone(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replay_board.can_show_widgets(shell(WITH_COMMS))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    here = shell(WITH_COMMS)
    board = open_board(Session(), here, {})
    assert isinstance(board, StillBoard)
    board.open(0.0, None)
    assert here.display_pub.arrived.wait(10)
    board.close()
    assert "No ranks" in here.display_pub.texts[0]
    assert set(here.display_pub.published[0]["data"]) == {"text/plain", "text/html"}


def test_a_board_without_a_script_stays_as_it_was_when_its_cell_ended() -> None:
    here = shell(None)
    board = open_board(Session(), here, {})
    board.open(0.0, lambda _: None)
    assert here.display_pub.arrived.wait(10)
    board.cell_ended()
    kept = here.display_pub.published[-1]["data"]["text/html"]
    assert "As it was when this cell ended" in kept
    count = len(here.display_pub.published)
    board.nudge()
    board.cell_ended()
    board.close()
    assert len(here.display_pub.published) == count


def test_where_they_cannot_be_loaded_that_is_said_once_and_there_is_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An anywidget that does not fit ipywidgets, or is half installed."""

    def load() -> Any:
        raise ImportError("cannot import name 'Widget'")

    monkeypatch.setattr(replay_board, "widget_classes", load)
    replay_board._are_loaded.cache_clear()
    try:
        with pytest.warns(UserWarning, match="without its widget.*cannot import name 'Widget'"):
            assert isinstance(open_board(Session(), shell(WITH_COMMS), {}), StillBoard)
        assert not replay_board.can_show_widgets(shell(WITH_COMMS))
    finally:
        replay_board._are_loaded.cache_clear()
