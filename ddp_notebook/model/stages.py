"""What a step of set-up, or of DDP's construction, gives: who arrived where, who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_notebook.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StepRow:
    """One rank, or several in the same place. `waits_for` are the ranks whose arrival it needs."""

    ranks: Ranks
    passed: str
    """The last stage behind these ranks, as it is typed: ``store``. Empty: none."""
    state: str
    """``paused``, ``waiting``, ``failed``, ``dead`` or ``done``."""
    text: str
    """On what they wait (the store's key, the port, the peer's address), or why they failed."""
    waits_for: Ranks = ()
    since_s: float = 0.0
    """How long they have been in this state."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The result of `%ddp_step`. `about` explains the stage that was entered, in one line."""

    title: str
    rows: tuple[StepRow, ...]
    about: str = ""
    link: str = ""
    """Where torch's documentation says more."""
    next_call: str = ""
    """What to type to go on; empty when there is nothing to go on with."""
    details: tuple[str, ...] = field(default=())
    """Further lines: buckets, orders, sizes."""
