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
from typing import NamedTuple

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
    """A descriptor of the folder itself; -1 for a link, or for none."""
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
                remove_orphans((str(folder),), os.fstat(held).st_mtime)
                remove(folder, made)
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
