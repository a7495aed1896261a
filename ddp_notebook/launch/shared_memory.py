"""Shared memory that killed processes leave in /dev/shm: found and removed.

multiprocessing and torch unlink a semaphore or a page right after making it. A process that is
killed in between leaves the file until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ddp_notebook.launch.process_groups import is_running

if sys.platform == "linux":
    import fcntl

FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux has it; nothing is made there
_POLL_S = 0.05
_HALF_MADE = re.compile(r"sem\.[A-Za-z0-9]{6}")
_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")


def semaphore_prefix(session_folder: str) -> str:
    """The prefix of the names of a session's semaphores, as multiprocessing wants it."""
    return f"/mp-{Path(session_folder).name}"


def remove_orphans(session_folders: Iterable[str], since_s: float, wait_s: float = 0.0) -> None:
    """Remove the leftovers of these sessions' processes; `since_s` is when the first one started.

    Semaphores are known by their names, which hold the session's; pages of torch by the pid of
    the process that made them, which must have ended, and by none having them. It waits up to
    `wait_s` for that: a process that was killed just now may not have ended yet.
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

    They do not have the session's name yet. Returns how many a process still has.
    """
    made = [
        path
        for path, status in _own_files()
        if _HALF_MADE.fullmatch(path.name) and status.st_ctime >= since_s
    ]
    return sum(not _remove_unused(path) for path in made)


def _remove_pages(since_s: float) -> int:
    """Remove torch's pages of ended processes; returns the number of pages of live ones.

    In another container that shares the folder, the pid in a name may be that of a live process.
    """
    live = 0
    for path, status in _own_files():
        match = _TORCH.fullmatch(path.name)
        if match and status.st_ctime >= since_s:
            if is_running(int(match[1])):
                live += 1
            else:
                _remove_unused(path)
    return live


def _remove_unused(path: Path) -> bool:
    """Remove a file if no process has it open or mapped, in whichever container; True if so.

    The proof is a lease to write, which the kernel refuses while others have the file. One that
    cannot be had proves nothing, and the file stays.
    """
    if sys.platform != "linux":
        return False
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The signal for an open that waits for the lease is SIGIO by default, which ends processes.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(file)
    return True


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
