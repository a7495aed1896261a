"""A fault of the lab, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from textwrap import indent

from ddp_notebook.model import Category

ALL = -1
"""In place of a rank: every rank."""
OTHERS = -2
"""In place of a rank: every rank but 0."""

_MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 8)
{change}model = Net()
"""


class Kind(StrEnum):
    """How a fault is injected."""

    SETTINGS = "settings"
    """The session's own setup, with the environment of some ranks changed."""
    SCRIPT = "script"
    """A script on the ranks, with the mistake in it."""
    MODEL = "model"
    """A model that is built differently on rank 1 and then wrapped in DDP."""
    HOSTS = "hosts"
    """A script on ranks of two hosts, with a mistake in their network or their environment."""


@dataclass(frozen=True)
class TwoHosts:
    """The trouble with the second of two hosts, which rank 1 is on, or with the way to it."""

    name: str = "lab-1"
    """The second host's name; the first is lab-0."""
    drops: str = ""
    """The packets that the first host drops: ``store``, ``ranks``, or empty for nothing."""


@dataclass(frozen=True)
class Fault:
    """One fault. What each field is for depends on `kind`, its default is for all others."""

    name: str
    """As the user types it."""
    title: str
    lesson: str
    """Two sentences for a learner: what happens, and why."""
    category: Category
    """The category of the finding that the diagnosis must begin with."""
    culprits: tuple[int, ...]
    """The ranks that finding must name; `(ALL,)` and `(OTHERS,)` stand for several."""
    kind: Kind = Kind.SETTINGS
    min_ranks: int = 2
    passes: bool = False
    """The ranks are only late: setup succeeds in the end."""
    simulated: str = ""
    """The part of it that is not real; empty when all of it is."""

    settings: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables per rank, for `Kind.SETTINGS` and `Kind.HOSTS`.

    Values may hold ``{held_port}`` (another process listens there), ``{free_port}`` (no process
    does; a different one for each rank) and ``{world_size}``.
    """
    store: str = "session"
    """Who hosts the store: ``session``, or ``rank0`` as in a plain script."""
    job: str = ""
    """For `Kind.SCRIPT` and `Kind.HOSTS`: the name of its script in jobs/; empty: as `name`."""
    hosts: TwoHosts = TwoHosts()
    """For `Kind.HOSTS`."""
    change: str = ""
    """For `Kind.MODEL`: what rank 1 does at the end of the model's ``__init__``."""

    def culprits_of(self, world_size: int) -> tuple[int, ...]:
        """`culprits` among `world_size` ranks."""
        if self.culprits in ((ALL,), (OTHERS,)):
            return tuple(range(int(self.culprits == (OTHERS,)), world_size))
        return self.culprits

    @property
    def script(self) -> Path:
        """The script, for `Kind.SCRIPT` and `Kind.HOSTS`."""
        name = self.job or self.name.replace("-", "_")
        return Path(__file__).with_name("jobs") / f"{name}.py"

    def model_source(self, *, faulty: bool) -> str:
        """The cell that makes ``model`` on every rank, with the mistake or without."""
        change = f"if rank == 1:\n{indent(self.change, '    ')}\n" if faulty else ""
        return _MODEL.format(change=indent(change, " " * 8))
