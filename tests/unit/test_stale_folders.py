"""Folders that sessions left when all of them was killed: removed, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from ddp_notebook.session.processes.folder import FOLDER_PREFIX, sweep_stale_folders


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, for this test."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def folder_of(temporary: Path, name: str, owner: str | None) -> Path:
    made = temporary / f"{FOLDER_PREFIX}{name}"
    made.mkdir()
    if owner is not None:
        (made / "owner").write_text(owner)
    return made


def test_a_folder_goes_when_its_owner_has_and_stays_when_not(temporary: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    stale = folder_of(temporary, "stale", f"{process.pid} 1.0")
    other = folder_of(temporary, "reused", f"{os.getpid()} 1.0")
    mine = folder_of(temporary, "mine", f"{os.getpid()} {psutil.Process().create_time()}")
    sweep_stale_folders()
    assert not stale.exists() and not other.exists()
    assert mine.exists()


@pytest.mark.parametrize("owner", [None, "", " ", "nobody"])
def test_a_folder_that_is_only_just_made_is_left_alone(temporary: Path, owner: str | None) -> None:
    made = folder_of(temporary, "new", owner)
    sweep_stale_folders()
    assert made.exists()
