"""Odd environments of a notebook: a session starts and runs cells all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIVES = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
add = "%%ddp\\nx = torch.ones(1)\\ndist.all_reduce(x)\\nprint('sum', x.item())"
warn = "%%ddp\\nimport warnings\\nwarnings.warn('of the user')"
start = "%load_ext ddp_notebook", "%ddp_init --world-size 1"
for cell in (*start, add, "%ddp_restart", add):
    shell.run_cell(cell).raise_error()
print("user's warning:", shell.run_cell(warn).success)
shell.run_cell("%ddp_shutdown").raise_error()
"""


def lived(folder: Path, variables: dict[str, str], *before: str) -> Any:
    """A whole life of a rank, in a process that `before` starts."""
    script = folder / "lives.py"
    script.write_text(LIVES)
    return subprocess.run(
        [*before, sys.executable, str(script)],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.parametrize(
    ("variable", "value"), [("PYTHONWARNINGS", "error"), ("PYTHONOPTIMIZE", "2")]
)
def test_ranks_start_and_run_cells(variable: str, value: str, tmp_path: Path) -> None:
    """Where every warning is an error, of the libraries' too; and where docstrings are gone."""
    ended = lived(tmp_path, {variable: value})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("sum 1.0") == 2, ended.stdout
    assert f"user's warning: {value != 'error'}" in ended.stdout, "an error where it shall be one"


def test_a_notebook_without_stdin_has_ranks(tmp_path: Path) -> None:
    """The first descriptor that it opens is 0, where a child has its stdin."""
    ended = lived(tmp_path, {}, "sh", "-c", 'exec "$@" <&-', "sh")
    assert ended.stdout.count("sum 1.0") == 2, ended.stdout + ended.stderr
