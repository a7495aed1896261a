"""What the tabs below the ranks show, as JSON of bounded size: stacks, variables, output, runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.model import (
    Branch,
    Frame,
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
from ddp_notebook.views import output, stacks
from ddp_notebook.views.ansi import plain, preformatted, strip_ansi
from ddp_notebook.views.variables import unread_words

_MOST_CLASSES = 32
_MOST_LINES = 400
_MOST_CHARACTERS = 64_000
"""Of the output of all ranks; shared among those that wrote something different."""
_LEAST_CHARACTERS = 2_000
_LONGEST = 300
_AROUND = 3
_STREAMS = {OutputKind.STDERR: "err", OutputKind.ERROR: "raised"}
_CELL = re.compile(r"cell (\d+)")


# -- stacks --------------------------------------------------------------------------------


def stack_json(tree: StackTree, sources: Mapping[str, str]) -> dict[str, Any]:
    """The stacks, equal ones once; `sources` is the code of the run by the names of its files."""
    names = stacks.file_names(tree)
    alike: dict[tuple[tuple[Frame, ...], str], list[tuple[Ranks, str]]] = {}
    for frames, leaf in _leaves(tree.branches, ()):
        state = plain(stacks.state_words(leaf.doing, frames)) if leaf.doing else ""
        alike.setdefault((frames, _of_any_rank(state, leaf.ranks)), []).append((leaf.ranks, state))
    classes = [
        {
            "ranks": format_ranks(rank for ranks, _ in parts for rank in ranks),
            "state": parts[0][1] if len(parts) == 1 else state,
            "frames": [_frame(frame, names, sources) for frame in frames],
        }
        for (frames, state), parts in alike.items()
    ]
    return {"classes": classes[:_MOST_CLASSES]}


def _of_any_rank(text: str, ranks: Ranks) -> str:
    """What one rank says without its own number, in which alone the texts of several may differ."""
    return re.sub(rf"\b([Rr]ank) {ranks[0]}\b", r"\1 N", text) if len(ranks) == 1 else text


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
    share = max(_LEAST_CHARACTERS, _MOST_CHARACTERS // max(1, len(groups)))
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
    while last and len(lines) - last < _MOST_LINES and (room := room - len(lines[last - 1][1])) > 0:
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
