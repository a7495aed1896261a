"""Files that the ranks and the session map: made with their room reserved, opened with care.

A sparse file is a promise: on a full disk the first write through the map kills the process
(SIGBUS). And the name of another rank's file is read from torch's store, to which every user of
the host can write: so it is a name in the session's folder, and the file is looked at first.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path


def make(path: Path, size_bytes: int) -> mmap.mmap:
    """A new or reused file of that size, mapped. Raises OSError when there is no room for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            # Not `ftruncate`: that gives a sparse file on any disk, however full. A file that is
            # reused stays as it is, since to reserve what is there already changes nothing.
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:  # macOS
            os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError:
        path.unlink(missing_ok=True)  # what was reserved of it is needed elsewhere
        raise
    finally:
        os.close(descriptor)


def open_other(folder: Path, name: object, size_bytes: int) -> mmap.mmap:
    """Another rank's file in `folder`, mapped for reading.

    Raises OSError and ValueError when it is anything else than such a file of this user's.
    """
    if not isinstance(name, str) or "/" in name or "\0" in name:
        raise ValueError(f"not the name of a file: {name!r:.100}")
    # A FIFO is not waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(folder / name, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError(f"no file of this user: {name!r:.100}")
        if status.st_size != size_bytes:
            raise ValueError(f"{name!r:.100} has {status.st_size:,} bytes, not {size_bytes:,}")
        return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
