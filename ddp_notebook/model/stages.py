"""The stages of setup, and the table that a step of the debugger gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ddp_notebook.model.ranks import Ranks


class Stage(StrEnum):
    """One step of bringing torch.distributed up, in order. The value is what a user types."""

    LAUNCHED = "launched"
    ENVIRONMENT = "environment"
    STORE = "store"
    RENDEZVOUS = "rendezvous"
    PROCESS_GROUP = "process-group"
    VERIFIED = "verified"

    @property
    def label(self) -> str:
        """Return what holds for a rank that has passed this stage."""
        return _STAGE_LABELS[self]

    @property
    def about(self) -> str:
        """Return what happens in this stage, in one line."""
        return _STAGE_ABOUT[self]

    @property
    def link(self) -> str:
        """Where torch's documentation says more."""
        return _STAGE_LINKS[self]

    @property
    def number(self) -> int:
        """1 for the first stage."""
        return list(Stage).index(self) + 1


_STAGE_LABELS = {
    Stage.LAUNCHED: "launched",
    Stage.ENVIRONMENT: "environment checked",
    Stage.STORE: "store reachable",
    Stage.RENDEZVOUS: "joined rendezvous",
    Stage.PROCESS_GROUP: "process group",
    Stage.VERIFIED: "verified",
}

_STAGE_ABOUT = {
    Stage.LAUNCHED: "A process runs for the rank; it has loaded torch and knows nothing yet.",
    Stage.ENVIRONMENT: (
        "The rank reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as env:// does."
    ),
    Stage.STORE: (
        "The rank connects to the TCPStore, a small key-value server at MASTER_ADDR:MASTER_PORT."
    ),
    Stage.RENDEZVOUS: "The rank writes its key into the store and waits until every rank has.",
    Stage.PROCESS_GROUP: (
        "init_process_group: the ranks read each other's addresses from the store and connect."
    ),
    Stage.VERIFIED: "One all_reduce of all ranks, whose result is checked on every rank.",
}
_DOCS = "https://pytorch.org/docs/stable/"
_STAGE_LINKS = {
    Stage.LAUNCHED: f"{_DOCS}elastic/run.html",
    Stage.ENVIRONMENT: f"{_DOCS}distributed.html#environment-variable-initialization",
    Stage.STORE: f"{_DOCS}distributed.html#torch.distributed.TCPStore",
    Stage.RENDEZVOUS: f"{_DOCS}distributed.html#distributed-key-value-store",
    Stage.PROCESS_GROUP: f"{_DOCS}distributed.html#torch.distributed.init_process_group",
    Stage.VERIFIED: f"{_DOCS}distributed.html#torch.distributed.all_reduce",
}


@dataclass(frozen=True, slots=True)
class StepRow:
    """One rank, or several in the same place. `waits_for` are the ranks whose arrival it needs."""

    ranks: Ranks
    passed: str
    """The last stage behind these ranks, as it is typed: ``store``. Empty: none."""
    state: str
    """``paused``, ``waiting``, ``failed``, ``dead`` or ``done``."""
    text: str
    """Their reason to wait (the store's key, the port, the peer's address), or to fail."""
    waits_for: Ranks = ()
    since_s: float = 0.0
    """How long they have been in this state."""
    limit_s: float = 0.0
    """After how long torch gives up what they wait in; 0 for never, or a day and more."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The result of `%ddp_step`. `about` explains the stage that was entered, in one line."""

    title: str
    rows: tuple[StepRow, ...]
    about: str = ""
    link: str = ""
    """Where torch's documentation says more."""
    next_call: str = ""
    """The command that continues; empty if there is nothing left to step."""
    details: tuple[str, ...] = field(default=())
    """Further lines: buckets, orders, sizes."""


OWN_STORE = "TCPStore"
"""The method in `InitArguments` while the user's own code opens a store."""

PRIVATE_STORE = "HashStore"
"""The `store` of `InitArguments` that is in one process only."""


@dataclass(frozen=True, slots=True)
class InitArguments:
    """A rank's arguments of `init_process_group`, actual or intended. None and "" if unknown.

    `method` is env, tcp, file or store; OWN_STORE before that call, if the user's code opens a
    TCPStore itself: then the arguments are those of the store. `raw` holds values as the rank's
    environment has them, by the name of the variable; values that are not numbers are only there.
    """

    method: str = "env"
    rank: int | None = None
    world_size: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    path: str = ""
    backend: str = ""
    timeout_s: float | None = None
    hosts_store: bool = False
    store: str = ""
    """Identifies the store that was given to the call: the same for ranks that share it."""
    stale: bool = False
    """When it called, the file at `path` held an address of its own rank already."""
    raw: Mapping[str, str] = field(default_factory=dict)
