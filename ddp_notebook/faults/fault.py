"""What a fault is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ddp_notebook.model import Category

ALL = -1
"""In place of a rank: every rank."""
OTHERS = -2
"""In place of a rank: every rank but 0."""


class Kind(StrEnum):
    """How a fault is injected."""

    SETTINGS = "settings"
    """The session's own set-up, with the environment of some ranks changed."""
    SCRIPT = "script"
    """A script on the ranks, with the mistake in it."""
    MODEL = "model"
    """A model that is built differently on one rank, on its way into DDP."""
    HOSTS = "hosts"
    """A script on ranks of two hosts, with a mistake in their network or their environment."""


@dataclass(frozen=True)
class TwoHosts:
    """What is wrong with the second of two hosts, on which rank 1 is, or with the way to it."""

    name: str = "lab-1"
    """The second host's name; the first is lab-0."""
    drops: str = ""
    """What a firewall on the first host drops: store, ranks, or nothing."""


@dataclass(frozen=True)
class Fault:
    """One fault. `settings` may hold ``{held_port}`` (another process listens there),
    ``{free_port}`` (nobody does; another one for each rank) and ``{world_size}``.

    `culprits` are the ranks that must be found, `(ALL,)` or `(OTHERS,)`. `passes`: it mends
    itself, the ranks are only late. `simulated` says what is not real about it.
    """

    name: str
    title: str
    lesson: str
    """Two sentences for a learner: what happens, and why."""
    category: Category
    culprits: tuple[int, ...]
    kind: Kind = Kind.SETTINGS
    settings: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    store: str = "session"
    init_method: str = "env"
    job: str = ""
    variant: str = ""
    min_ranks: int = 2
    passes: bool = False
    simulated: str = ""
    hosts: TwoHosts = TwoHosts()
    """For `Kind.HOSTS`."""

    def culprits_of(self, world_size: int) -> tuple[int, ...]:
        """The ranks that must be found among `world_size`."""
        if self.culprits in ((ALL,), (OTHERS,)):
            return tuple(range(int(self.culprits == (OTHERS,)), world_size))
        return self.culprits


def job_path(name: str) -> Path:
    """The script of a job."""
    return Path(__file__).with_name("jobs") / f"{name}.py"
