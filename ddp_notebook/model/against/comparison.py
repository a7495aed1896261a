"""The result of a comparison: equal, diverged, or not comparable, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.model.collectives import Place
from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a run diverges from the one on a single rank: `step` counts from 1.

    `stage` is one of `STAGES`: what diverges first there. `place` is the line that computed it, and
    `until` the line by which it had diverged, if that is another. `relative` is the distance
    relative to the tensor of one rank, `rounding` that of two runs on one rank. `others` further
    parameters diverge in the same step. `evidence` are sentences, `cause` is one, "" if unknown.
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
    """A run on `world_size` ranks compared with the same run on one.

    In the first `steps` training steps nothing diverges by more than rounding; `relative` is the
    largest distance there. `parting` is where they diverge, None for nowhere. `refused` says why
    nothing, or nothing further, was compared; "" if all was. `assumed` are sentences.
    """

    world_size: int
    steps: int = 0
    relative: float = 0.0
    rounding: float = 0.0
    parting: Parting | None = None
    refused: str = ""
    assumed: tuple[str, ...] = ()
