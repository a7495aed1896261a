"""A run read from a file: status, why and where as they were, without any rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_notebook import files
from ddp_notebook.archive.format import FORMAT, KEY, VERSION, SavedRun, decode_run
from ddp_notebook.archive.trace import trace
from ddp_notebook.diagnosis import diagnose_run, failures
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import (
    Board,
    Case,
    Collectives,
    Diagnosis,
    Place,
    Status,
    codec,
    counted,
    format_bytes,
    name_ranks,
)
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.model.fold import state_at
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.board_rows import BoardFacts, board, board_of
from ddp_notebook.views.output_log import OutputLog

LARGEST_FILE = 64 << 20
"""Bytes; a full record of sixteen ranks takes less than half of it."""


class Replay:
    """A saved run, to look at. `saved` is all that the file held."""

    def __init__(self, saved: SavedRun, name: str = "") -> None:
        self.saved = saved
        self.name = name
        """The file's, without its folder."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Replay:
        """Return the run in the file at `path`. Raises UsageMistake where it holds no run."""
        file = named_file(path)
        try:
            with files.opened(file) as stream:
                size_bytes = os.fstat(stream.fileno()).st_size
                text = stream.read(LARGEST_FILE)
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageMistake(f"{file} cannot be read: {why}. Type: %ddp_replay FILE") from None
        if size_bytes > LARGEST_FILE:
            raise UsageMistake(
                f"{file} is too large: it has {format_bytes(size_bytes)}, and a saved run has at "
                f"most {format_bytes(LARGEST_FILE)}. Save the run again: %ddp_save FILE"
            )
        return cls(_decoded(file, text), file.name)

    @classmethod
    def of_text(cls, text: bytes, name: str) -> Replay:
        """Return the run in what `ddp-notebook save JOB -` wrote. Raises UsageMistake as `read`."""
        return cls(_decoded(Path(name), text), name)

    # -- the verbs ---------------------------------------------------------------------

    def status(self) -> Board:
        """Return the board as it was when the run was saved."""
        return board_of(self.facts())

    def facts(self, diagnosis: Diagnosis | None = None) -> BoardFacts:
        """Return what a board shows of the moment when the run was saved."""
        saved, running = self.saved, self.saved.snapshot.with_status(Status.RUNNING)
        members = (*running, *saved.left_ns)
        return BoardFacts(saved.snapshot, saved.collectives, running, diagnosis, members=members)

    def at(self, seconds: float) -> Board:
        """Return the board as it was `seconds` after the first thing that was kept.

        Less than 0 counts back from the end. What is beyond either is that end.
        """
        began_ns, end_ns = self.saved.began_ns, self.saved.snapshot.taken_ns
        longest_s = (end_ns - began_ns) / 1e9
        if not -longest_s < seconds < longest_s:
            seconds = 0 if seconds < 0 else longest_s
        at_ns = (end_ns if seconds < 0 else began_ns) + int(seconds * 1e9)
        if at_ns >= end_ns:
            return self.status()
        at_ns = max(began_ns, at_ns)
        return board(state_at(self.saved.start, self.saved.moments, at_ns))

    def why(self) -> Diagnosis:
        """Return what was wrong, by the rules of this version, from the reports that were saved.

        `saved.diagnosis` is what was found then; of a job that no notebook started it is the
        answer. Raises UsageMistake when nothing was known.
        """
        case = self._case("%ddp_why")
        if self.saved.stands and self.saved.diagnosis is not None:
            return self.saved.diagnosis
        diagnosis = diagnose_run(case)
        if diagnosis.wrong:
            return diagnosis
        own = failures.raised_in(case)
        return replace(diagnosis, findings=(*own, *diagnosis.findings))

    def where(self) -> Mapping[int, tuple[Place, ...]]:
        """Return where each rank was in the user's code, its outermost line first.

        Ranks that ran none of it are left out. Raises UsageMistake when none is known to have.
        """
        # The evidence has the user's lines alone; whole stacks would be saved beside it.
        paths = {e.rank: e.path for e in self._case("%ddp_where").ranks if e.path}
        if not paths:
            raise UsageMistake("No rank was running your code when the run was saved.")
        return paths

    def output(self, rank: int) -> str:
        """Return what `rank` wrote, as far as it was kept. Raises UsageMistake when none was."""
        log = OutputLog()
        for output in self.saved.outputs:
            if output.rank == rank:
                log.add(output)
        text = "".join(item.text for item in log.items())
        if not text:
            raise UsageMistake(
                f"{self.name} has no output of rank {rank}. Save the run with its output: "
                "%ddp_save FILE --output"
            )
        return text

    @property
    def collectives(self) -> Collectives:
        """The collectives of the last run."""
        return self.saved.collectives

    @property
    def duration_s(self) -> float:
        """Seconds from the first thing that was kept to the end."""
        return self.saved.duration_s

    def trace(self) -> dict[str, Any]:
        """The run as a trace, which `json.dump` writes for Perfetto. The file itself is one too."""
        return trace(self.saved)

    # -- in words ----------------------------------------------------------------------

    @property
    def about(self) -> str:
        """A line or two on the run, and on what is missing in it."""
        saved = self.saved
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.wall_ns / 1e9))
        with_ = ", ".join(f"{name} {text}" for name, text in saved.versions.items() if text)
        ranks = counted(saved.world_size, "rank")
        about = f"{self.name}: {ranks}, {saved.duration_s:.1f} s, saved {when} with {with_}"
        lines = [plain(about)]  # it goes to a terminal as it is
        return "\n".join([*lines, *what_is_missing(saved)])

    def __repr__(self) -> str:
        return f"<Replay of {self.about.splitlines()[0]}>"

    def _case(self, verb: str) -> Case:
        case = self.saved.case
        if case is None:
            raise UsageMistake(
                f"{verb} has no facts: no rank was left to ask when {self.name} was saved."
            )
        return replace(case)


