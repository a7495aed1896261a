"""Files that others may have made: opened without waiting, regular ones only, read to a bound.

Beside a script in a shared folder, or among logs, another user may leave a FIFO, at which who opens
it waits forever, or a link to a device, which has no end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SOURCES_BYTES = 1 << 20


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, to be read. Raises OSError for anything else, and for no name of a file."""
    try:
        # O_NONBLOCK: opening a FIFO does not wait for a writer. The type is looked at after
        # opening, on the descriptor: a file that is checked by its name may be replaced before it
        # is opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a zero byte, or half of a character
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(
                errno.EINVAL, "it is no file, but a pipe, a folder or a device", str(path)
            )
        stream = os.fdopen(descriptor, "rb", closefd=False)
        with stream:
            yield stream
    finally:
        os.close(descriptor)


def exists(path: Path) -> bool:
    """True where there is something of that name; false also for what cannot be a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def tail(path: Path, most_bytes: int = sys.maxsize, begin: int = 0) -> str:
    """Return the end of a file as text, at most `most_bytes` of it, none before byte `begin`.

    Empty where it cannot be read.
    """
    with contextlib.suppress(OSError), opened(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(begin, size - most_bytes))
        return stream.read().decode("utf-8", "replace")
    return ""


def current_folder_is_gone() -> bool:
    """True where the folder in which this process works was removed: no relative path means
    anything there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def source(path: Path, before_s: float | None = None, most_bytes: int = _SOURCES_BYTES) -> str:
    """The text of a file of code; empty where it is not to be had, or is too long.

    Also of one that was changed after `before_s` (since 1970): that is not what ran.
    """
    try:
        with opened(path) as stream:
            if before_s is not None and os.fstat(stream.fileno()).st_mtime > before_s:
                return ""
            data = stream.read(most_bytes + 1)
    except OSError:
        return ""
    return data.decode("utf-8", "replace") if len(data) <= most_bytes else ""


def sources(script: Path, before_s: float | None = None) -> dict[str, str]:
    """A script and the Python files beside it, by their names; no more than a megabyte."""
    found: dict[str, str] = {}
    left_bytes = _SOURCES_BYTES
    # A shared folder may hold thousands of files.
    for path in (script, *sorted(script.parent.glob("*.py"))[:200]):
        if path.name not in found and (text := source(path, before_s, left_bytes)):
            left_bytes -= len(text.encode("utf-8"))
            found[path.name] = text
    return found
