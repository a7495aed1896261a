"""The temporary folder of a session: who owns it, and removal of those whose owner was killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import psutil

from ddp_notebook.launch.shared_memory import remove_orphans

FOLDER_PREFIX = "ddp_notebook-"


def make_folder() -> Path:
    """A new folder of a session."""
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))


def sweep_stale_folders() -> None:
    """Remove folders of sessions whose notebook and fork server were both killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder / "owner"
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not _alive(owner.read_text()):
                remove_orphans((str(folder),), owner.stat().st_mtime)
                shutil.rmtree(folder, ignore_errors=True)


def write_owner(folder: Path, pid: int) -> None:
    """Note in `folder` that the process `pid` owns it.

    As a whole or not at all: another session may be reading it.
    """
    new = folder / "owner.new"
    new.write_text(_owner(pid))
    new.replace(folder / "owner")


def _owner(pid: int) -> str:
    """A process, told apart from a later one with the same number."""
    return f"{pid} {psutil.Process(pid).create_time()}"


def _alive(owner: str) -> bool:
    pid = int(owner.split()[0])
    try:
        process = psutil.Process(pid)
        return _owner(pid) == owner and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
