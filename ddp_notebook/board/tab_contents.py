"""What the tabs below the ranks show, as JSON of bounded size: stacks, variables, output, runs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_notebook.model import (
    Branch,
    Frame,
    LineStopped,
    OutputGroup,
    OutputKind,
    Ranks,
    StackTree,
    VariableSection,
    VariableTable,
    format_ranks,
    name_ranks,
)
from ddp_notebook.session.runs.past import PastRun
from ddp_notebook.session.tools.breakpoints import BreakpointRow
from ddp_notebook.state.line_table import StoppedFile, stop_text, stopped_files
from ddp_notebook.state.output import of_any_rank
from ddp_notebook.views import output, stacks
from ddp_notebook.views.ansi import plain, preformatted, strip_ansi
from ddp_notebook.views.variables import unread_words

_MOST_CLASSES = 32
_MOST_CHARACTERS = 64_000
"""Of the output of all ranks; shared among those that wrote something different."""
_LONGEST = 300
_AROUND = 3
_NEAR = 40
"""Lines of code before and after one at which ranks are paused."""
_STREAMS = {OutputKind.STDERR: "err", OutputKind.ERROR: "raised"}
_CELL = re.compile(r"cell (\d+)")


# -- stacks --------------------------------------------------------------------------------


def stack_json(tree: StackTree, sources: Mapping[str, str]) -> dict[str, Any]:
    """The stacks, equal ones once; `sources` is the code of the run by the names of its files."""
    names = stacks.file_names(tree)
    by_frames: dict[tuple[tuple[Frame, ...], str], list[tuple[Ranks, str]]] = {}
    for frames, leaf in _leaves(tree.branches, ()):
        state = plain(stacks.state_words(leaf.doing, frames)) if leaf.doing else ""
        by_frames.setdefault((frames, of_any_rank(state, leaf.ranks)), []).append(
            (leaf.ranks, state)
        )
    classes = [
        {
            "ranks": format_ranks(rank for ranks, _ in parts for rank in ranks),
            "state": parts[0][1] if len(parts) == 1 else state,
            "frames": [_frame(frame, names, sources) for frame in frames],
        }
        for (frames, state), parts in by_frames.items()
    ]
    return {"classes": classes[:_MOST_CLASSES]}


def _leaves(
    branches: Sequence[Branch], above: tuple[Frame, ...]
) -> Iterator[tuple[tuple[Frame, ...], Branch]]:
    """Each end of the tree, with all frames on the way to it."""
    for branch in branches:
        frames = (*above, *branch.frames)
        if branch.doing is not None:
            yield frames, branch
        else:
            yield from _leaves(branch.children, frames)


def _frame(frame: Frame, names: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, Any]:
    cell = _CELL.fullmatch(frame.file)
    name = plain(names.get(frame.file, frame.file))
    return {
        "at": f"{name}:{frame.line}" if frame.file else "",
        "file": "" if cell else plain(frame.file),
        "cell": int(cell[1]) if cell else 0,
        "line": frame.line,
        "function": stacks.function_words(frame) if frame.file else plain(frame.function),
        "source": plain(frame.source),
        "library": frame.library,
        "around": [] if frame.library else _around(sources.get(name, ""), frame.line),
    }


def _around(source: str, line: int) -> list[list[Any]]:
    """The lines of `source` around one, numbered; none where it has no such line."""
    lines = source.splitlines()
    if not 0 < line <= len(lines):
        return []
    first, last = max(1, line - _AROUND), min(len(lines), line + _AROUND)
    return [[n, preformatted(lines[n - 1])[0][:_LONGEST]] for n in range(first, last + 1)]


# -- the lines at which ranks are paused ------------------------------------------------------


def source_json(
    title: str,
    stops: Mapping[int, LineStopped],
    texts: Mapping[str, str],
    breakpoints: Sequence[BreakpointRow],
) -> dict[str, Any]:
    """The code around the lines at which ranks are paused, file by file, and its breakpoints.

    `texts` is the code by file, as far as it can be read here.
    """
    files = sorted(stopped_files(stops), key=lambda each: -sum(map(len, each.stops.values())))
    shown = [_file(file, texts.get(file.file, ""), breakpoints) for file in files[:6]]
    return {"title": plain(title), "files": shown}


def _file(stopped: StoppedFile, text: str, breakpoints: Sequence[BreakpointRow]) -> dict[str, Any]:
    file, is_cell = stopped.file, bool(_CELL.fullmatch(stopped.file))
    real = file if is_cell else os.path.realpath(file)
    typed = file if is_cell else _typed(Path(real))
    lines = _lines_around(stopped, text.splitlines())
    return {
        "name": plain(file if is_cell else Path(file).name),
        "path": "" if is_cell else plain(file),
        "break": f"%ddp_break {shlex.quote(typed)}:" if is_cell or Path(real).is_file() else "",
        "lines": [[n, preformatted(line)[0][:_LONGEST]] for n, line in sorted(lines.items())],
        "at": [_at(stopped, line) for line in stopped.stops],
        "breakpoints": [
            {"line": row.place[1], "number": row.breakpoint.number, "text": plain(row.text)}
            | {"off": not row.enabled}
            for row in breakpoints
            if row.place[0] in (file, real)
        ],
    }


def _typed(path: Path) -> str:
    """A path as a person types it: from the working directory, where it is in that."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd().resolve()))
    return str(path)


