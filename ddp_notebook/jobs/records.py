"""Prepared jobs (DDP_NOTEBOOK=1), running or ended: found by the folders that their ranks write.

A process leaves in its folder its identity, its records of collectives, a report after a long wait,
how it ended, and a summary of its training. All of it is read as a file of others: bounded, and as
far as it is sound.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddp_notebook import files
from ddp_notebook.jobs.frames import Frame, Sources
from ddp_notebook.model import (
    Activity,
    Place,
    ProcessEnd,
    RankError,
    RankReport,
    Ranks,
    RunFacts,
    Splits,
    codec,
    collective_log,
    cut,
    name_ranks,
)
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.collective_log import LogTail
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.ending import STACKS
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.views.ansi import plain

_MOST_BYTES = 1 << 20
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
        """The error that ended it, as it wrote it down; empty where it ended without one.

        None while it runs, where a signal ended it, and where the record is damaged.
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
        """The summary of its training; None where it did not write one."""
        wire = self._left("facts.json", 1 << 24)  # one number for each parameter, of a large model
        try:
            return codec.decode(RunFacts, wire.get("facts"))
        except DecodeError:
            return None

    @property
    def splits(self) -> tuple[Splits, ...]:
        """Its splits of the last all_to_alls, written before it took part; oldest first."""
        return collective_log.read_splits(
            self._bytes_of(collective_log.SPLITS, collective_log.SPLITS_FILE_BYTES)
        )

    def log(self, rank: int, last: int) -> LogTail:
        """Return its last records of collectives, as `rank`."""
        data = self._bytes_of(f"ring-{rank}", collective_log.FILE_BYTES)
        return collective_log.read(data, rank, last)

    def written(self, rank: int) -> int:
        """Return how many collectives it has recorded, as `rank`."""
        header = self._bytes_of(f"ring-{rank}", collective_log.HEADER.size)
        whole = len(header) == collective_log.HEADER.size
        return int(collective_log.HEADER.unpack(header)[2]) if whole else 0

    def last_report(self, rank: int, others_run: bool) -> RankReport:
        """Return how it ended, and what it did last, as far as it could write that.

        Of one that was ended from outside: that it waited may be why; that it was busy is not.
        """
        # A process leaves one of six traces of its end: an error in end.json; no error there; that
        # torch ended it because its parent was gone; stacks, which faulthandler writes on SIGTERM
        # and on a crash; an end.json that was cut short; or nothing, by SIGKILL and os._exit().
        last, error = self._written(rank), self.error
        if error:
            raised = _raised(error, self.about.wall_s)
            return replace(last, activity=Activity.FAILED, error=raised, run=_RUN)
        if self._left(_END, _MOST_BYTES).get("orphan") is True:
            ended = replace(last, activity=Activity.SILENT, doing=ORPHANED, inside="")
            return replace(ended, end=replace(ended.end, code=-signal.SIGINT.value))
        if error is not None:
            return replace(last, activity=Activity.IDLE, initialized=False, inside="", run=_RUN)
        code, path = self._signal_and_path()
        if code is None and not others_run and self.end_is_damaged:
            return replace(last, activity=Activity.SILENT, doing=f"it {DAMAGED}", inside="")
        if last.activity is Activity.WAITING and code not in CRASHES and (path or not others_run):
            return last  # a launcher's SIGTERM has ended it, or no rank is left
        return RankReport(rank, Activity.DEAD, path=path or last.path, end=ProcessEnd(code=code))

    def _written(self, rank: int) -> RankReport:
        """Return what it wrote after a long wait, if it issued nothing after; else nothing."""
        wire = self._left("report.json", _MOST_BYTES)
        records = self.log(rank, 1).records
        # It was written after a wait of some seconds. If more was issued since, that wait ended
        # well, and the report tells nothing of the end.
        counts, issued = wire.get("counts"), records[-1].number + 1 if records else 0
        if not isinstance(counts, list) or counts[:1] != [issued]:
            return RankReport(rank)
        try:
            return replace(codec.decode(RankReport, wire.get("report")), rank=rank)
        except DecodeError:
            return RankReport(rank)

    def _left(self, name: str, most_bytes: int) -> dict[str, Any]:
        """Return the content of a file in its folder, with texts that can be shown."""
        wire = codec.readable(job_folder.read(self.folder / name, most_bytes))
        return cast("dict[str, Any]", wire)

    def _bytes_of(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a file in its folder; nothing for a missing one, or anything else."""
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
        """Return which signal ended it, negative, and its main thread's lines, outermost first.

        Of one whose parent has not yet asked for it, the exit code. None where that is not known.
        """
        # faulthandler writes the thread that crashed first, and the others by number; which one is
        # the main thread only our own first line says.
        text = self._bytes_of(STACKS, _MOST_BYTES).decode(errors="replace")
        main, thread = "", ""
        of: dict[str, list[Frame]] = {}
        for line in text.splitlines():
            if header := _THREAD.match(line):
                thread = header[2]
                main = thread if header[1] == _MAIN else main
                of[thread] = []
            elif frame := _FRAME.fullmatch(line):
                of.get(thread, []).append(Frame(cut(frame[1], 1000), int(frame[2]), frame[3]))
        if len(of) < 2 and not any(of.values()):  # no signal had it write more than that line
            return job_folder.exit_code(self.about), None
        crash = _CRASH.search(text)
        code = -(_SIGNALS.get(crash[1], signal.SIGABRT) if crash else signal.SIGTERM).value
        return code, Sources(self.about.wall_s).path(of.get(main, ()))


def _raised(error: Mapping[str, Any], before_s: float) -> RankError:
    files = Sources(before_s)
    places = []
    frames = error.get("frames")
    for row in frames if isinstance(frames, list) else []:
        if isinstance(row, list) and len(row) == 4 and isinstance(row[1], int):
            frame = Frame(str(row[0]), row[1], str(row[2]))
            places += [replace(p, text=str(row[3])) for p in files.path((frame,))]
    return RankError(
        cut(str(error.get("type", "")), 200), cut(str(error.get("text", "")), 2000), tuple(places)
    )


# -- jobs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The prepared ranks of one job on this host, by rank."""

    processes: Mapping[int, Process]

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks whose processes run."""
        return tuple(r for r, process in self.processes.items() if process.about.alive)

    @property
    def first(self) -> About:
        """The lowest rank's description of itself."""
        return self.processes[min(self.processes)].about

    @property
    def world_size(self) -> int:
        """How many ranks there should be, as the ranks were told; at least those that are there."""
        sizes = [process.about.world_size or 0 for process in self.processes.values()]
        size = max(set(sizes), key=sizes.count)
        return min(max(size, max(self.processes) + 1), 4096)

    @property
    def absent(self) -> Ranks:
        """The ranks without a prepared process on this host."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.processes)

    @property
    def in_another_container(self) -> bool:
        """True if it runs where pids mean other processes: it cannot be asked from here."""
        known = self.processes.values()
        return any(job_folder.in_another_container(each.about, each.folder) for each in known)

    def pids(self, namespace: str | None = None) -> set[int]:
        """Return its ranks and launcher, as numbered in `namespace`; None: as where they run."""
        abouts = [process.about for process in self.processes.values()]
        abouts = [about for about in abouts if namespace in (None, about.pids)]
        return {about.pid for about in abouts} | {about.parent for about in abouts}

    @property
    def title(self) -> str:
        """Its script."""
        return plain(Path(self.first.script).name) or "python"

    @property
    def ranks_words(self) -> str:
        """``ranks 0-3 of 4``: those that are on this host, and how many there should be."""
        return f"{name_ranks(self.processes)} of {self.world_size}"


def jobs(folder: Path | None = None) -> list[Job]:
    """Return the jobs in `folder`, by default this user's on this host; the newest first."""
    # Names of scripts and folders may be in any encoding: texts that are shown are made readable.
    # The paths that are opened stay as they are.
    known = job_folder.processes(folder)
    folders = {(about.pid, about.began): folder for about, folder in known}
    found = job_folder.by_job(About(**codec.readable(asdict(told))) for told, _ in known)
    return [
        Job({rank: Process(of[rank], folders[of[rank].pid, of[rank].began]) for rank in sorted(of)})
        for of in reversed(found)
    ]


def pids(among: Sequence[Job] | None = None) -> frozenset[int]:
    """Return the processes of these jobs (None: this user's), those that ended as well."""
    here = job_folder.namespace()
    known_jobs = jobs() if among is None else among
    abouts = (process.about for job in known_jobs for process in job.processes.values())
    return frozenset(about.pid for about in abouts if about.pids == here)


def known(pid: int, among: Sequence[Job]) -> Job | None:
    """Return the job of a process, also of another container's; None where it has no record."""
    names = [(pid, job_folder.namespace())]
    with contextlib.suppress(OSError):
        names.append(processes.in_its_container(pid))
    found = (job for job in among for own, where in names if own in job.pids(where))
    return next(found, None)
