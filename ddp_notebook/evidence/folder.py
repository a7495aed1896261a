"""Sorts the given files into dumps, logs and saved runs. Bounded in all respects."""

from __future__ import annotations

import codecs
import errno
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import UsageMistake
from ddp_notebook.evidence import flight_recorder
from ddp_notebook.evidence.plain_pickle import NotPlain
from ddp_notebook.files import exists, opened
from ddp_notebook.model import cut
from ddp_notebook.views.ansi import plain, visible

MOST_FILES = 4096
MOST_IN_FOLDERS = 50_000
"""A folder with more in it is no job's: `/`, or a home folder."""
MOST_DUMP_BYTES = 64 << 20
_LOG_TAIL_BYTES = 2 << 20
"""How much of a log is read, from its end, where the errors are."""
_MOST_BYTES = 512 << 20
_GZIP = b"\x1f\x8b"
_LOGS = (".log", ".txt", ".out", ".err")
_TORCHRUN = re.compile(r"attempt_(\d+)/(\d{1,6})/(?:stdout|stderr)\.log$")
_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)")


@dataclass
class Found:
    """The files that were found; `notes` say what was not read, and why."""

    dumps: dict[int, tuple[Path, dict[str, object]]] = field(default_factory=dict)
    logs: list[tuple[Path, str, int | None]] = field(default_factory=list)
    newest_s: float = 0.0
    """When the newest file was written, in seconds since 1970."""
    notes: list[str] = field(default_factory=list)

    def leave_out(self, file: Path, why: str) -> None:
        """Note that a file was not read."""
        self.notes.append(f"not read: {visible(file.name)}{plain(why)}")


def read(paths: Sequence[Path]) -> Found:
    """The files at `paths`, and those in folders among them. Raises UsageMistake."""
    found = Found()
    left_bytes = _MOST_BYTES
    files = _last_attempts(sorted(set(_files(paths))))
    for number, file in enumerate(files):
        if number >= MOST_FILES or left_bytes <= 0:
            found.notes.append(f"not read: {len(files) - number:,} more files than are read")
            break
        left_bytes -= _take(file, found)
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not exists(path):
            shown = cut(visible(str(path)), 300)
            raise UsageMistake(
                f"{shown} does not exist. Name a pid, or a folder or files of a job."
            )
        if path.is_dir():
            # Links are not followed: they may lead anywhere, and in a ring.
            for count, file in enumerate(path.rglob("*")):
                if count >= MOST_IN_FOLDERS:
                    raise UsageMistake(
                        f"{cut(visible(str(path)), 300)} holds more than {MOST_IN_FOLDERS:,} files "
                        "and folders. Name the folder that one job has written."
                    )
                if file.is_file() and not _is_link(file):
                    yield file
        else:
            yield path


def _is_link(file: Path) -> bool:
    return stat.S_ISLNK(file.lstat().st_mode)


def _last_attempts(files: Sequence[Path]) -> list[Path]:
    """Without the logs of attempts that torchrun made anew, and of runs before the last one."""
    runs: dict[Path, float] = {}
    for file in files:
        if _TORCHRUN.search(file.as_posix()):
            run = file.parent.parent
            runs[run] = max(runs.get(run, 0.0), file.stat().st_mtime)
    newest: dict[Path, Path] = {}
    for run, when in runs.items():
        base = run.parent.parent
        if base not in newest or (when, run.name) > (runs[newest[base]], newest[base].name):
            newest[base] = run
    kept = set(newest.values())
    return [
        file
        for file in files
        if not _TORCHRUN.search(file.as_posix()) or file.parent.parent in kept
    ]


def _take(file: Path, found: Found) -> int:
    """Read one file into `found`; how many bytes that were."""
    try:
        with opened(file) as stream:
            status = os.fstat(stream.fileno())
            found.newest_s = max(found.newest_s, status.st_mtime)
            start = stream.read(2)
            if start == _GZIP and file.suffix == ".gz":
                found.logs.append((file, _unpacked_tail(stream), _rank_of_log(file)))
                return _LOG_TAIL_BYTES
            if _is_log(file, start):
                text = _tail(stream, start, status.st_size)
                found.logs.append((file, text, _rank_of_log(file)))
                return len(text)
            if status.st_size > MOST_DUMP_BYTES:
                found.leave_out(file, f", which has {status.st_size:,} bytes")
                return 0
            data = start + stream.read(MOST_DUMP_BYTES)
    except OSError as error:
        found.leave_out(file, f": {error.strerror or error}")
        return 0
    _take_dump(file, data, found)
    return len(data)


def _tail(stream: BinaryIO, start: bytes, size: int) -> str:
    """The end of a log; of one that PowerShell wrote, too: it writes UTF-16."""
    wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    at = max(0, size - _LOG_TAIL_BYTES)
    stream.seek(at + at % 2 if wide else at)
    data = stream.read(_LOG_TAIL_BYTES)
    if not wide:
        return data.decode("utf-8-sig" if at == 0 else "utf-8", errors="replace")
    kind = "utf-16-le" if start == codecs.BOM_UTF16_LE else "utf-16-be"
    return data.decode(kind, errors="replace").removeprefix("\ufeff")


def _unpacked_tail(stream: BinaryIO) -> str:
    """The end of a log that gzip has packed. Raises OSError where it is damaged, or too long."""
    stream.seek(0)
    last, before, read = b"", b"", 0
    try:
        with gzip.open(stream) as packed:
            while piece := packed.read(_LOG_TAIL_BYTES):
                before, last, read = last, piece, read + len(piece)
                if read > _MOST_BYTES:
                    raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES >> 20} MiB unpacked")
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise OSError(errno.EINVAL, "it is damaged: gzip cannot unpack it") from None
    return (before + last)[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _is_log(file: Path, start: bytes) -> bool:
    return file.suffix in _LOGS or (start[:1] not in (b"\x80", b"{", b"") and not file.suffix)


def _take_dump(file: Path, data: bytes, found: Found) -> None:
    if not data:
        return
    try:
        wire = flight_recorder.parse(data)
    except NotPlain as error:
        found.leave_out(file, f", which is no dump of torch: {error}")
        return
    rank = flight_recorder.rank_of(file.name)
    if rank is None:
        found.leave_out(file, ", whose name does not say of which rank it is")
        return
    before = found.dumps.get(rank)
    # Of the same dump as a pickle and as JSON, the pickle: it has the stacks.
    if before is None or data[:1] != b"{":
        found.dumps[rank] = file, wire


def _rank_of_log(file: Path) -> int | None:
    """The rank whose log it is by its name; torchrun's folders are named by local ranks."""
    match = _TORCHRUN.search(file.as_posix()) or _IN_NAME.search(file.name)
    return int(match[match.lastindex or 1]) if match else None
