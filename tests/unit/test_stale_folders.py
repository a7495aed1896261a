"""Folders that sessions left when all of them was killed: removed, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_notebook.launch import session_folder
from ddp_notebook.launch.session_folder import (
    FOLDER_PREFIX,
    hold,
    make_folder,
    remove,
    sweep_stale_folders,
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder, for this test; a short one, as sockets need it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_folder_goes_when_all_that_held_it_have_ended(temporary: Path) -> None:
    kernel = make_folder()
    folder = kernel.path
    fork_server = hold(folder, folder.stat().st_ino)
    for held in (kernel, fork_server):
        sweep_stale_folders()
        assert folder.exists()
        held.let_go()
    sweep_stale_folders()
    assert not folder.exists()


@pytest.mark.parametrize("by", ["another folder", "a link to another folder"])
def test_another_folder_that_stands_in_the_place_of_ours_is_not_removed(
    by: str, temporary: Path, tmp_path: Path
) -> None:
    held = make_folder()
    (held.path / "log").mkdir()
    ours, made = held.path.rename(temporary / "renamed"), held.path
    theirs = made if by == "another folder" else tmp_path
    theirs.mkdir(mode=0o700, exist_ok=True)
    (theirs / "thesis.tex").write_text("years of work")
    if theirs != made:
        made.symlink_to(theirs)
    assert not held.is_there
    held.remove()
    remove(made, ours.stat())
    assert (theirs / "thesis.tex").exists() and (ours / "log").exists()
    late = hold(made, ours.stat().st_ino)  # the fork server, which was told of ours
    assert not late.is_there
    late.remove()
    assert (theirs / "thesis.tex").exists()


def test_a_folder_is_removed_with_all_that_is_in_it_and_nothing_that_is_linked(
    temporary: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    held = make_folder()
    (held.path / "deep" / "deeper").mkdir(parents=True)
    (held.path / "deep" / "deeper" / "file").touch()
    (held.path / "link").symlink_to(tmp_path / "kept")
    (held.path / "deep" / "link").symlink_to(tmp_path / "kept")
    held.remove()
    assert not held.path.exists() and (tmp_path / "kept" / "file").exists()


def test_a_folder_goes_when_its_notebook_was_killed(temporary: Path) -> None:
    code = (
        "import os, signal; from ddp_notebook.launch.session_folder import make_folder;"
        "make_folder(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = temporary.glob(f"{FOLDER_PREFIX}*")
    sweep_stale_folders()
    assert not left.exists()


def test_a_living_folder_stays_when_the_clock_was_set_or_in_another_container(
    temporary: Path,
) -> None:
    """What decides is a lock: no time and no process number is compared."""
    held = make_folder()
    folder = held.path
    os.utime(folder / "lock", (0, 0))
    code = "from ddp_notebook.launch.session_folder import sweep_stale_folders as s; s()"
    elsewhere = ["unshare", "--pid", "--fork"] if os.getuid() == 0 else []
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([*elsewhere, sys.executable, "-c", code], env=environment, check=True)
    assert folder.exists()
    held.let_go()


def _link_to_zero(folder: Path) -> None:
    (folder / "lock").symlink_to("/dev/zero")


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "lock")


def _folder(folder: Path) -> None:
    (folder / "lock").mkdir()


def _of_an_earlier_release(folder: Path) -> None:
    (folder / "owner").write_text("1 1.0")


@pytest.mark.parametrize("make", [_link_to_zero, _fifo, _folder, _of_an_earlier_release])
def test_what_stands_in_a_folder_of_that_name_neither_blocks_nor_fills_a_notebook(
    temporary: Path, make: Callable[[Path], None]
) -> None:
    folder = temporary / f"{FOLDER_PREFIX}other"
    folder.mkdir(mode=0o700)
    make(folder)
    sweep_stale_folders()
    assert folder.exists()


def test_a_folder_that_others_can_write_to_or_that_is_a_link_is_not_opened(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make_folder()
    folder = held.path
    held.let_go()
    linked = temporary / f"{FOLDER_PREFIX}link"
    folder.rename(temporary / "elsewhere").chmod(0o777)
    linked.symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").rename(folder)
    monkeypatch.setattr(session_folder, "_locked", lambda *args, **options: pytest.fail("opened"))
    sweep_stale_folders()
    assert folder.exists() and linked.is_symlink()