def _lines_around(stopped: StoppedFile, text: Sequence[str]) -> dict[int, str]:
    """The code near the stops; what the ranks told alone, where the file is another one now."""
    lines = dict(stopped.lines)
    if all(n <= len(text) and text[n - 1].startswith(line) for n, line in lines.items() if line):
        for line in stopped.stops:
            first, last = max(1, line - _NEAR), min(len(text), line + _NEAR)
            lines.update((n, text[n - 1]) for n in range(first, last + 1))
    return lines


def _at(stopped: StoppedFile, line: int) -> dict[str, Any]:
    """Which ranks are at a line, and why, if it was no step."""
    why = dict.fromkeys(stop_text(stop) for stop in stopped.stops[line])
    return {
        "line": line,
        "ranks": format_ranks(stopped.ranks_at(line)),
        "text": plain("; ".join(why)),
    }


# -- variables -----------------------------------------------------------------------------


def variables_json(table: VariableTable) -> dict[str, Any]:
    """The table of variables."""
    return {
        "world_size": table.world_size,
        "sections": [_section(section) for section in table.sections],
        "notes": [unread_words(unread) for unread in table.unread],
    }


def _section(section: VariableSection) -> dict[str, Any]:
    rows = [
        {
            "name": plain(row.name),
            "differs": row.differs,
            "summary": row.summary,
            "cells": [
                {
                    "ranks": format_ranks(cell.ranks),
                    "text": plain(cell.text),
                    "note": plain(cell.note),
                    "odd": cell.odd,
                    "absent": cell.absent,
                }
                for cell in row.cells
            ],
        }
        for row in section.rows
    ]
    return {
        "title": plain(section.title),
        "ranks": format_ranks(section.ranks),
        "rows": rows,
        "left_out": section.left_out,
    }


# -- what ranks wrote ------------------------------------------------------------------------


def console_json(
    title: str, groups: Sequence[OutputGroup], withheld_bytes: Mapping[int, int]
) -> dict[str, Any]:
    """The end of what ranks wrote in a run, once for ranks that wrote the same."""
    share = max(2_000, _MOST_CHARACTERS // max(1, len(groups)))
    shown = [_console(group, share) for group in groups[:_MOST_CLASSES]]
    more = [
        f"{name_ranks((rank,))} wrote more than is shown. All of it: %ddp_output --ranks {rank}"
        for rank in sorted(withheld_bytes)
    ]
    return {"title": plain(title), "groups": shown, "notes": more[:_MOST_CLASSES]}


def _console(group: OutputGroup, share: int) -> dict[str, Any]:
    lines, left_out = [], 0
    for item in group.items:
        text = strip_ansi(output.item_text(item))
        left_out += text[:-_MOST_CHARACTERS].count("\n")
        stream = _STREAMS.get(item.what, "out")
        shown = preformatted(text[-_MOST_CHARACTERS:]) if text else []
        lines += [[stream, line[:_LONGEST]] for line in shown]
    last, room = len(lines), share
    while last and len(lines) - last < 400 and (room := room - len(lines[last - 1][1])) > 0:
        last -= 1
    return {"ranks": format_ranks(group.ranks), "lines": lines[last:], "left_out": left_out + last}


# -- runs ----------------------------------------------------------------------------------


def history_json(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """The runs, the newest first."""
    return [_run(run) for run in reversed(runs)]


def _run(run: PastRun) -> dict[str, Any]:
    exits = [f"{name_ranks(ranks)} {word}" for word, ranks in run.exits.items()]
    if run.pending:
        exits.append(f"{name_ranks(run.pending)} in it")
    if tuple(run.exits.items()) == (("finished", run.ranks),):
        exits = ["finished"]
    return {
        "number": run.number,
        "title": plain(run.title),
        "ranks": format_ranks(run.ranks),
        "began": time.strftime("%H:%M:%S", time.localtime(run.began)),
        "us": 0 if run.pending else round(1e6 * run.duration_s),
        "how": plain(", ".join(exits)),
        "ok": set(run.exits) <= {"finished"} and not run.headline,
        "running": bool(run.pending),
        "headline": plain(run.headline)[:_LONGEST],
        "category": run.category,
    }


def without_age(run: PastRun) -> PastRun:
    """The same for a run that goes on, however long it does."""
    return replace(run, duration_s=0.0) if run.pending else run
