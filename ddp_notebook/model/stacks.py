"""The ranks' stacks as one tree, and their variables as one table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
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
    its indentation, empty if unavailable. `library` is true for code that is not the user's: torch,
    Python, installed packages. A frame without a file represents omitted frames.
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
    """The activity of a rank's main thread, at the end of its stack.

    `operation` is the call of torch, or the stage of setup, that it is in: ``all_reduce``,
    ``backward``, ``rendezvous``; empty for none. `text` says more: what it waits for, of what
    it died, where it was when it last answered.
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
    """A run of frames that `ranks` share, outermost first, and the branches after it.

    Either there are `children`, the one with the lowest rank first, or it ends here and
    `doing` says what the ranks are doing. A branch without frames holds ranks whose stack ends
    where others continue, or that have no stack.
    """

    ranks: Ranks
    frames: tuple[Frame, ...] = ()
    doing: Doing | None = field(default=None, metadata=OMIT_DEFAULT)
    children: tuple[Branch, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class StackTree:
    """The value of `%ddp_where`: the stacks of all ranks that were asked, as one tree.

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
            for frame in branch.frames:
                own = (Local(each.name, each.text) for each in frame.locals if rank in each.ranks)
                frames.append(replace(frame, locals=tuple(own)))
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


# -- variables --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A summary of a tensor's values. `read` of them were read; 0 for a tensor that was not read.

    `mean`, `least` and `most` are of those that are numbers; None where no element is. `digest`
    tells values apart, empty unless it is of all. `sample` has some of them, at the same places
    on every rank where the tensor has this shape; None in it is NaN or infinite. `std` and
    `infinite` (how many are) are known where this value alone was asked for.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    read: int = field(default=0, metadata=OMIT_DEFAULT)
    mean: float | None = field(default=None, metadata=OMIT_DEFAULT)
    least: float | None = field(default=None, metadata=OMIT_DEFAULT)
    most: float | None = field(default=None, metadata=OMIT_DEFAULT)
    nans: int = field(default=0, metadata=OMIT_DEFAULT)
    digest: str = field(default="", metadata=OMIT_DEFAULT)
    sample: tuple[float | None, ...] = field(default=(), metadata=OMIT_DEFAULT)
    std: float | None = field(default=None, metadata=OMIT_DEFAULT)
    infinite: int = field(default=0, metadata=OMIT_DEFAULT)

    @property
    def size(self) -> int:
        """How many values it has."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of one rank. `text` is its value, short; of a tensor empty.

    `number` is the value of one. `digest` tells values apart that have the same text.
    """

    name: str
    text: str = field(default="", metadata=OMIT_DEFAULT)
    number: float | None = field(default=None, metadata=OMIT_DEFAULT)
    tensor: TensorFacts | None = field(default=None, metadata=OMIT_DEFAULT)
    digest: str = field(default="", metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class Scope:
    """Variables of one function that has not returned, or the global ones, in order.

    `function` is empty for global ones. `file` is as in a `Frame`; empty for the notebook's cells.
    """

    function: str
    file: str
    variables: tuple[Variable, ...]
    left_out: int = field(default=0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class RankVariables:
    """A rank's variables, those of the innermost function first.

    `busy`: it was running, so its tensors' values were not read.
    """

    rank: int
    scopes: tuple[Scope, ...]
    busy: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class VariableCell:
    """A value, and the ranks that have it. `note` says how it differs from most ranks' value.

    `absent`: there is no such variable on these ranks. `odd`: most ranks have another value.
    `unknown`: too little of it was read to say whether it is equal to another.
    """

    ranks: Ranks
    text: str
    note: str = field(default="", metadata=OMIT_DEFAULT)
    absent: bool = field(default=False, metadata=OMIT_DEFAULT)
    odd: bool = field(default=False, metadata=OMIT_DEFAULT)
    unknown: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class VariableRow:
    """A variable on all ranks of its section: one cell when it is equal on all of them.

    `summary`: of numbers that differ, their range and mean.
    """

    name: str
    cells: tuple[VariableCell, ...]
    summary: str = field(default="", metadata=OMIT_DEFAULT)

    @property
    def differs(self) -> bool:
        """True when not all ranks have the same value, as far as is known."""
        return sum(not cell.unknown for cell in self.cells) > 1


@dataclass(frozen=True, slots=True)
class VariableSection:
    """The variables of one function, or the globals, of the ranks that have them."""

    title: str
    ranks: Ranks
    rows: tuple[VariableRow, ...]
    left_out: int = field(default=0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True)
class Unread:
    """Ranks with missing information, and why."""

    ranks: Ranks
    why: str


@dataclass(frozen=True, slots=True)
class VariableTable:
    """The value of `%ddp_vars`: variables by name and rank, equal values folded."""

    sections: tuple[VariableSection, ...] = ()
    unread: tuple[Unread, ...] = ()
    world_size: int = 0

    def row(self, name: str) -> VariableRow:
        """The row of a variable, the innermost of that name. Raises KeyError."""
        for section in self.sections:
            for row in section.rows:
                if row.name == name:
                    return row
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """The table as a JSON object; `json.dumps` takes it as it is."""
        wire: dict[str, Any] = codec.encode(self)
        return wire
