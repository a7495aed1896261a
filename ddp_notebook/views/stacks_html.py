"""Where the ranks are, as HTML: nested branches, frames of libraries folded.

All styles stand on the elements, in colours for light and dark pages, and every value is
escaped, as in the findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from ddp_notebook.model import Activity, Branch, Doing, Frame, StackTree, name_ranks
from ddp_notebook.views import stacks_text
from ddp_notebook.views.findings_text import plain

_OK, _BUSY, _BAD = "43, 154, 75", "47, 127, 224", "217, 60, 60"
_WARN, _IDLE = "217, 123, 0", "128, 128, 128"
_COLOURS = {
    Activity.WAITING: _BUSY,
    Activity.BUSY: _OK,
    Activity.HELD: _BUSY,
    Activity.IDLE: _IDLE,
    Activity.FAILED: _BAD,
    Activity.DEAD: _BAD,
    Activity.SILENT: _WARN,
}
_VIEW = "padding: 4px 0; line-height: 1.45; max-width: 76em"
_BRANCH = f"margin: 4px 0 6px; padding: 0 0 0 10px; border-left: 3px solid rgba({_IDLE}, 0.35)"
_CHIP = "display: inline-block; padding: 0 8px; border-radius: 9px"
_BREAKABLE = "overflow-wrap: break-word; overflow-wrap: anywhere"
_MONO = "font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.92em"
_CODE = f"background: none; color: inherit; white-space: pre-wrap; {_MONO}"
_FRAME = f"margin: 2px 0 0; {_BREAKABLE}"
_MUTED = "opacity: 0.72"
_LOCALS = f"margin: 1px 0 3px 2em; {_MUTED}; {_BREAKABLE}; {_MONO}"
_SUMMARY = f"cursor: pointer; {_MUTED}"


def tree(t: StackTree) -> str:
    """The tree; ranks that share no line have trees of their own."""
    page = _Page(stacks_text.file_names(t))
    body = "".join(page.branch(branch, ()) for branch in t.branches) or stacks_text.NO_RANKS
    return f'<div class="ddp-stacks" style="{_VIEW}">{body}</div>'


@dataclass(frozen=True)
class _Page:
    """Writes branches; `names` are the files' short names."""

    names: Mapping[str, str]

    def branch(self, branch: Branch, tail: tuple[Frame, ...]) -> str:
        """A branch, its children within it."""
        tail = stacks_text.tail_after(branch, tail)
        state = _chip(branch.doing, tail) if branch.doing is not None else ""
        who = f'<span style="font-weight: 600">{_text(name_ranks(branch.ranks))}</span>'
        children = "".join(self.branch(child, tail) for child in branch.children)
        frames = "".join(self._frames(branch))
        return f'<div style="{_BRANCH}"><div>{who} {state}</div>{frames}{children}</div>'

    def _frames(self, branch: Branch) -> Iterator[str]:
        """The frames; each run of frames of libraries as one line that can be opened."""
        apart = stacks_text.drawn(branch)
        for library, run in groupby(branch.frames, lambda frame: frame.library):
            frames = list(run)
            if not library:
                yield from (self._frame(frame, branch) for frame in frames)
                continue
            inside = "".join(self._frame(frame, branch) for frame in frames)
            is_open = " open" if frames[-1:] == list(apart) else ""
            yield (
                f'<details{is_open} style="{_FRAME}"><summary style="{_SUMMARY}">'
                f"{_text(_library_words(frames))}</summary>"
                f'<div style="margin-left: 1.3em; {_MUTED}">{inside}</div></details>'
            )

    def _frame(self, frame: Frame, branch: Branch) -> str:
        place = _text(stacks_text.place_words(frame, self.names))
        parts = [
            f'<span style="font-weight: 500">{place}</span>' if place else "",
            _text(stacks_text.function_words(frame)),
            f'<code style="{_CODE}">{_text(frame.source)}</code>' if frame.source else "",
        ]
        title = escape(plain(frame.file))
        said = " &nbsp;".join(part for part in parts if part)
        alike, differing = stacks_text.locals_words(branch, frame)
        rows = [*([" · ".join(alike)] if alike else []), *differing]
        below = "".join(f'<div style="{_LOCALS}">{_text(row)}</div>' for row in rows)
        return f'<div style="{_FRAME}" title="{title}">{said}</div>{below}'


def _library_words(frames: Sequence[Frame]) -> str:
    """``3 frames of torch``."""
    count = f"{len(frames)} frame{'' if len(frames) == 1 else 's'}"
    libraries = dict.fromkeys(frame.module.partition(".")[0] for frame in frames if frame.module)
    return f"{count} of {', '.join(libraries)}" if libraries else count


def _chip(doing: Doing, tail: Sequence[Frame]) -> str:
    """What the ranks are at, in the colour of it."""
    colour = _COLOURS[doing.activity]
    style = f"{_CHIP}; border: 1px solid rgb({colour}); background: rgba({colour}, 0.16)"
    return f'<span style="{style}">{_text(stacks_text.state_words(doing, tail))}</span>'


def _text(said: str) -> str:
    return escape(plain(said), quote=False)
