"""Where the ranks are, as a tree in plain text of at most 100 columns.

The user's frames are drawn. Frames of libraries are told by the innermost call of torch. The
words here are the ones the HTML view uses too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from ddp_notebook.model import Activity, Branch, Doing, Frame, Local, StackTree, name_ranks
from ddp_notebook.views.findings_text import WIDTH, plain

NO_RANKS = "There are no ranks."

_GAP = "  "
_CHILD, _LAST_CHILD, _BESIDE, _BELOW = "├─ ", "└─ ", "│  ", "   "
_WIDEST_PLACE, _WIDEST_FUNCTION, _NARROWEST_SOURCE = 36, 28, 12
_NARROWEST = 40
"""Columns that a line keeps, however deep in the tree it is."""
_LONGEST_STATE = 200


# --------------------------------------------------------------------------- words


def place_words(frame: Frame, names: Mapping[str, str]) -> str:
    """``train.py:41``, ``cell 3, line 4``; empty for frames that are left out."""
    if not frame.file:
        return ""
    name = plain(names.get(frame.file, frame.file))
    return f"{name}, line {frame.line}" if name.startswith("cell ") else f"{name}:{frame.line}"


def function_words(frame: Frame) -> str:
    """``step()``; empty for the code of a cell or a module itself."""
    name = plain(frame.function)
    return "" if name in ("", "<module>") else f"{name}()"


def file_names(tree: StackTree) -> dict[str, str]:
    """A short name for each file: its own, with its folder's where two are called the same."""
    files = {frame.file for branch in tree.branches for frame in _all_frames(branch)}
    own = {file: _last_parts(file, 1) for file in files}
    alike = {name for name in own.values() if list(own.values()).count(name) > 1}
    return {file: _last_parts(file, 2) if name in alike else name for file, name in own.items()}


def _all_frames(branch: Branch) -> Iterator[Frame]:
    yield from branch.frames
    for child in branch.children:
        yield from _all_frames(child)


def _last_parts(file: str, count: int) -> str:
    return "/".join(file.replace("\\", "/").split("/")[-count:])


def state_words(doing: Doing, tail: Sequence[Frame]) -> str:
    """What ranks at the end of a path are at; `tail` are the frames of libraries they are in."""
    more = plain(doing.text)
    more = more if len(more) <= _LONGEST_STATE else f"{more[: _LONGEST_STATE - 1]}…"
    aside = f" ({more})" if more else ""
    match doing.activity:
        case Activity.WAITING:
            return f"waits in {_call(doing, tail)}{aside}"
        case Activity.BUSY:
            call = _call(doing, tail)
            return f"{f'in {call}' if call else 'running'}{aside}"
        case Activity.HELD:
            return f"paused before {more}" if more else "paused (by %ddp_step)"
        case Activity.IDLE:
            return "runs nothing"
        case Activity.FAILED:
            return f"runs nothing, since it failed: {more}" if more else "runs nothing"
        case Activity.DEAD:
            return f"dead: {more}" if more else "dead"
        case Activity.SILENT:
            return f"does not answer: {more}" if more else "does not answer"


def _call(doing: Doing, tail: Sequence[Frame]) -> str:
    """``all_reduce (torch.distributed)``; without one of torch, the innermost call."""
    operation = plain(doing.operation)
    if not operation:
        return _in_module(tail[-1]) if tail else ""
    found = next((frame for frame in tail if frame.function == doing.operation), None)
    return _in_module(found) if found is not None else operation


def _in_module(frame: Frame) -> str:
    """A function and the first two parts of its module's name."""
    module = ".".join(plain(frame.module).split(".")[:2])
    name = function_words(frame).removesuffix("()") or "its import"
    return f"{name} ({module})" if module else name


def drawn(branch: Branch) -> tuple[Frame, ...]:
    """The frames that tell where these ranks are: the user's.

    Of ranks that part within a library, the innermost, where nothing else tells them apart.
    """
    users = tuple(frame for frame in branch.frames if not frame.library)
    return users or (branch.frames[-1:] if branch.doing is None else ())


