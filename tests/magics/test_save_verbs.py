"""`%ddp_save` and `%ddp_replay` in a real shell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from results import said

from ddp_notebook.session import Replay

BYPASS = """%%ddp
model = DDP(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model.module(torch.randn(8, 10)).sum().backward()
    optimizer.step()"""


def test_a_run_is_saved_and_shown_again_without_ranks(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "my run.json"
    shell.run_cell("%ddp_init --world-size 2 --device cpu")
    shell.run_cell("%%ddp\nprint('hello')\ndist.all_reduce(torch.ones(2))")
    text = said(shell, capsys, f"%ddp_save '{path}'", ok=True)
    assert re.match(r".*my run\.json: 2 ranks, \d+ events, 2 collectives, [\d.]+ KiB\n", text)
    assert "exists already" in said(shell, capsys, f"%ddp_save '{path}'", ok=False)
    said(shell, capsys, f"%ddp_save '{path}' --force --output", ok=True)
    shell.run_cell("%ddp_shutdown")

    text = said(shell, capsys, f"%ddp_replay '{path}'", ok=True)
    assert "my run.json: 2 ranks, " in text
    assert "2 ranks, gloo" in text
    assert text.count("6/6 verified") == 2
    assert "No problem found" in text
    shell.run_cell(f"replay = %ddp_replay '{path}'")
    replay = shell.user_ns["replay"]
    assert isinstance(replay, Replay)
    assert replay.output(1) == "hello\n"
    assert repr(replay).startswith("<Replay of my run.json: 2 ranks")
    assert json.loads(path.read_text())["traceEvents"]


def test_what_post_run_checks_found_is_in_the_saved_run(
    shell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    shell.run_cell("%ddp_init --world-size 2 --device cpu")
    shell.run_cell(BYPASS)
    expected = "Training bypasses DDP (it calls `model.module`)"
    assert expected in said(shell, capsys, "%ddp_why", ok=True)
    said(shell, capsys, f"%ddp_save '{path}'", ok=True)
    shell.run_cell("%ddp_shutdown")

    text = said(shell, capsys, f"%ddp_replay '{path}'", ok=True)
    assert expected in text
    assert "No problem found" not in text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "%ddp_save run.json",
            "UsageError: %ddp_save needs ranks, and none are running. "
            "Start them first: %ddp_init --world-size 4",
        ),
        ("%ddp_save", "UsageError: %ddp_save needs path"),
        ("%ddp_save /none/run.json", "UsageError: Folder /none does not exist."),
        ("%ddp_replay", "UsageError: %ddp_replay needs path"),
        ("%ddp_replay none.json", "UsageError: none.json cannot be read: No such file"),
        ("%ddp_replay /dev/null", "UsageError: /dev/null cannot be read: it is no file"),
    ],
)
def test_wrong_input_says_what_to_type(
    shell: Any, capsys: pytest.CaptureFixture[str], call: str, expected: str
) -> None:
    assert said(shell, capsys, call, ok=False).startswith(expected)


@pytest.mark.parametrize("verb", ["ddp_save", "ddp_replay"])
def test_they_have_help(shell: Any, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    text = said(shell, capsys, f"%{verb} -h", ok=True)
    assert f"usage: %{verb}" in text
    assert "%%" not in text
