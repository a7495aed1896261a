"""A session's files, and its removal also when everything was killed.

First its temporary folder: created, locked while it lives. The notebook's kernel and its fork
server each hold a lock on a file in it, which the system releases when they end, however they end.
Any process that gets the lock exclusively may remove the folder. A pid would not be safe: pids are
reused, start times change with the clock, and a container that shares the folder has its own pids.

Then the shared memory of its processes, in /dev/shm. multiprocessing and torch unlink a semaphore
or a page right after making it; a process that is killed in between leaves the file until the
machine restarts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ddp_notebook.launch.process_groups import is_running

FOLDER_PREFIX = "ddp_notebook-"
_LOCK = "lock"
_UMASK = (
    "the umask takes from this user the right to open its own new files: os.umask(0o022), and set "
    "it so where Jupyter is started"
)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux has it; nothing is made there
_UNNAMED = re.compile(r"sem\.[A-Za-z0-9]{6}|torch_(?P<maker>\d+)_\d+_\d+")
"""Matches the files without the session's name: half-made semaphores, and pages of torch."""


class Held(NamedTuple):
    """A folder that stays locked, and known, until it is let go, whatever its path leads to."""

    path: Path
    lock: int
    """Locks it; -1 where it cannot be locked."""
    itself: int
    """The folder, so that no later one has its inode; -1 where it was gone already."""

    @property
    def is_there(self) -> bool:
        """True while its path leads to this folder, and to no other one."""
        try:
            return self.itself >= 0 and os.path.samestat(self.path.stat(), os.fstat(self.itself))
        except OSError:
            return False

    def remove(self) -> None:
        """Remove it, if it still stands at its path, and let it go."""
        if self.itself >= 0:
            remove(self.path, os.fstat(self.itself))
        self.let_go()

    def let_go(self) -> None:
        """Lock it no longer."""
        for descriptor in (self.lock, self.itself):
            if descriptor >= 0:
                os.close(descriptor)


def make_folder() -> Held:
    """Create a session's folder, locked until it is let go.

    Raises OSError where it cannot be made, or where the umask would lock its own user out.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parents()[0]))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        folder.rmdir()
        raise PermissionError(errno.EACCES, _UMASK)
    new = folder / f"{_LOCK}.new"
    new.touch(mode=0o600)
    held = _locked(new, exclusive=False)
    new.rename(folder / _LOCK)  # last, so that no process finds it without its lock
    return Held(folder, held, _opened(folder))


def hold(folder: Path, inode: int) -> Held:
    """Lock a folder that another process made, if that one still stands there."""
    itself = _opened(folder)
    if itself >= 0 and os.fstat(itself).st_ino != inode:
        os.close(itself)
        itself = -1
    lock = _locked(folder / _LOCK, exclusive=False) if itself >= 0 else -1
    return Held(folder, lock, itself)


def remove(folder: Path, made: os.stat_result) -> None:
    """Remove the folder that was `made`, and none that another has put in its place."""
    itself = _opened(folder)
    if itself < 0:
        return
    try:
        now = os.fstat(itself)
        if not os.path.samestat(now, made) or now.st_uid != made.st_uid:
            return
        # By names relative to the open folder (dir_fd), not by paths: between the check above and
        # the removal somebody may rename the folder and put a link to another one in its place.
        with os.scandir(itself) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=itself)
                continue
            shutil.rmtree(name, ignore_errors=True, dir_fd=itself)
        folder.rmdir()  # one that is not empty is another's
    except OSError:  # it was removed or renamed meanwhile, or may not be removed
        pass
    finally:
        os.close(itself)


def _opened(folder: Path) -> int:
    """Return a descriptor of the folder itself; -1 for a link, or for none."""
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1


def sweep_stale_folders() -> None:
    """Remove this user's folders that no process locks any more.

    Other users may create folders with such names: nothing in them is opened.
    """
    for folder in (path for parent in parents() for path in parent.glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):
            made = folder.lstat()
            if not is_private(folder):
                continue
            held = _locked(folder / _LOCK, exclusive=True)
            if held < 0:
                continue
            try:
                remove_shared_memory((str(folder),), os.fstat(held).st_mtime)
                remove(folder, made)
            finally:
                os.close(held)


def parents() -> tuple[Path, ...]:
    """The directory for new session folders first, then others that may hold this user's folders.

    A socket's path is limited to about a hundred bytes, so the folder's path must be short.
    """
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")  # noqa: S108  # mkdtemp's is private
    if len(os.fsencode(usual)) > 60 and short.is_dir():
        return short, usual
    return (usual,)


def files_left(folder: Path | str) -> int | None:
    """Return how many more files it can hold; None where its file system does not count them."""
    state = os.statvfs(folder)
    return state.f_favail if state.f_files else None


def is_private(folder: Path) -> bool:
    """Return True for a folder (not a link) that only this user can enter.

    The one check, before anything in it is opened, listened at or connected to.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return private and status.st_uid == os.geteuid()


