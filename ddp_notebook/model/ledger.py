"""One training step under the microscope: what ranks saw of its parameters, as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.ranks import Ranks

LAST_STEP = 10**9
"""In place of the number of a training step: the last one."""
Sample = tuple[float | None, ...]
"""The values of a tensor at places that are the same on all ranks; None where a rank has no part
of it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor in a few bytes: a hash of a sample, the sum of all values, and of their absolutes.

    The sums are in float64.
    """

    hash: str
    total: float
    size: float

    def equals(self, other: Reading) -> bool:
        """Return whether both are of the same values; sums may have been added in another order."""
        return self.hash == other.hash and not (
            abs(self.total - other.total) > 1e-11 * max(self.size, other.size)
        )


@dataclass(frozen=True, slots=True)
class SteppedParameter:
    """One parameter in one step of the optimizer that holds it, as one rank saw it.

    `within` is what reduces its gradient: DDP, FSDP2, FSDP, DTensor, "" for none of them; `group`
    the ranks among which that happens, none where unknown. `sharded`: ranks have parts of it.
    """

    name: str
    shape: tuple[int, ...]
    within: str = ""
    group: Ranks = ()
    sharded: bool = False
    own: Sample | None = None
    """The sum of what this rank's backwards brought, before anything reduced it; None for none."""
    backwards: int = 0
    """The number of backwards since the step before."""
    earlier: int = 0
    """Backwards before that step, whose gradients were never set to zero."""
    used: Sample | None = None
    """The gradient with which the optimizer made its step."""
    read: Reading | None = None
    """The same, to be compared."""
    unreduced: bool = False
    """FSDP2 keeps gradients of it that were not reduced before the step."""
    optimizer: str = ""
    steps: int = 0
    """The number of the step, as that optimizer counts; 0 if it made none."""
    lr: float | None = None
    before: Reading | None = None
    after: Reading | None = None


@dataclass(frozen=True, slots=True)
class RankLedger:
    """One training step of a rank. `notes` say what it could not see."""

    rank: int
    run: int
    parameters: tuple[SteppedParameter, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Parameters of which the same is to be said, in a few words for each column.

    `weight` is how much a row is worth a look: those of 2 and more are marked.
    """

    parameters: tuple[str, ...]
    within: str
    own: str
    used: str
    optimizer: str
    changed: str
    after: str
    weight: int = 0

    @property
    def marked(self) -> bool:
        """True for a row that is worth a look."""
        return self.weight >= 2


@dataclass(frozen=True, slots=True)
class Ledger:
    """A training step as rows, those worth a look first. `title` says which step it was."""

    title: str
    rows: tuple[LedgerRow, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> Mapping[str, Any]:
        """Its content, for `json.dumps`."""
        rows = [{**codec.encode(row), "marked": row.marked} for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}
