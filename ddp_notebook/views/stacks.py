"""Where the ranks are, as a tree: plain text of at most 100 columns, and nested HTML.

The user's frames are drawn. Frames of libraries are summed up by the innermost call of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from textwrap import wrap

from ddp_notebook.model import (
    Activity,
    Branch,
    Doing,
    Frame,
    Local,
    StackTree,
    counted,
    cut,
    name_ranks,
)
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.step_rows import names_of
from ddp_notebook.views.step_rows import place as place_of
from ddp_notebook.views.table import WIDTH

NO_RANKS = "No ranks are running."

_GAP = "  "
_CHILD, _LAST_CHILD, _BESIDE, _BELOW = "├─ ", "└─ ", "│  ", "   "

_STATES = {
    Activity.HELD: ("paused (%ddp_step continues)", "paused before {more}"),
    Activity.IDLE: ("idle", "idle"),
    Activity.FAILED: ("idle", "idle since it failed: {more}"),
    Activity.DEAD: ("dead", "dead: {more}"),
    Activity.SILENT: ("does not answer", "does not answer: {more}"),
}
"""The state of ranks that are in no call, without and with details."""
_COLOURS = {
    Activity.WAITING: markup.BUSY,
    Activity.BUSY: markup.OK,
    Activity.HELD: markup.BUSY,
    Activity.IDLE: markup.IDLE,
    Activity.FAILED: markup.BAD,
    Activity.DEAD: markup.BAD,
    Activity.SILENT: markup.WARN,
}
_VIEW = "padding: 4px 0; line-height: 1.45; max-width: 76em"
_BRANCH = (
    f"margin: 4px 0 6px; padding: 0 0 0 10px; border-left: 3px solid rgba({markup.IDLE}, 0.35)"
)
_CODE = f"background: none; color: inherit; white-space: pre-wrap; {markup.MONO}"
_FRAME = f"margin: 2px 0 0; {markup.BREAKABLE}"
_LOCALS = f"margin: 1px 0 3px 2em; {markup.MUTED}; {markup.BREAKABLE}; {markup.MONO}"
_SUMMARY = f"cursor: pointer; {markup.MUTED}"


# -- words -------------------------------------------------------------------------------


def place_words(frame: Frame, names: Mapping[str, str]) -> str:
    """``train.py, line 41``, ``cell 3, line 4``; empty for frames that are left out."""
    if not frame.file:
        return ""
    name = plain(names.get(frame.file, frame.file))
    return place_of(name, frame.line, name)


def function_words(frame: Frame) -> str:
    """``step()``; empty for the code of a cell or a module itself."""
    name = plain(frame.function)
    return "" if name in ("", "<module>") else f"{name}()"


def file_names(tree: StackTree) -> dict[str, str]:
    """A short name for each file: its own, with its folder's if two have the same."""
    return names_of({frame.file for branch in tree.branches for frame in _all_frames(branch)})


def _all_frames(branch: Branch) -> Iterator[Frame]:
    yield from branch.frames
    for child in branch.children:
        yield from _all_frames(child)


def state_words(doing: Doing, tail: Sequence[Frame]) -> str:
    """The state of ranks at the end of a path; `tail` are the frames of libraries they are in."""
    more = cut(plain(doing.text), 200)
    if doing.activity in _STATES:
        alone, with_more = _STATES[doing.activity]
        return with_more.replace("{more}", more) if more else alone
    call = _call(doing, tail)
    aside = f" ({more})" if more else ""
    if doing.activity is Activity.WAITING:
        return f"waiting in {call}{aside}"
    return f"in {call}{aside}" if call else f"running{aside}"


def _call(doing: Doing, tail: Sequence[Frame]) -> str:
    """Return the call of torch, ``all_reduce (torch.distributed)``; without one the innermost."""
    operation = plain(doing.operation)
    frame = next((frame for frame in tail if frame.function == doing.operation), None)
    if not operation and tail:
        frame = tail[-1]
    if frame is None:
        return operation
    module = ".".join(plain(frame.module).split(".")[:2])
    name = function_words(frame).removesuffix("()") or "its import"
    return f"{name} ({module})" if module else name


