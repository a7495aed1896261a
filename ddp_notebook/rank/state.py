"""What this rank is at, for those who ask while its main thread cannot answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """How the last thing that ran here failed."""

    type: str
    text: str
    category: str = ""
    remedy: str = ""


@dataclass
class State:
    """Written by the main thread, read by any."""

    rank: int = -1
    running: bool = False
    """A cell, a script or a stage of set-up runs."""
    waiting_in: str = ""
    """The stage of ours it waits in, when no function of torch tells."""
    held: str = ""
    """The stage it stands before until it is stepped on."""
    doing: str = ""
    error: Failure | None = None
    give_up: threading.Event = field(default_factory=threading.Event)
    """Set to have our own waiting loops end."""


current = State()
