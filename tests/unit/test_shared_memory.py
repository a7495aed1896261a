"""What killed processes leave in shared memory: ours is removed, nobody else's is touched."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_notebook.launch import session_folder
from ddp_notebook.launch.session_folder import remove_shared_memory, semaphore_prefix

SESSION = "/tmp/ddp_notebook-abc"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    monkeypatch.setattr(session_folder, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def alive() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def test_semaphores_of_the_session_are_removed_and_others_stay(folder: Path) -> None:
    assert semaphore_prefix(SESSION) == "/mp-ddp_notebook-abc"
    make(folder, "sem.mp-ddp_notebook-abc-x1", "sem.mp-ddp_notebook-abcd-x1", "sem.mp-x", "psm_1")
    remove_shared_memory([SESSION], 0.0)
    assert left(folder) == {"sem.mp-ddp_notebook-abcd-x1", "sem.mp-x", "psm_1"}


def test_the_second_name_that_a_semaphore_has_while_it_is_made_goes_with_it(folder: Path) -> None:
    make(folder, "sem.mp-ddp_notebook-abc-x1", "sem.other")
    os.link(folder / "sem.mp-ddp_notebook-abc-x1", folder / "sem.q1w2e3")
    remove_shared_memory([SESSION], 0.0)
    assert left(folder) == {"sem.other"}


def test_without_a_session_no_semaphore_is_ours(folder: Path) -> None:
    make(folder, "sem.mp-ddp_notebook-abc-x1")
    remove_shared_memory([], 0.0)
    assert left(folder) == {"sem.mp-ddp_notebook-abc-x1"}


def test_pages_of_torch_are_removed_once_their_process_is_gone(folder: Path, dead: int) -> None:
    mine = f"torch_{os.getpid()}_1_0"
    make(folder, f"torch_{dead}_1_0", f"torch_{dead}_1_1", mine, f"torch_{dead}_1", "torch_x_1_0")
    remove_shared_memory([SESSION], 0.0)
    assert left(folder) == {mine, f"torch_{dead}_1", "torch_x_1_0"}


def test_pages_older_than_the_session_are_not_its_own(folder: Path, dead: int) -> None:
    name = f"torch_{dead}_1_0"
    make(folder, name)
    made_s = (folder / name).stat().st_ctime
    remove_shared_memory([SESSION], made_s + 1)
    assert left(folder) == {name}
    remove_shared_memory([SESSION], made_s)
    assert left(folder) == set()


def test_a_process_on_its_way_out_is_waited_for(
    folder: Path, alive: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, f"torch_{alive.pid}_1_0")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        """The process ends while we wait; nobody has reaped it then."""
        slept.append(seconds)
        if alive.stdin is not None and not alive.stdin.closed:
            alive.stdin.close()
            os.waitid(os.P_PID, alive.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(session_folder.time, "sleep", sleep)
    remove_shared_memory([SESSION], 0.0, wait_s=30.0)
    assert left(folder) == set()
    assert len(slept) == 1, "looked again once, and it was gone"
    alive.stdin = None


def test_a_process_that_lives_on_keeps_its_pages_and_is_not_waited_for_for_ever(
    folder: Path, alive: subprocess.Popen[bytes]
) -> None:
    name = f"torch_{alive.pid}_1_0"
    make(folder, name)
    remove_shared_memory([SESSION], 0.0, wait_s=0.2)
    assert left(folder) == {name}


def test_a_machine_without_such_a_folder_has_nothing_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_folder, "SHARED_MEMORY", tmp_path / "none")
    remove_shared_memory([SESSION], 0.0, wait_s=30.0)


def test_a_file_that_vanishes_meanwhile_or_cannot_be_removed_stops_nothing(
    folder: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"torch_{dead}_1_0").mkdir()  # what unlink refuses
    make(folder, f"torch_{dead}_1_1")
    (folder / "sem.gone").symlink_to(folder / "nowhere")
    remove_shared_memory([SESSION], 0.0)
    assert f"torch_{dead}_1_1" not in left(folder)


def test_a_semaphore_that_nobody_finished_making_is_removed_when_nobody_has_it(
    folder: Path,
) -> None:
    make(folder, "sem.ab12CD", "sem.mapped", "sem.toolong")
    with (folder / "sem.mapped").open("r+b") as file, mmap.mmap(file.fileno(), 1):
        file.close()
        remove_shared_memory([], 0.0, wait_s=0.2)
        assert left(folder) == {"sem.mapped", "sem.toolong"}


def test_a_page_that_some_process_has_mapped_stays_when_its_maker_has_ended(
    folder: Path, dead: int
) -> None:
    mapped, unused = (f"torch_{dead}_{each}_0" for each in (1, 2))
    make(folder, mapped, unused)
    with (folder / mapped).open("rb") as file:
        page = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    with page:
        remove_shared_memory([SESSION], 0.0)
        assert left(folder) == {mapped}
    remove_shared_memory([SESSION], 0.0)
    assert left(folder) == set()
