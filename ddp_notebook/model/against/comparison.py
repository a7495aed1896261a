"""What a comparison gives: equal, parted, or not to be compared, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.model.collectives import Place
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a run parts from the one on a single rank: `step` counts from 1.

    `stage` is one of `STAGES`: what parts first there. `place` is the line that computed it, and
    `until` the line by which it had parted, where that is another. `relative` is the distance in
    parts of the tensor of one rank, `rounding` that of two runs on one rank. `others` further
    parameters part in the same step. `evidence` are sentences, `cause` is one, "" where it is
    not known.
    """

    step: int
    parameter: str
    ranks: Ranks
    stage: str
    place: Place | None
    until: Place | None
    relative: float
    rounding: float
    others: int = 0
    evidence: tuple[str, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run on `world_size` ranks beside the same on one.

    In the first `steps` training steps nothing parts by more than rounding; `relative` is the
    largest distance there. `parting` is where they part, None for nowhere. `refused` says why
    nothing was compared, or why nothing further; "" where all was. `assumed` are sentences.
    """

    world_size: int
    steps: int = 0
    relative: float = 0.0
    rounding: float = 0.0
    parting: Parting | None = None
    refused: str = ""
    assumed: tuple[str, ...] = ()
