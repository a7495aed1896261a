"""The temporary folder of a session: made, held while the session lives, swept when all is killed.

The notebook's kernel and its fork server each hold a lock on a file in it, which the system
releases when they end, however they end. Who gets the lock for itself may remove the folder. A
process number would not do: the clock may be set, and a container that shares the folder has its
own.
"""

from __future__ import annotations

import contextlib
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
_LONGEST_PARENT_BYTES = 60


def make_folder() -> tuple[Path, int]:
    """A new folder of a session, and the descriptor that holds it until it is closed."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parents()[0]))
    new = folder / f"{_LOCK}.new"
    new.touch(mode=0o600)
    held = _locked(new, exclusive=False)
    new.rename(folder / _LOCK)  # only now, that nobody finds it without its lock
    return folder, held


def hold(folder: Path) -> int:
    """A descriptor that holds the folder until it is closed; -1 where it cannot be held."""
    return _locked(folder / _LOCK, exclusive=False)


def let_go(held: int) -> None:
    """Close a descriptor that held a folder."""
    if held >= 0:
        os.close(held)


def sweep_stale_folders() -> None:
    """Remove this user's folders that nobody holds any more.

    Other users may make folders of that name: nothing in them is opened.
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
    """Where session folders are made, and then where others of this user's may be.

    A socket's path has room for about a hundred bytes, so that one of ours needs a short one.
    """
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")  # noqa: S108  # mkdtemp's is private
    if len(os.fsencode(usual)) > _LONGEST_PARENT_BYTES and short.is_dir():
        return short, usual
    return (usual,)


def is_private(folder: Path) -> bool:
    """A folder, no link, that this user alone can enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return private and status.st_uid == os.getuid()


def _locked(path: Path, *, exclusive: bool) -> int:
    """A descriptor with a lock on the file; -1 when it cannot be had."""
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