def is_saved_run(file: Path) -> bool:
    """Return True of a file that begins as those do that `%ddp_save` writes."""
    try:
        with files.opened(file) as stream:
            return stream.read(len(_BEGINS)) == _BEGINS
    except OSError:
        return False


_BEGINS = b'{"traceEvents"'


def what_is_missing(saved: SavedRun) -> list[str]:
    """Return what was too much to keep, or is not known any more, a line each."""
    dropped = saved.dropped
    lines = []
    if dropped.events:
        lines.append(f"not in it: the {dropped.events:,} oldest events")
    if dropped.outputs:
        lines.append(f"not in it: the {dropped.outputs:,} oldest pieces of output")
    if dropped.collectives:
        count = sum(dropped.collectives.values())
        ranks = name_ranks(dropped.collectives)
        lines.append(f"not in it: the {count:,} oldest collectives of {ranks}")
    if not any(saved.collectives.of.values()):
        lines.append(
            "not in it: collectives. A file has those of the last cell or script, if it issued "
            "any; new processes, as of %ddp_restart, know of none"
        )
    return lines


def _decoded(file: Path, text: bytes) -> SavedRun:
    """Return the run in the text of a file. Raises UsageMistake."""
    try:
        whole = codec.loads(text, of_others=True)
    except ValueError:
        ours = f'"{KEY}"'.encode() in text or text.startswith(_BEGINS)
        if ours:
            raise _damaged(file, "it is not complete JSON; was all of it copied?") from None
        raise _foreign(file) from None
    wire = whole.get(KEY) if isinstance(whole, dict) else None
    if not isinstance(wire, dict) or wire.get("format") != FORMAT:
        raise _foreign(file)
    # Before the content is decoded: a newer version may have fields that this one would call
    # damaged.
    version = wire.get("version")
    if type(version) is not int or version < 1:
        raise _damaged(file, "it has no version of its format")
    if version > VERSION:
        raise UsageMistake(
            f"{file} was written by a newer ddp_notebook: its format is {version}, and this "
            f"one reads up to {VERSION}. Bring it up to date: pip install -U ddp-notebook"
        )
    try:
        return decode_run(wire)
    except DecodeError as error:
        raise _damaged(file, str(error)) from None


def _foreign(file: Path) -> UsageMistake:
    return UsageMistake(f"{file} is no run of ddp_notebook. Runs are written by %ddp_save FILE")


def _damaged(file: Path, why: str) -> UsageMistake:
    return UsageMistake(f"{file} is damaged, and cannot be replayed: {why}.")
