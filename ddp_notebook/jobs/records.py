"""Reads what a prepared process left in its folder: its end, its last state, its training."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddp_notebook import files
from ddp_notebook.evidence.frames import Frame, Sources
from ddp_notebook.model import (
    Activity,
    Place,
    RankReport,
    RunFacts,
    Splits,
    codec,
    collective_log,
    cut,
)
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.collective_log import LogTail
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.ending import STACKS
from ddp_notebook.rank.prepared.job_folder import About

_MOST_BYTES = 1 << 20
_MOST_FACTS_BYTES = 1 << 24
_RUN = 1
_MAIN = "main thread"
_THREAD = re.compile(rf"({_MAIN}|Current thread|Thread) (0x[0-9a-f]+)")
_CRASH = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""As faulthandler names them. It also writes of SIGABRT, which C++ raises on an error: that may be
another rank's, so it does not prove who was first."""
ORPHANED = "torch ended it (SIGINT), for the process that had started it was gone"
_END = "end.json"
DAMAGED = f"ended, and how is not known: {_END} in its record is damaged"
CRASHES = tuple(-number.value for number in _SIGNALS.values())
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Process:
    """A prepared process, and the folder in which it leaves what others read."""

    about: About
    folder: Path

    @property
    def error(self) -> Mapping[str, Any] | None:
        """What ended it, as it wrote it down; empty of one that ended without an error.

        None of one that was ended, or runs, and where it is damaged.
        """
        error = self._left(_END, _MOST_BYTES).get("error", False)
        return error if isinstance(error, dict) else {} if error is None else None

    @property
    def end_is_damaged(self) -> bool:
        """True where it began to write how it ended, and what stands there cannot be read."""
        end = self.folder / _END
        return self.error is None and any(map(files.exists, (end, job_folder.unfinished(end))))

    @property
    def facts(self) -> RunFacts | None:
        """What it trained; None where it did not write that."""
        wire = self._left("facts.json", _MOST_FACTS_BYTES)
        try:
            return codec.decode(RunFacts, wire.get("facts"))
        except DecodeError:
            return None

    @property
    def splits(self) -> tuple[Splits, ...]:
        """What it brought to its last all_to_alls, written before it took part; oldest first."""
        return collective_log.read_splits(
            self._bytes_of(collective_log.SPLITS, collective_log.SPLITS_FILE_BYTES)
        )

    def log(self, rank: int, last: int) -> LogTail:
        """Its last records of collectives, as `rank`."""
        data = self._bytes_of(f"ring-{rank}", collective_log.FILE_BYTES)
        return collective_log.read(data, rank, last)

    def written(self, rank: int) -> int:
        """How many collectives it has recorded, as `rank`."""
        header = self._bytes_of(f"ring-{rank}", collective_log.HEADER.size)
        whole = len(header) == collective_log.HEADER.size
        return int(collective_log.HEADER.unpack(header)[2]) if whole else 0

    def last_report(self, rank: int, others_run: bool) -> RankReport:
        """How it ended, and what it did last, as far as it could write that.

        Of one that was ended from outside: that it waited may be why; that it was busy is not.
        """
        last, error = self._written(rank), self.error
        if error:
            return self._failed(last, error)
        if error is not None and not self._orphan:
            return replace(last, activity=Activity.IDLE, initialized=False, inside="", run=_RUN)
        if self._orphan:
            ended = replace(last, activity=Activity.SILENT, doing=ORPHANED, inside="")
            return replace(ended, exit_code=-signal.SIGINT.value)
        code, path = self._signal_and_path()
        if code is None and not others_run and self.end_is_damaged:
            return replace(last, activity=Activity.SILENT, doing=f"it {DAMAGED}", inside="")
        if last.activity is Activity.WAITING and code not in CRASHES and (path or not others_run):
            return last  # a launcher's SIGTERM has ended it, or no rank is left
        return RankReport(rank, Activity.DEAD, path=path or last.path, exit_code=code)

    def _failed(self, last: RankReport, error: Mapping[str, Any]) -> RankReport:
        return replace(last, activity=Activity.FAILED, **_raised(error, self.about.wall_s))

    @property
    def _orphan(self) -> bool:
        """True of a process that torch ended because the process that had started it was gone."""
        return self._left(_END, _MOST_BYTES).get("orphan") is True

    def _written(self, rank: int) -> RankReport:
        """What it wrote when it had long waited, if it issued nothing after; else nothing."""
        wire = self._left("report.json", _MOST_BYTES)
        records = self.log(rank, 1).records
        counts, issued = wire.get("counts"), records[-1].number + 1 if records else 0
        if not isinstance(counts, list) or counts[:1] != [issued]:
            return RankReport(rank)
        try:
            return replace(codec.decode(RankReport, wire.get("report")), rank=rank)
        except DecodeError:
            return RankReport(rank)

    def _left(self, name: str, most_bytes: int) -> dict[str, Any]:
        """What a file in its folder says, with texts that can be shown."""
        wire = codec.readable(job_folder.read(self.folder / name, most_bytes))
        return cast("dict[str, Any]", wire)

    def _bytes_of(self, name: str, most_bytes: int) -> bytes:
        """What is in a file in its folder; nothing where there is none, or what is no file."""
        try:
            with files.opened(self.folder / name) as stream:
                return stream.read(most_bytes)
        except OSError:
            return b""

    @property
    def signalled_s(self) -> float:
        """When a signal had it write its stacks, since 1970; 0 where none did."""
        try:
            return (self.folder / STACKS).stat().st_mtime
        except OSError:
            return 0.0

    def _signal_and_path(self) -> tuple[int | None, tuple[Place, ...] | None]:
        """Which signal ended it, negative, and where its main thread was, the outermost line first.

        Of one whose parent has not yet asked for it, the exit code. None where that is not known.
        """
        text = self._bytes_of(STACKS, _MOST_BYTES).decode(errors="replace")
        frames = _frames_of_main(text)
        if frames is None:
            return job_folder.exit_code(self.about), None
        crash = _CRASH.search(text)
        code = -(_SIGNALS.get(crash[1], signal.SIGABRT) if crash else signal.SIGTERM).value
        return code, Sources(self.about.wall_s).path(frames)


def _frames_of_main(text: str) -> tuple[Frame, ...] | None:
    """The frames of the main thread, which the first line names; the innermost first.

    None where only that line was written.
    """
    main, thread = "", ""
    frames: dict[str, list[Frame]] = {}
    for line in text.splitlines():
        if header := _THREAD.match(line):
            thread = header[2]
            main = thread if header[1] == _MAIN else main
            frames[thread] = []
        elif frame := _FRAME.fullmatch(line):
            frames.get(thread, []).append(Frame(cut(frame[1], 1000), int(frame[2]), frame[3]))
    return tuple(frames.get(main, ())) if len(frames) > 1 or any(frames.values()) else None


def _raised(error: Mapping[str, Any], before_s: float) -> dict[str, Any]:
    files = Sources(before_s)
    places = []
    frames = error.get("frames")
    for row in frames if isinstance(frames, list) else []:
        if isinstance(row, list) and len(row) == 4 and isinstance(row[1], int):
            frame = Frame(str(row[0]), row[1], str(row[2]))
            places += [replace(p, text=str(row[3])) for p in files.path((frame,))]
    return {
        "error_type": cut(str(error.get("type", "")), 200),
        "error_text": cut(str(error.get("text", "")), 2000),
        "error_at": tuple(places),
        "run": _RUN,
    }
