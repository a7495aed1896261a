"""Where ranks are: the Python stack of each, and all of them as one tree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.case import Activity
from ddp_notebook.model.codec import OMIT_DEFAULT
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Local:
    """A local variable as a short text. In a tree `ranks` are those that have this value."""

    name: str
    text: str
    ranks: Ranks = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class Frame:
    """One call that has not returned, and the line it is at.

    `file` is a path, or ``cell 3`` for the code of ``In [3]``. `source` is that line without
    its indentation, empty when it cannot be had. `library` is true of what is not the user's:
    torch, Python, installed packages. A frame without a file stands for frames left out.
    """

    file: str
    line: int
    function: str
    source: str = field(default="", metadata=OMIT_DEFAULT)
    module: str = field(default="", metadata=OMIT_DEFAULT)
    library: bool = field(default=False, metadata=OMIT_DEFAULT)
    locals: tuple[Local, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank's main thread is at, at the end of its stack.

    `operation` is the call of torch, or the stage of set-up, that it is in: ``all_reduce``,
    ``backward``, ``rendezvous``; empty for none. `text` says more: what it waits for, of what
    it died, where it was when it was last heard.
    """

    activity: Activity
    operation: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RankStack:
    """The stack of one rank's main thread from the user's first frame on, outermost first."""

    rank: int
    doing: Doing
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of frames that `ranks` share, outermost first, and where they part after it.

    Either there are `children`, the one with the lowest rank first, or it ends here and
    `doing` says what the ranks are at. A branch without frames is of ranks whose stack ends
    where others go on, or that have none.
    """

    ranks: Ranks
    frames: tuple[Frame, ...] = ()
    doing: Doing | None = field(default=None, metadata=OMIT_DEFAULT)
    children: tuple[Branch, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class StackTree:
    """What `%ddp_where` returns: the stacks of all ranks that were asked, as one tree.

    Ranks at the same line share a branch. `branches` are where they begin.
    """

    branches: tuple[Branch, ...] = ()
    world_size: int = 0

    @property
    def ranks(self) -> Ranks:
        """The ranks in the tree."""
        return tuple(sorted(rank for branch in self.branches for rank in branch.ranks))

    def stack(self, rank: int) -> RankStack:
        """The stack of one rank. Raises KeyError when it is not in the tree."""
        frames: list[Frame] = []
        branches = self.branches
        while (branch := next((b for b in branches if rank in b.ranks), None)) is not None:
            frames += (_of_rank(frame, rank) for frame in branch.frames)
            if branch.doing is not None:
                return RankStack(rank, branch.doing, tuple(frames))
            branches = branch.children
        raise KeyError(rank)

    def to_json(self) -> dict[str, Any]:
        """The tree as a JSON object; `json.dumps` takes it as it is."""
        wire: dict[str, Any] = codec.encode(self)
        return wire

    def __str__(self) -> str:
        return json.dumps(self.to_json(), indent=2)


def _of_rank(frame: Frame, rank: int) -> Frame:
    """A frame of a tree as one rank has it."""
    own = (Local(each.name, each.text) for each in frame.locals if rank in each.ranks)
    return Frame(
        frame.file,
        frame.line,
        frame.function,
        frame.source,
        frame.module,
        frame.library,
        tuple(own),
    )
