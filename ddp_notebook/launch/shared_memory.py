"""Shared memory that killed processes leave behind: what nobody else can take away any more.

multiprocessing and torch remove the name of a semaphore or a page right after making it. A
process that is killed in between leaves the file in /dev/shm until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux has it; nothing is made there
_LOOK_AGAIN_S = 0.05
_MADE_WITHIN_S = 0.5
_HALF_MADE = re.compile(r"sem\.[A-Za-z0-9]{6}")
_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")


def semaphore_prefix(session_folder: str) -> str:
    """The prefix of the names of a session's semaphores, as multiprocessing wants it."""
    return f"/mp-{Path(session_folder).name}"


def remove_orphans(session_folders: Iterable[str], since_s: float, wait_s: float = 0.0) -> None:
    """Remove what processes of these sessions left; `since_s` is when the first one began.

    Semaphores are known by their names, which are the session's own; pages of torch by the
    number of the process that made them, which must be gone. For that it waits up to
    `wait_s`: a process that was killed just now may still be on its way out.
    """
    if not FOLDER.is_dir():
        return
    _remove_semaphores(tuple(f"sem.{semaphore_prefix(each)[1:]}-" for each in session_folders))
    deadline = time.monotonic() + wait_s
    while _remove_pages(since_s) + _remove_half_made(since_s) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)


def _remove_semaphores(prefixes: tuple[str, ...]) -> None:
    inodes = set()
    for path, status in _mine():
        if prefixes and path.name.startswith(prefixes):
            inodes.add(status.st_ino)
    # While the C library makes a semaphore, it has a second name of six characters.
    for path, status in _mine():
        if status.st_ino in inodes:
            _unlink(path)


def _remove_half_made(since_s: float) -> int:
    """Remove semaphores that a process was killed over while the C library made them.

    They have no name of a session yet. What no process has mapped after a moment is nobody's.
    How many there are that are too young to tell.
    """
    latest_s = time.time() - _MADE_WITHIN_S
    every = {
        status.st_ino: (path, status.st_ctime < latest_s)
        for path, status in _mine()
        if _HALF_MADE.fullmatch(path.name) and since_s <= status.st_ctime
    }
    found = {inode: path for inode, (path, old) in every.items() if old}
    if found:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError, ValueError):
                for line in maps.read_text().splitlines():
                    if str(FOLDER) in line:
                        found.pop(int(line.split()[4]), None)
    for path in found.values():
        _unlink(path)
    return sum(not old for _, old in every.values())


def _remove_pages(since_s: float) -> int:
    """Remove torch's pages of processes that are gone; how many there are of live ones."""
    left = 0
    for path, status in _mine():
        match = _TORCH.fullmatch(path.name)
        if match and status.st_ctime >= since_s:
            if _lives(int(match[1])):
                left += 1
            else:
                _unlink(path)
    return left


def _mine() -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for path in FOLDER.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid():
                    found.append((path, status))
    return found


def _lives(pid: int) -> bool:
    """True for a process that has not ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return False


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
