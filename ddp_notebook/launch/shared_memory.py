"""Shared memory that killed processes leave behind: what nobody else can take away any more.

multiprocessing and torch remove the name of a semaphore or a page right after making it. A
process that is killed in between leaves the file in /dev/shm until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux has it; nothing is made there
_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")


def semaphore_prefix(session_folder: str) -> str:
    """The prefix of the names of a session's semaphores, as multiprocessing wants it."""
    return f"/mp-{Path(session_folder).name}"


def remove_orphans(session_folders: Iterable[str], since_s: float) -> None:
    """Remove what processes of these sessions left; `since_s` is when the first one began.

    Semaphores are known by their names, which are the session's own; pages of torch by the
    number of the process that made them, which must be gone.
    """
    if not FOLDER.is_dir():
        return
    marks = tuple(f"sem.{semaphore_prefix(folder)[1:]}-" for folder in session_folders)
    inodes = set()
    for path, status in _mine():
        if marks and path.name.startswith(marks):
            inodes.add(status.st_ino)
        match = _TORCH.fullmatch(path.name)
        if match and status.st_ctime >= since_s and not _exists(int(match[1])):
            _unlink(path)
    # While the C library makes a semaphore, it has a second name of six characters.
    for path, status in _mine():
        if status.st_ino in inodes:
            _unlink(path)


def _mine() -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for path in FOLDER.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid():
                    found.append((path, status))
    return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
