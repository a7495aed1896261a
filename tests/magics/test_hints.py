"""A verb with a typo, %debug after a failure on the ranks: the shell says what to type."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.errors import CellFailed, DDPError, Stuck, UsageMistake
from ddp_notebook.magics import hints
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.model import Diagnosis

_IPYTHONS = ("time", "matplotlib", "load_ext", "bash", "debug", "pdb")


@pytest.mark.parametrize(
    ("cell", "hint"),
    [
        ("%ddp_inti", "Did you mean %ddp_init"),
        ("%%dpp\nx", "Did you mean %%ddp"),
        ("x = 1\nboard = %ddp_statsu", "Did you mean %ddp_status"),
        ("%dpd_init --world-size 2", "Did you mean %ddp_init"),
        ("%ddp-why", "Did you mean %ddp_why"),
        ("%%DDP\nx", "Did you mean %%ddp"),
        ("# my cell\n%%ddp\nprint(rank)", "%%ddp belongs on the first line"),
        ("\nimport os\n\nx = 1\n  %%ddp --ranks 0\nx", "%%ddp belongs on the first line"),
        ("%ddp_why?", ""),
        ("x = 7 %ddp_n", ""),
        ("%%time\n%%ddp --ranks 9\nx", ""),
        ("\n%%ddp --ranks 9\nx", ""),
        ("%ddp_xyzzy", "There are %ddp_init, %%ddp, %ddp_run"),
        ("%matplotlb inline", ""),
        ("%lod_ext x", ""),
        ("%%bsah\nls", ""),
        ("%time x", ""),
        ("%ddp_init 4", ""),
        ("a = 7 %ddp_inti", ""),
    ],
)
def test_a_verb_with_a_typo_is_answered_with_the_one_that_was_meant(cell: str, hint: str) -> None:
    known = (*_IPYTHONS, *(verb.name for verb in VERBS))
    said = hints.unknown_magic(cell, lambda name: name in known)
    assert said.startswith(hint)
    assert bool(said) == bool(hint)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CellFailed("ranks 1 and 2 raised", (1, 2)), "%%ddp --ranks 2\n%debug"),
        (CellFailed("rank 1 died", (1,)), "the ranks that failed have ended"),
        (Stuck("ranks wait", Diagnosis()), "%ddp_where --locals"),
        (UsageMistake("There is no rank 9."), "There is no rank 9."),
    ],
)
def test_debug_says_where_the_error_is_to_be_looked_at(error: DDPError, expected: str) -> None:
    assert expected in hints.after(error, frozenset({1}))


def test_debug_after_our_errors_does_not_land_in_our_files(
    shell: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(cell: str) -> str:
        capsys.readouterr()
        shell.run_cell(cell)
        return capsys.readouterr().out

    def refused(cell: str) -> str:
        capsys.readouterr()
        shell.run_cell(cell)
        return capsys.readouterr().err

    opened = []
    monkeypatch.setattr(shell.InteractiveTB, "debugger", lambda force: opened.append(force))
    for typo in ("%ddp_inti", "%ddp_int"):
        error = f"UsageError: Line magic function `{typo}` not found. Did you mean %ddp_init"
        assert refused(typo).startswith(error)
    assert "Did you mean" not in refused("%matplotlb inline")
    shown("%%ddp\nx = 1")
    assert shown("%debug").startswith(
        "There is nothing for a debugger in the notebook: %%ddp needs"
    )
    assert not opened
    shown("1 / 0")
    shown("%debug")
    assert opened == [True]  # the notebook's own error is IPython's


def test_a_cell_for_the_ranks_without_a_line_is_not_sent_to_a_line_magic(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """IPython asked whether %ddp was meant, which then said that it takes a cell."""
    for cell in ("%%ddp", "%%ddp --ranks 0\n"):
        capsys.readouterr()
        assert not shell.run_cell(cell).success
        said = capsys.readouterr().err
        assert "The cell is empty: write what the ranks are to run below %%ddp" in said
        assert "Did you mean" not in said


def test_a_verb_above_the_last_line_or_in_a_loop_shows_its_value(
    shell2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two verbs in a cell IPython showed the last one's value only."""

    def shown(cell: str) -> str:
        capsys.readouterr()
        assert shell2.run_cell(cell).success
        return capsys.readouterr().out

    shell2.user_ns["shown"] = 7
    assert shown("%ddp_why\nx = 1").count("No problem found") == 1
    assert shown("for _ in range(3):\n    %ddp_why\n%ddp_why").count("No problem found") == 4
    assert "verified" not in shown("board = %ddp_status\ntype(board)")
    assert shown("%ddp_why -h\nx = 1").count("Usage") == shown("%ddp_why -h").count("Usage")
    assert shown("%ddp_push shown\nx = 2").strip() == "shown → ranks 0 and 1"


@pytest.mark.parametrize(
    ("raises", "hinted"),
    [
        ("raise type('ProcessExitedException', (Exception,), {'__module__': %r})", True),
        ("raise ValueError('environment variable RANK expected, but not set')", True),
        ("raise ValueError('a bad batch')", False),
    ],
)
def test_a_program_for_ranks_in_a_cell_of_the_notebook_is_told_where_to_go(
    shell: Any, capsys: pytest.CaptureFixture[str], raises: str, hinted: bool
) -> None:
    shell.run_cell(raises.replace("%r", "'torch.multiprocessing.spawn'"))
    assert ("Write %%ddp on its first line" in capsys.readouterr().out) is hinted