def drawn(branch: Branch) -> tuple[Frame, ...]:
    """The frames to show of these ranks: the user's, and all that an error passed through.

    For ranks that differ only within a library, the innermost.
    """
    if branch.doing is not None and branch.doing.activity is Activity.FAILED:
        return branch.frames
    users = tuple(frame for frame in branch.frames if not frame.library)
    return users or (branch.frames[-1:] if branch.doing is None else ())


def tail_after(branch: Branch, tail: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of libraries at the end of a branch; `tail` are those of the branch before."""
    # A branch may begin within a library, where ranks part below a common call of torch: then the
    # frames before it count, too.
    for number in range(len(branch.frames), 0, -1):
        if not branch.frames[number - 1].library:
            return branch.frames[number:]
    return (*tail, *branch.frames)


def without_library_lines(branch: Branch, tail: tuple[Frame, ...]) -> Branch:
    """The branch, with ranks merged that differ only in a library and are in the same call.

    On their way into a collective, ranks are at different lines of torch for a moment.
    """
    if branch.doing is not None:
        return branch
    tail = tail_after(branch, tail)
    apart: list[Branch] = []
    ends: dict[str, Branch] = {}
    for child in (without_library_lines(child, tail) for child in branch.children):
        if child.doing is None or not all(frame.library for frame in child.frames):
            apart.append(child)
            continue
        # The words are the key: they name the call of torch, and not the line in it.
        words = state_words(child.doing, tail_after(child, tail))
        before = ends.get(words, replace(child, ranks=()))
        ends[words] = replace(before, ranks=tuple(sorted((*before.ranks, *child.ranks))))
    if len(ends) == 1 and not apart:
        (end,) = ends.values()
        return replace(end, frames=(*branch.frames, *end.frames))
    together = sorted((*apart, *ends.values()), key=lambda child: child.ranks)
    return replace(branch, children=tuple(together))


def locals_words(branch: Branch, frame: Frame) -> list[str]:
    """The variables, a line each: first those equal on all ranks of the branch, then the others."""
    common = [local for local in frame.locals if local.ranks == branch.ranks]
    differing: dict[str, list[Local]] = {}
    for local in frame.locals:
        if local.ranks != branch.ranks:
            differing.setdefault(local.name, []).append(local)
    lines = [" · ".join(f"{plain(local.name)} = {plain(local.text)}" for local in common)]
    for name, values in differing.items():
        by_ranks = (f"{plain(local.text)} ({name_ranks(local.ranks)})" for local in values)
        lines.append(f"{plain(name)} = {', '.join(by_ranks)}")
    return lines if common else lines[1:]


# -- text --------------------------------------------------------------------------------


def text(t: StackTree) -> str:
    """The tree, one branch below the other; ranks that share no line have trees of their own."""
    if not t.branches:
        return NO_RANKS
    drawing = _Drawing(file_names(t))
    branches = [without_library_lines(branch, ()) for branch in t.branches]
    return "\n".join(line for branch in branches for line in drawing.lines(branch, "", "", ()))


@dataclass(frozen=True)
class _Drawing:
    """Draws branches; `names` are the files' short names."""

    names: Mapping[str, str]

    def lines(
        self, branch: Branch, head: str, below: str, tail: tuple[Frame, ...]
    ) -> Iterator[str]:
        """A branch and its children. `head` begins its first line, `below` the others."""
        tail = tail_after(branch, tail)
        own = below + (_BESIDE if branch.children else _BELOW)
        label = head + name_ranks(branch.ranks)
        if branch.doing is not None:
            label += _GAP + state_words(branch.doing, tail)
        # However deep the branch, its lines have 40 columns.
        room = max(40, WIDTH - len(own))
        # A line for each frame that is drawn, in aligned columns, and its local variables.
        frames = drawn(branch)
        places = [_clip(place_words(f, self.names), 36, end=True) for f in frames]
        functions = [_clip(function_words(f), 28) for f in frames]
        widths = [max(map(len, column), default=0) for column in (places, functions)]
        rows = []
        for place, function, frame in zip(places, functions, frames, strict=True):
            before = _GAP.join(filter(None, (place.ljust(widths[0]), function.ljust(widths[1]))))
            left = room - len(before) - len(_GAP)
            source = _clip(plain(frame.source), left) if left >= 12 else ""  # a rest says nothing
            rows.append(f"{before}{_GAP}{source}".rstrip() if before else source)
            for words in locals_words(branch, frame):
                rows += wrap(words, room, initial_indent="    ", subsequent_indent="      ")
        # A branch with one line stands beside its ranks; others have a line each below.
        first = rows[0] if len(rows) == 1 or (rows and branch.doing is None) else ""
        if first and len(label + _GAP + first) <= WIDTH:
            yield label + _GAP + first
            rows = rows[1:]
        else:
            yield from wrap(label, WIDTH, subsequent_indent=own + _BELOW) or [label]
        yield from (own + row for row in rows)
        for child in branch.children[:-1]:
            yield from self.lines(child, below + _CHILD, below + _BESIDE, tail)
        for child in branch.children[-1:]:
            yield from self.lines(child, below + _LAST_CHILD, below + _BELOW, tail)


def _clip(text: str, width: int, *, end: bool = False) -> str:
    """`text` in `width` columns; with `end`, its end rather than its beginning."""
    if len(text) <= width:
        return text
    return f"…{text[len(text) - width + 1 :]}" if end else f"{text[: width - 1]}…"


# -- HTML --------------------------------------------------------------------------------


def html(t: StackTree) -> str:
    """The tree; ranks that share no line have trees of their own."""
    page = _Page(file_names(t))
    body = "".join(page.branch(branch, ()) for branch in t.branches) or NO_RANKS
    return f'<div class="ddp-stacks" style="{_VIEW}">{body}</div>'


@dataclass(frozen=True)
class _Page:
    """Writes branches; `names` are the files' short names."""

    names: Mapping[str, str]

    def branch(self, branch: Branch, tail: tuple[Frame, ...]) -> str:
        """A branch, its children within it."""
        tail = tail_after(branch, tail)
        doing, state = branch.doing, ""
        if doing is not None:
            state = markup.chip(plain(state_words(doing, tail)), _COLOURS[doing.activity])
        who = f'<span style="font-weight: 600">{_words(name_ranks(branch.ranks))}</span>'
        children = "".join(self.branch(child, tail) for child in branch.children)
        shown = ""
        for library, run in groupby(branch.frames, lambda frame: frame.library):
            frames = list(run)
            inside = ""
            for frame in frames:
                place, source = _words(place_words(frame, self.names)), _words(frame.source)
                parts = [
                    f'<span style="font-weight: 500">{place}</span>' if place else "",
                    _words(function_words(frame)),
                    f'<code style="{_CODE}">{source}</code>' if frame.source else "",
                ]
                title, call = escape(plain(frame.file)), " &nbsp;".join(filter(None, parts))
                inside += f'<div style="{_FRAME}" title="{title}">{call}</div>'
                for line in locals_words(branch, frame):
                    inside += f'<div style="{_LOCALS}">{_words(line)}</div>'
            if library:  # one line that can be opened
                # Frames of libraries are folded, except where ranks differ only in them.
                is_open = " open" * (frames[-1:] == list(drawn(branch)))
                modules = (frame.module.partition(".")[0] for frame in frames)
                libraries = ", ".join(filter(None, dict.fromkeys(modules)))
                count = " of ".join(filter(None, (counted(len(frames), "frame"), libraries)))
                inside = (
                    f'<details{is_open} style="{_FRAME}"><summary style="{_SUMMARY}">'
                    f"{_words(count)}</summary>"
                    f'<div style="margin-left: 1.3em; {markup.MUTED}">{inside}</div></details>'
                )
            shown += inside
        return f'<div style="{_BRANCH}"><div>{who} {state}</div>{shown}{children}</div>'


def _words(text: str) -> str:
    return escape(plain(text), quote=False)
