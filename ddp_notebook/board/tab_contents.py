"""The tabs below the ranks, as JSON of bounded size: stacks, variables, output, runs.

`TabFeed` fills those that a page has open, and asks the ranks when something has changed. Nothing
is asked for other tabs, nor while a benchmark runs: the answers would be measured too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPError
from ddp_notebook.model import (
    Branch,
    Frame,
    LineStopped,
    OutputGroup,
    OutputKind,
    Ranks,
    StackTree,
    VariableTable,
    format_ranks,
    name_ranks,
)
from ddp_notebook.session.runs.registry import PastRun
from ddp_notebook.session.tools.breakpoints import BreakpointRow
from ddp_notebook.views import output, stacks
from ddp_notebook.views.ansi import plain, preformatted, strip_ansi
from ddp_notebook.views.output_log import of_any_rank
from ddp_notebook.views.stack_tree import lines_around
from ddp_notebook.views.step_rows import StoppedFile, stop_text, stopped_files
from ddp_notebook.views.variables import unread_words

if TYPE_CHECKING:
    from ddp_notebook.session import Session

_MOST_CLASSES = 32
_MOST_CHARACTERS = 64_000
"""The output of all ranks; shared among those that wrote something different."""
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
        "at": f"{name}, line {frame.line}" if frame.file else "",
        "file": "" if cell else plain(frame.file),
        "cell": int(cell[1]) if cell else 0,
        "line": frame.line,
        "function": stacks.function_words(frame) if frame.file else plain(frame.function),
        "source": plain(frame.source),
        "library": frame.library,
        "around": []
        if frame.library
        else _code(lines_around(sources.get(name, ""), frame.line, _AROUND)),
    }


def _code(lines: Iterable[tuple[int, str]]) -> list[list[Any]]:
    """Numbered lines, their indentation kept."""
    return [[number, preformatted(line)[0][:_LONGEST]] for number, line in lines]


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
    shown = []
    for stopped in files[:6]:
        file, is_cell = stopped.file, bool(_CELL.fullmatch(stopped.file))
        # A breakpoint may have been set by another name of the same file, through a link.
        real = typed = file if is_cell else os.path.realpath(file)
        # As a person types it: from the working directory, where it is in that.
        with contextlib.suppress(ValueError, OSError):
            typed = str(Path(real).relative_to(Path.cwd().resolve()))
        lines = _lines_around(stopped, texts.get(file, ""))
        is_found = is_cell or Path(real).is_file()
        made = {
            "name": plain(file if is_cell else Path(file).name),
            "path": "" if is_cell else plain(file),
            "break": f"%ddp_break {shlex.quote(typed)}:" if is_found else "",
            "lines": _code(sorted(lines.items())),
            "at": [
                {
                    "line": line,
                    "ranks": format_ranks(stopped.ranks_at(line)),
                    # Why they are there, if it was no step.
                    "text": plain("; ".join(dict.fromkeys(map(stop_text, stopped_there)))),
                }
                for line, stopped_there in stopped.stops.items()
            ],
            "breakpoints": [
                {"line": row.place[1], "number": row.breakpoint.number, "text": plain(row.text)}
                | {"off": not row.enabled}
                for row in breakpoints
                if row.place[0] in (file, real)
            ],
        }
        shown.append(made)
    listed = [
        {"number": row.breakpoint.number, "text": plain(row.text), "off": not row.enabled}
        for row in breakpoints
    ]
    return {"title": plain(title), "files": shown, "breakpoints": listed}


def _lines_around(stopped: StoppedFile, text: str) -> dict[int, str]:
    """The code near the stops; what the ranks told alone, where the file is another one now."""
    lines, now = dict(stopped.lines), text.splitlines()
    if all(n <= len(now) and now[n - 1].startswith(line) for n, line in lines.items() if line):
        for line in stopped.stops:
            lines.update(lines_around(text, line, _NEAR))
    return lines


# -- variables -----------------------------------------------------------------------------


def variables_json(table: VariableTable) -> dict[str, Any]:
    """The table of variables."""
    sections = [
        {
            "title": plain(section.title),
            "ranks": format_ranks(section.ranks),
            "rows": [
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
            ],
            "left_out": section.left_out,
        }
        for section in table.sections
    ]
    notes = [unread_words(unread) for unread in table.unread]
    return {"world_size": table.world_size, "sections": sections, "notes": notes}


# -- what ranks wrote ------------------------------------------------------------------------


def console_json(
    title: str, groups: Sequence[OutputGroup], withheld_bytes: Mapping[int, int]
) -> dict[str, Any]:
    """The end of what ranks wrote in a run, once for ranks that wrote the same."""
    share = max(2_000, _MOST_CHARACTERS // max(1, len(groups)))
    shown = []
    for group in groups[:_MOST_CLASSES]:
        lines, left_out = [], 0
        for item in group.items:
            text = strip_ansi(output.item_text(item))
            left_out += text[:-_MOST_CHARACTERS].count("\n")
            stream = _STREAMS.get(item.what, "out")
            own = preformatted(text[-_MOST_CHARACTERS:]) if text else []
            lines += [[stream, line[:_LONGEST]] for line in own]
        last, room = len(lines), share
        while last and len(lines) - last < 400 and (room := room - len(lines[last - 1][1])) > 0:
            last -= 1
        ranks, left_out = format_ranks(group.ranks), left_out + last
        shown.append({"ranks": ranks, "lines": lines[last:], "left_out": left_out})
    more = [
        f"{name_ranks((rank,))} wrote more than is shown. All of it: %ddp_output --ranks {rank}"
        for rank in sorted(withheld_bytes)
    ]
    return {"title": plain(title), "groups": shown, "notes": more[:_MOST_CLASSES]}


# -- runs ----------------------------------------------------------------------------------


def history_json(runs: Sequence[PastRun]) -> list[dict[str, Any]]:
    """The runs, the newest first."""
    shown = []
    for run in reversed(runs):
        exits = [f"{name_ranks(ranks)} {word}" for word, ranks in run.exits.items()]
        if run.pending:
            exits.append(f"{name_ranks(run.pending)} in it")
        if tuple(run.exits.items()) == (("finished", run.ranks),):
            exits = ["finished"]
        shown.append(
            {
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
        )
    return shown


# -- when they are asked for -------------------------------------------------------------


_CONTENTS = {
    "problem": (),
    "code": ("stack",),
    "variables": ("variables",),
    "output": ("console",),
    "history": ("history",),
}
"""The content of each tab of the page."""
_ASKING = ("stack", "variables")
"""The contents for which the ranks are asked."""
_SETTLED_S = 0.25
"""Ranks are asked when nothing has changed for so long: those that train on are left alone."""
_WRITTEN_S = 0.5
"""Between two looks at what ranks wrote."""


class TabFeed:
    """The tabs that pages watch, and what was sent of them. `tell` sends values to all pages."""

    def __init__(self, session: Session, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._session = session
        self._tell = tell
        self._lock = threading.Lock()
        self._watching: dict[str, tuple[str, float]] = {}
        """The open tab of each page, and when the page last sent a message."""
        self._told: dict[str, object] = {}
        """A key of what was last sent for each tab."""
        self._asked: set[str] = set()
        """Tabs for which the ranks are being asked."""
        self._key: object = None
        self._changed_s = 0.0
        self._looked_s = 0.0

    def message(self, content: Mapping[str, Any], view: str) -> None:
        """A page sent a message (any thread): it is there, and may have another tab open now."""
        tab, known = content.get("tab"), self._watching.get(view, ("", 0.0))[0]
        with self._lock:
            if content.get("kind") == "hello":  # it has nothing of what was told before
                self._told.clear()
            elif content.get("kind") == "watch":
                self._watching.pop(view, None)
                known = tab if tab in _CONTENTS else ""
                for each in ("variables", *_CONTENTS.get(known, ())):
                    self._told.pop(each, None)
            if known:
                self._watching[view] = (known, time.monotonic())
            while len(self._watching) > 16:
                del self._watching[next(iter(self._watching))]

    def turn(self, key: object) -> None:
        """Tell what is new. `key` is another one when a board would show something else."""
        now_s = time.monotonic()
        key = (key, self._session.findings.begun)
        if key != self._key:
            self._key, self._changed_s = key, now_s
        run = self._session.runs.current
        with self._lock:
            open_tabs = self._watching.values()
            # A page reports every minute; one that is silent for three was closed.
            tabs = {tab for tab, at_s in open_tabs if now_s - at_s < 180.0}
        wanted = {content for tab in tabs for content in _CONTENTS[tab]}
        if "code" in tabs and self._session.runs.stops:
            wanted.add("variables")  # beside the lines at which ranks are paused
        if "history" in wanted:
            runs = self._session.runs.past.runs
            # The age of a run that goes on is not news.
            ageless = tuple(replace(r, duration_s=0.0) if r.pending else r for r in runs)
            if self._told.get("history") != ageless:
                self._told["history"] = ageless
                self._tell({"history": history_json(runs)})
        if "console" in wanted and now_s - self._looked_s > _WRITTEN_S:
            self._looked_s = now_s
            written = run is not None and (run.cell, run.events.changes, tuple(run.events.withheld))
            if self._told.get("console", self) != written:
                self._told["console"] = written
                content = console_json("", (), {})
                if run is not None:
                    outputs, withheld = run.events.live_groups(), dict(run.events.withheld)
                    content = console_json(run.title, outputs, withheld)
                self._tell({"console": content})
        # Where every rank of the run is paused at a line, nothing changes by itself.
        settled = now_s - self._changed_s > _SETTLED_S or (
            run is not None and bool(run.stops) and run.stops.keys() >= set(run.pending)
        )
        settled = settled and self._session.benchmarks.current is None
        for tab in wanted.intersection(_ASKING) - self._asked:
            told = self._told.get(tab)
            if told != key and (settled or told is None):
                self._asked.add(tab)
                self._told[tab] = key
                threading.Thread(target=self._ask, args=(tab,), name="ddp-tab", daemon=True).start()

    def _ask(self, tab: str) -> None:
        """Ask the ranks, and tell what they answer; why not, where they cannot be asked."""
        try:
            run = self._session.runs.current
            if tab == "stack":
                sources = run.sources if run is not None else {}
                content = stack_json(self._session.where(), sources)
                if self._session.runs.stops:
                    self._session.breakpoints.rows()  # how often each was passed is shown beside
            else:
                content = variables_json(self._session.variables())
        except DDPError as error:
            content = {"error": str(error)}
        finally:
            self._asked.discard(tab)
        # `of` names the run that the answer is about: the page shows it beside a newer one.
        run = self._session.runs.current
        about = {"at": time.strftime("%H:%M:%S"), "of": run.title if run is not None else ""}
        self._tell({tab: {**content, **about}})
