"""What a terminal shows between %ddp_init and its result."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import pytest

from ddp_notebook.magics import cell_output
from ddp_notebook.magics.cell_output import CellOutput, progress_line
from ddp_notebook.model import Loading, RankState, Snapshot
from ddp_notebook.views.bench import live_steps

S = 1_000_000_000


class Terminal(io.StringIO):
    """A terminal; `wrote` is set when something new stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.wrote.set()


def test_a_terminal_says_what_the_start_waits_for_and_is_clean_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_output, "_AGAIN_AFTER_S", 0.001)
    state = [Snapshot((RankState(0),), "gloo", loading=Loading(5 * S), taken_ns=17 * S)]
    terminal = Terminal()
    with progress_line(lambda: state[0], terminal):
        assert terminal.wrote.wait(10)
        assert "Loading torch, once for all ranks: 12 s" in terminal.getvalue()
        state[0] = Snapshot((RankState(0),), "gloo")
        for _ in range(2):
            terminal.wrote.clear()
            assert terminal.wrote.wait(10)
        assert "1 rank, gloo: starting · 0 s" in terminal.getvalue()
    *_, blank, after = terminal.getvalue().split("\r")
    assert (blank.strip(), after) == ("", "")
    assert "\x1b" not in terminal.getvalue(), "not every terminal knows escape codes"


def test_a_terminal_says_what_a_benchmark_does_before_its_first_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_output, "_PROGRESS_INTERVAL_S", 0.001)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output = CellOutput(SimpleNamespace(display_pub=None))
    with output.progress(lambda so_far, done, s: live_steps("net", so_far, done, s)):
        assert terminal.wrote.wait(10)
        assert "training steps of net: each rank makes the model" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-2].strip() == ""


def test_a_file_gets_no_progress() -> None:
    file = io.StringIO()
    with progress_line(Snapshot, file):
        assert True
    assert file.getvalue() == ""
