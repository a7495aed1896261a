"""One training step: the ranks' records of its parameters, and rows of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.model.ranks import Ranks
from ddp_notebook.model.training import TensorDigest

LAST_STEP = sys.maxsize
"""In place of the number of a training step: the last one."""
LEDGER_COLUMNS = ("in", "own_gradients", "optimizer_used", "held_by", "changed", "across_ranks")


@dataclass(slots=True)
class SteppedParameter:
    """One parameter in one training step, as one rank saw it; the rank fills it in meanwhile.

    `own` and `used` are gradients: the sum of what this rank's backwards brought, before anything
    reduced it, and what the optimizer used. Each has a few values, at places of the whole tensor
    that are the same on all ranks; None there for values that other ranks have.
    """

    name: str
    shape: tuple[int, ...]
    within: str = ""
    """DDP, FSDP2 or DTensor, which reduces its gradient; "" for none of them."""
    group: Ranks = ()
    """The ranks among which that happens; none where unknown."""
    sharded: bool = False
    """Ranks have parts of it."""
    own: tuple[float | None, ...] | None = None
    backwards: int = 0
    """So many backwards since the step before brought it a gradient."""
    earlier: int = 0
    """And so many before that step, whose gradients were never set to zero."""
    used: tuple[float | None, ...] | None = None
    used_digest: TensorDigest | None = None
    optimizer: str = ""
    steps: int = 0
    """The number of its optimizer's step; 0 if none made one."""
    lr: float | None = None
    before: TensorDigest | None = None
    after: TensorDigest | None = None


@dataclass(frozen=True, slots=True)
class RankLedger:
    """One training step of a rank. `notes` say what it could not see."""

    rank: int
    run: int
    parameters: tuple[SteppedParameter, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Parameters with the same facts, by the names in `LEDGER_COLUMNS`.

    `marked`: the row is worth a look.
    """

    parameters: tuple[str, ...]
    facts: Mapping[str, str]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """A training step as rows, those worth a look first. `title` says which step it was."""

    title: str
    rows: tuple[LedgerRow, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> Mapping[str, Any]:
        """Its content, for `json.dumps`."""
        return dict(codec.encode(self))
