"""The temporary folder of a session: created, locked while it lives, removed when all is killed.

The notebook's kernel and its fork server each hold a lock on a file in it, which the system
releases when they end, however they end. Any process that gets the lock exclusively may remove the
folder. A pid would not be safe: pids are reused, start times change with the clock, and a container
that shares the folder has its own pids.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from ddp_notebook.launch.shared_memory import remove_orphans

if sys.platform != "win32":
    import fcntl

FOLDER_PREFIX = "ddp_notebook-"
_LOCK = "lock"
_UMASK = (
    "the umask takes from this user the right to open its own new files: os.umask(0o022), and set "
    "it so where Jupyter is started"
)
_LONGEST_PARENT_BYTES = 60


def make_folder() -> tuple[Path, int]:
    """Create a session's folder; returns it and the descriptor that locks it until closed.

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
    return folder, held


def hold(folder: Path) -> int:
    """A descriptor that locks the folder until closed; -1 if it cannot be locked."""
    return _locked(folder / _LOCK, exclusive=False)


def let_go(held: int) -> None:
    """Close a descriptor that locked a folder."""
    if held >= 0:
        os.close(held)


def sweep_stale_folders() -> None:
    """Remove this user's folders that no process locks any more.

    Other users may create folders with such names: nothing in them is opened.
    """
    for folder in (path for parent in parents() for path in parent.glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):
            if not is_private(folder):
                continue
            held = _locked(folder / _LOCK, exclusive=True)
            if held < 0:
                continue
            try:
                remove_orphans((str(folder),), os.fstat(held).st_mtime)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def parents() -> tuple[Path, ...]:
    """The directory for new session folders first, then others that may hold this user's folders.

    A socket's path is limited to about a hundred bytes, so the folder's path must be short.
    """
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")  # noqa: S108  # mkdtemp's is private
    if len(os.fsencode(usual)) > _LONGEST_PARENT_BYTES and short.is_dir():
        return short, usual
    return (usual,)


def files_left(folder: Path | str) -> int | None:
    """How many more files it can hold; None where its file system does not count them."""
    if not hasattr(os, "statvfs"):
        return None
    state = os.statvfs(folder)
    return state.f_favail if state.f_files else None


def is_private(folder: Path) -> bool:
    """True for a folder (not a link) that only this user can enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return private and status.st_uid == os.getuid()


def _locked(path: Path, *, exclusive: bool) -> int:
    """A descriptor that locks the file; -1 if it cannot be locked."""
    if sys.platform == "win32":
        return -1
    try:
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
