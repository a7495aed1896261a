"""Shared memory that killed processes leave in /dev/shm: found and removed.

multiprocessing and torch unlink a semaphore or a page right after making it. A process that is
killed in between leaves the file until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from ddp_notebook.launch.process_groups import is_running

FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux has it; nothing is made there
_POLL_S = 0.05
_MAKING_S = 0.5
"""Files younger than this, in seconds, may be incomplete."""
_HALF_MADE = re.compile(r"sem\.[A-Za-z0-9]{6}")
_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")


def semaphore_prefix(session_folder: str) -> str:
    """The prefix of the names of a session's semaphores, as multiprocessing wants it."""
    return f"/mp-{Path(session_folder).name}"


def remove_orphans(session_folders: Iterable[str], since_s: float, wait_s: float = 0.0) -> None:
    """Remove the leftovers of these sessions' processes; `since_s` is when the first one started.

    Semaphores are known by their names, which hold the session's; pages of torch by the pid of
    the process that made them, which must have ended. It waits up to `wait_s` for that: a process
    that was killed just now may not have ended yet.
    """
    if not FOLDER.is_dir():
        return
    _remove_semaphores(tuple(f"sem.{semaphore_prefix(folder)[1:]}-" for folder in session_folders))
    deadline = time.monotonic() + wait_s
    while _remove_pages(since_s) + _remove_half_made(since_s) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _remove_semaphores(prefixes: tuple[str, ...]) -> None:
    inodes = set()
    for path, status in _own_files():
        if prefixes and path.name.startswith(prefixes):
            inodes.add(status.st_ino)
    # While the C library makes a semaphore, it has a second name of six characters.
    for path, status in _own_files():
        if status.st_ino in inodes:
            _unlink(path)


def _remove_half_made(since_s: float) -> int:
    """Remove semaphores whose process was killed while the C library made them.

    They do not have the session's name yet; one that no process has mapped after a moment is
    nobody's. Returns how many are too young to tell.
    """
    latest_s = time.time() - _MAKING_S
    candidates = {
        status.st_ino: (path, status.st_ctime < latest_s)
        for path, status in _own_files()
        if _HALF_MADE.fullmatch(path.name) and since_s <= status.st_ctime
    }
    unmapped = {inode: path for inode, (path, old) in candidates.items() if old}
    if unmapped:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError, ValueError):
                for line in maps.read_text().splitlines():
                    if str(FOLDER) in line:
                        unmapped.pop(int(line.split()[4]), None)
    for path in unmapped.values():
        _unlink(path)
    return sum(not old for _, old in candidates.values())


def _remove_pages(since_s: float) -> int:
    """Remove torch's pages of ended processes; returns the number of pages of live ones."""
    live = 0
    for path, status in _own_files():
        match = _TORCH.fullmatch(path.name)
        if match and status.st_ctime >= since_s:
            if is_running(int(match[1])):
                live += 1
            else:
                _unlink(path)
    return live


def _own_files() -> list[tuple[Path, os.stat_result]]:
    """This user's files there, each with its status."""
    files = []
    with contextlib.suppress(OSError):
        for path in FOLDER.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid():
                    files.append((path, status))
    return files


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