def require_private(folder: Path) -> None:
    """Raise PermissionError for a folder that `is_private` is not true of."""
    if not is_private(folder):
        raise PermissionError(f"others can enter {folder}, or it is another user's")


def _locked(path: Path, *, exclusive: bool) -> int:
    """Return a descriptor that locks the file; -1 if it cannot be locked."""
    try:
        # Others may have put a link or a FIFO there: neither is followed, and neither blocks.
        held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        if stat.S_ISREG(os.fstat(held).st_mode):
            fcntl.flock(held, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return held
    except OSError:  # held by others, or a file system without locks
        pass
    os.close(held)
    return -1


# --------------------------------------------------------------------------- shared memory


def semaphore_prefix(session_folder: str) -> str:
    """Return how the names of a session's semaphores begin, as multiprocessing wants it."""
    return f"/mp-{Path(session_folder).name}"


def remove_shared_memory(
    session_folders: Iterable[str], since_s: float, wait_s: float = 0.0
) -> None:
    """Remove what processes of these sessions left; `since_s` is when the first one started.

    Semaphores are known by their names, which hold the session's. A page of torch is known by the
    pid of the process that made it, which must have ended. It waits up to `wait_s` for that: a
    process that was killed just now may not have ended yet.
    """
    if not SHARED_MEMORY.is_dir():
        return
    prefixes = tuple(f"sem.{semaphore_prefix(folder)[1:]}-" for folder in session_folders)
    inodes = {
        status.st_ino
        for path, status in _own_files()
        if prefixes and path.name.startswith(prefixes)
    }
    # While the C library makes a semaphore, it has a second name of six characters: it writes a
    # file of that name, links the semaphore's own name to it, and unlinks the first. Who is killed
    # in between leaves both.
    for path, status in _own_files():
        if status.st_ino in inodes:
            _unlink(path)
    deadline = time.monotonic() + wait_s
    while _remove_pages(since_s) and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_pages(since_s: float) -> bool:
    """Remove what is not in use any more; return whether something else may soon be unused.

    Pages of torch whose process has ended, and semaphores whose process was killed while the C
    library made them, so that they do not have the session's name yet. Another process may have
    mapped either: a page outlives its maker when a tensor was sent on, and a name of six characters
    may be any program's. Such a file stays.
    """
    found, waits = [], False
    for path, status in _own_files():
        unnamed = _UNNAMED.fullmatch(path.name)
        if unnamed and status.st_ctime >= since_s:
            if unnamed["maker"] and is_running(int(unnamed["maker"])):
                waits = True
            else:
                found.append(path)
    mapped: set[str] = set()  # by the processes of this user
    in_shared_memory = re.escape(str(SHARED_MEMORY)) + "/.+"
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped.update(re.findall(in_shared_memory, maps.read_text()))
    for path in found:
        if str(path) in mapped:
            waits = True
        else:
            _unlink(path)
    return waits


def _own_files() -> list[tuple[Path, os.stat_result]]:
    """Return this user's files in shared memory, each with its status."""
    files = []
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid():
                    files.append((path, status))
    return files


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