def tail_after(branch: Branch, tail: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of libraries at the end of a branch; `tail` are those of the branch before."""
    for number in range(len(branch.frames), 0, -1):
        if not branch.frames[number - 1].library:
            return branch.frames[number:]
    return (*tail, *branch.frames)


def without_library_lines(branch: Branch, tail: tuple[Frame, ...]) -> Branch:
    """The branch, ranks put together again that part only in a library and are at the same.

    On their way into a collective ranks are at other lines of torch for a moment.
    """
    if branch.doing is not None:
        return branch
    tail = tail_after(branch, tail)
    kept: list[Branch] = []
    ends: dict[str, Branch] = {}
    for child in (without_library_lines(each, tail) for each in branch.children):
        if child.doing is None or not all(frame.library for frame in child.frames):
            kept.append(child)
            continue
        words = state_words(child.doing, tail_after(child, tail))
        before = ends.get(words, replace(child, ranks=()))
        ends[words] = replace(before, ranks=tuple(sorted((*before.ranks, *child.ranks))))
    if len(ends) == 1 and not kept:
        (end,) = ends.values()
        return replace(end, frames=(*branch.frames, *end.frames))
    together = sorted((*kept, *ends.values()), key=lambda each: each.ranks)
    return replace(branch, children=tuple(together))


def locals_words(branch: Branch, frame: Frame) -> tuple[list[str], list[str]]:
    """What is alike on the branch's ranks, a variable a text; and what differs, by ranks."""
    alike = [
        f"{plain(each.name)} = {plain(each.text)}"
        for each in frame.locals
        if each.ranks == branch.ranks
    ]
    differing: dict[str, list[Local]] = {}
    for each in frame.locals:
        if each.ranks != branch.ranks:
            differing.setdefault(each.name, []).append(each)
    return alike, [
        f"{plain(name)} = "
        + ", ".join(f"{plain(each.text)} ({name_ranks(each.ranks)})" for each in values)
        for name, values in differing.items()
    ]


# --------------------------------------------------------------------------- the tree


def tree(t: StackTree) -> str:
    """The tree, a branch below the other; ranks that share no line have trees of their own."""
    if not t.branches:
        return NO_RANKS
    drawing = _Drawing(file_names(t))
    branches = (without_library_lines(branch, ()) for branch in t.branches)
    return "\n".join(line for each in branches for line in drawing.lines(each, "", "", ()))


@dataclass(frozen=True)
class _Drawing:
    """Draws branches; `names` are the files' short names."""

    names: Mapping[str, str]

    def lines(
        self, branch: Branch, head: str, below: str, tail: tuple[Frame, ...]
    ) -> Iterator[str]:
        """A branch and its children. `head` stands before its first line, `below` before others."""
        tail = tail_after(branch, tail)
        own = below + (_BESIDE if branch.children else _BELOW)
        label = head + name_ranks(branch.ranks)
        room = max(_NARROWEST, WIDTH - len(own))
        rows = self._rows(branch, room)
        if branch.doing is not None:
            label += _GAP + state_words(branch.doing, tail)
        first = rows[0] if len(rows) == 1 or (rows and branch.doing is None) else ""
        if first and len(label + _GAP + first) <= WIDTH:
            yield label + _GAP + first
            rows = rows[1:]
        else:
            yield from _folded(label, own)
        for row in rows:
            yield own + row
        for number, child in enumerate(branch.children):
            last = number == len(branch.children) - 1
            yield from self.lines(
                child,
                below + (_LAST_CHILD if last else _CHILD),
                below + (_BELOW if last else _BESIDE),
                tail,
            )

    def _rows(self, branch: Branch, room: int) -> list[str]:
        """A line for each frame that is drawn, its parts below each other's, and its locals."""
        frames = drawn(branch)
        places = [_clip(place_words(f, self.names), _WIDEST_PLACE, end=True) for f in frames]
        functions = [_clip(function_words(f), _WIDEST_FUNCTION) for f in frames]
        widths = [max(map(len, each), default=0) for each in (places, functions)]
        rows = []
        for place, function, frame in zip(places, functions, frames, strict=True):
            columns = [place.ljust(widths[0]), function.ljust(widths[1])]
            before = _GAP.join(each for each in columns if each)
            left = room - len(before) - len(_GAP)
            source = _clip(plain(frame.source), left) if left >= _NARROWEST_SOURCE else ""
            rows.append(f"{before}{_GAP}{source}".rstrip() if before else source)
            rows += _locals(branch, frame, room)
        return rows


def _locals(branch: Branch, frame: Frame, room: int) -> list[str]:
    """The variables below their frame: those alike in one go, each other on a line."""
    alike, differing = locals_words(branch, frame)
    said = [*([" · ".join(alike)] if alike else []), *differing]
    return [
        line
        for text in said
        for line in wrap(text, room, initial_indent="    ", subsequent_indent="      ")
    ]


def _folded(label: str, own: str) -> list[str]:
    """A label in as many lines as it takes."""
    return wrap(label, WIDTH, subsequent_indent=own + _BELOW, drop_whitespace=True) or [label]


def _clip(text: str, width: int, *, end: bool = False) -> str:
    """`text` in `width` columns; with `end`, its end rather than its beginning."""
    if len(text) <= width:
        return text
    return f"…{text[len(text) - width + 1 :]}" if end else f"{text[: width - 1]}…"
