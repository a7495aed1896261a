"""Where ranks are: the Python stack of each, and all of them as one tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model.case import Activity
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Local:
    """A local variable as a short text. In a tree `ranks` are those that have this value."""

    name: str
    text: str
    ranks: Ranks = ()


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
    source: str = ""
    module: str = ""
    library: bool = False
    locals: tuple[Local, ...] = ()


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
    doing: Doing | None = None
    children: tuple[Branch, ...] = ()


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
        return {
            "world_size": self.world_size,
            "branches": [_branch_to_json(branch) for branch in self.branches],
        }

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


# -- JSON ------------------------------------------------------------------------------


def stack_tree_from_json(wire: Mapping[str, Any]) -> StackTree:
    """The tree that `StackTree.to_json` wrote. Raises KeyError, TypeError or ValueError."""
    branches = tuple(_branch_from_json(branch) for branch in wire["branches"])
    return StackTree(branches, wire["world_size"])


def rank_stack_to_json(stack: RankStack) -> dict[str, Any]:
    """A rank's stack as a JSON object."""
    return {
        "rank": stack.rank,
        "doing": _doing_to_json(stack.doing),
        "frames": [frame_to_json(frame) for frame in stack.frames],
    }


def rank_stack_from_json(wire: Mapping[str, Any]) -> RankStack:
    """The stack that `rank_stack_to_json` wrote. Raises KeyError, TypeError or ValueError."""
    frames = tuple(_frame_from_json(frame) for frame in wire["frames"])
    return RankStack(wire["rank"], _doing_from_json(wire["doing"]), frames)


def frame_to_json(frame: Frame) -> dict[str, Any]:
    """A frame as a JSON object; what is empty is left out."""
    found: dict[str, Any] = {
        "file": frame.file,
        "line": frame.line,
        "function": frame.function,
        "source": frame.source,
        "module": frame.module,
        "library": frame.library,
        "locals": [_local_to_json(local) for local in frame.locals],
    }
    always = ("file", "line", "function")
    return {key: value for key, value in found.items() if value or key in always}


def _frame_from_json(wire: Mapping[str, Any]) -> Frame:
    fields = dict(wire)
    found = fields.pop("locals", ())
    return Frame(**fields, locals=tuple(_local_from_json(local) for local in found))


def _local_to_json(local: Local) -> dict[str, Any]:
    named = {"name": local.name, "text": local.text}
    return {**named, "ranks": list(local.ranks)} if local.ranks else named


def _local_from_json(wire: Mapping[str, Any]) -> Local:
    return Local(wire["name"], wire["text"], tuple(wire.get("ranks", ())))


def _doing_to_json(doing: Doing) -> dict[str, str]:
    return {
        "activity": doing.activity.value,
        "operation": doing.operation,
        "text": doing.text,
    }


def _doing_from_json(wire: Mapping[str, str]) -> Doing:
    return Doing(Activity(wire["activity"]), wire["operation"], wire["text"])


def _branch_to_json(branch: Branch) -> dict[str, Any]:
    end = {"doing": _doing_to_json(branch.doing)} if branch.doing is not None else {}
    children = [_branch_to_json(child) for child in branch.children]
    return {
        "ranks": list(branch.ranks),
        "frames": [frame_to_json(frame) for frame in branch.frames],
        **end,
        **({"children": children} if children else {}),
    }


def _branch_from_json(wire: Mapping[str, Any]) -> Branch:
    return Branch(
        ranks=tuple(wire["ranks"]),
        frames=tuple(_frame_from_json(frame) for frame in wire["frames"]),
        doing=_doing_from_json(wire["doing"]) if "doing" in wire else None,
        children=tuple(_branch_from_json(child) for child in wire.get("children", ())),
    )
