"""A file beside the notebook with the name of a module that ranks load is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.launch.client import _BOOT
from ddp_notebook.session.preflight import why_not_loaded

OWN = str(Path(os.__file__).parent)


def test_a_file_that_python_finds_first_is_named_wherever_the_folder_stands(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for folder in tmp_path, installed:
        for name in ("torch.py", "json.py", "train.py"):
            (folder / name).touch()
    before = why_not_loaded([str(tmp_path), OWN, str(installed)])
    assert before.startswith(f"{tmp_path}/json.py and {tmp_path}/torch.py have the names")
    after = why_not_loaded([OWN, str(tmp_path), str(installed)])
    assert after.startswith(f"{tmp_path}/torch.py has the name")
    assert why_not_loaded([OWN, str(installed)]) == ""


@pytest.mark.usefixtures("no_current_folder")
def test_a_current_folder_that_is_gone_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    assert why_not_loaded(["", str(tmp_path), OWN]).startswith(f"{tmp_path}/torch.py has the name")


def test_a_fork_server_does_not_load_a_file_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not Python's own')")
    begun = [sys.executable, "-c", _BOOT, "[]"]  # it wants another argument, and says so
    ended = subprocess.run(begun, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "TypeError: list indices" in ended.stderr
