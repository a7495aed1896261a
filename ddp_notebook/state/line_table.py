"""Which ranks are paused at which line, with the source around it: as a step table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from ddp_notebook.model import (
    Frame,
    LineStopped,
    Ranks,
    StepRow,
    StepTable,
    VariableTable,
    by_value,
    name_ranks,
)

_NEXT = (
    "%ddp_step (the next line), %ddp_step --into, --out, --to LINE; to the next breakpoint or the "
    "end: %ddp_step --to end"
)
_GAP = 2
"""The most lines missing between two pieces of source that are shown as one."""


@dataclass
class StoppedFile:
    """The lines of a cell or a file around those at which ranks are paused."""

    file: str
    lines: dict[int, str] = field(default_factory=dict)
    stops: dict[int, list[LineStopped]] = field(default_factory=dict)
    """By line, the ranks that are there, in their order."""

    def ranks_at(self, line: int) -> Ranks:
        """The ranks that are paused at this line."""
        return tuple(stop.rank for stop in self.stops.get(line, ()))


def line_table(
    stops: Mapping[int, LineStopped],
    others: StepTable,
) -> StepTable:
    """The table of `stops`, and of the ranks of `others` without one."""
    issued = {rank: row.passed for row in others.rows for rank in row.ranks}
    rows = []
    names = names_of(stop.file for stop in stops.values())
    at = {r: (s.file, s.line, s.function, s.why, s.thread) for r, s in stops.items()}
    for ranks, _ in by_value(at):
        for same, passed in by_value({rank: issued.get(rank, "") for rank in ranks}):
            stop = stops[same[0]]
            rows.append(StepRow(same, passed, "paused", stop_text(stop, names[stop.file])))
    for row in others.rows:
        left = tuple(rank for rank in row.ranks if rank not in stops)
        if left:
            rows.append(replace(row, ranks=left, text=f"{row.text}{_limit(row)}"))
    title = f"Paused: {_title(stops, names)}."
    return StepTable(title, tuple(rows), next_call=_NEXT, details=_source(stops))


def _limit(row: StepRow) -> str:
    """The warning that a collective may time out while others are paused: it was issued before."""
    if not row.limit_s:
        return ""
    left_s = max(0.0, row.limit_s - row.since_s)
    left = f"{left_s / 60:.0f} min" if left_s >= 120 else f"{left_s:.0f} s"
    limit = f"{row.limit_s / 60:g} min" if row.limit_s >= 120 else f"{row.limit_s:g} s"
    return f"; its group's timeout ({limit}) ends it in {left}"


def place(file: str, line: int, name: str = "") -> str:
    """``train.py:43``, ``cell 3, line 4``; `name` is the file's where its own does not tell."""
    return f"{file}, line {line}" if _is_cell(file) else f"{name or PurePath(file).name}:{line}"


def names_of(files: Iterable[str]) -> dict[str, str]:
    """A short name for each file: its own, with its folder's if two have the same."""
    own = {file: PurePath(file) for file in files}
    names = [path.name for path in own.values()]
    return {
        file: "/".join(path.parts[-2:]) if names.count(path.name) > 1 else path.name
        for file, path in own.items()
    }


def watched(name: str, table: VariableTable) -> str:
    """``loss: 0.5 (ranks 0, 2-3), nan (rank 1)``: a line of a step table."""
    rows = [row for section in table.sections for row in section.rows]
    values = [f"{cell.text} ({name_ranks(cell.ranks)})" for row in rows for cell in row.cells]
    values += [f"{name_ranks(unread.ranks)}: {unread.why}" for unread in table.unread]
    summary = next((f"; {row.summary}" for row in rows if row.summary), "")
    return f"{name}: {', '.join(values)}{summary}"


def frames_text(
    ranks: Ranks, frames: Sequence[Frame], chosen: int, why: str = ""
) -> tuple[str, ...]:
    """The frames of paused ranks, of which `frames` has the innermost first; `chosen` is marked.

    Shown as in a traceback and in a stack tree: the innermost, number 0, is the last.
    """
    if not frames:
        return (f"{name_ranks(ranks)}: {why}",)
    lines = [f"{name_ranks(ranks)}:"]
    for number, frame in reversed(tuple(enumerate(frames))):
        function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
        mark = "→" if number == chosen else " "
        lines.append(
            f"{mark} {number:>2}  {place(frame.file, frame.line)}{function}: {frame.source}"
        )
    return tuple(lines)


def places_of(stops: Mapping[int, LineStopped]) -> dict[tuple[str, int], Ranks]:
    """The ranks at each line; the line of the most ranks first."""
    places = by_value({rank: (stop.file, stop.line) for rank, stop in stops.items()})
    return {place: ranks for ranks, place in sorted(places, key=lambda each: (-len(each[0]), each))}


def _is_cell(file: str) -> bool:
    return file.startswith("cell ")


def _title(
    stops: Mapping[int, LineStopped],
    names: Mapping[str, str],
) -> str:
    parts, before = [], ""
    for (file, line), ranks in places_of(stops).items():
        where = place(file, line, names[file])
        if file == before:
            where = f"line {line}" if _is_cell(file) else f":{line}"
        before = file
        parts.append(f"{name_ranks(ranks)} at {where}")
    return "; ".join(parts)


def stop_text(stop: LineStopped, name: str = "") -> str:
    """``cell 1, line 4, in f: a = i * 2 (breakpoint 1)``; `name` as of `place`."""
    where = place(stop.file, stop.line, name)
    if stop.function not in ("", "<module>"):
        where += f", in {stop.function}"
    if stop.thread:
        where += f", thread {stop.thread}"
    index = stop.line - stop.first
    line = stop.source[index].strip() if 0 <= index < len(stop.source) else ""
    why = f" ({stop.why})" if stop.why and stop.why not in line else ""
    return f"{where}: {line}{why}" if line else f"{where}{why}"


def stopped_files(stops: Mapping[int, LineStopped]) -> list[StoppedFile]:
    """The known lines around each stop, file by file."""
    files: dict[str, StoppedFile] = {}
    for _, stop in sorted(stops.items()):
        file = files.setdefault(stop.file, StoppedFile(stop.file))
        file.lines.update({stop.first + i: text for i, text in enumerate(stop.source)})
        file.stops.setdefault(stop.line, []).append(stop)
    return list(files.values())


def _source(stops: Mapping[int, LineStopped]) -> tuple[str, ...]:
    """The lines around each stop, and beside them which ranks are there."""
    files = stopped_files(stops)
    shown: list[str] = []
    for file in files:
        if len(files) > 1:
            shown.append(f"{file.file}:")
        shown += _marked(file)
    return tuple(shown)


def _marked(file: StoppedFile) -> list[str]:
    shown: list[str] = []
    width = len(str(max(file.lines, default=0)))
    longest = max((len(file.lines.get(line, "").rstrip()) for line in file.stops), default=0)
    last = 0
    for number, line in sorted(file.lines.items()):
        if last and number - last > _GAP:
            shown.append(f"  {'…':>{width}}")
        last = number
        text = line.rstrip()
        if ranks := file.ranks_at(number):
            shown.append(f"→ {number:>{width}}  {text:<{longest}}   ← {name_ranks(ranks)}")
        else:
            shown.append(f"  {number:>{width}}  {text}".rstrip())
    return shown
