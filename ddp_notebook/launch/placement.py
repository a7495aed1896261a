"""Which rank is on which host: hosts in the order given, ranks in blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, counted

HOST_NAME = re.compile(r"[A-Za-z0-9_]([\w.@-]*[\w.])?", re.ASCII)
"""Matches what ssh takes for a host, and nothing that it takes for an option."""
MOST_RANKS = 256
"""More ranks than this on one machine is a typing error."""


@dataclass(frozen=True)
class HostSpec:
    """A host as the user names it, with its number of ranks; 0: an equal share of the others."""

    name: str
    ranks: int = 0


@dataclass(frozen=True)
class Hello:
    """The facts that a host's agent sends of its machine, once, when it is there."""

    name: str
    """The machine's own name (gethostname), which may differ from what the user calls it."""
    python: str
    torch: str
    """Its version; empty where torch is not installed."""
    product: str
    cores: int
    memory_bytes: int
    """The memory that new processes may take."""
    gpus: tuple[str, ...]
    """The GPUs that ranks may use there, as `devices.visible_gpus` gives them."""
    for_gpus: bool
    """True where torch was built for GPUs there."""
    address: str
    """The address at which it was reached; empty where that is not known."""
    folder: str
    """The session's folder there."""
    current_folder: str
    """The folder that ranks start in there."""
    shared_folder: bool
    """The notebook's current folder is there too, and is the same."""
    clock_offset_ns: int
    """The difference that is added to its monotonic clock to have the notebook's."""
    limits: str
    """Why the ranks placed there cannot start; empty where they can."""


@dataclass(frozen=True)
class Placement:
    """The host of each rank: `sizes` are the ranks of each host, in order.

    Without far hosts all ranks are on host 0, the notebook's own. With them, ranks are on hosts 1,
    2, ... alone; `names` are these hosts' names.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def far(self) -> bool:
        """True where ranks are on other hosts than the notebook's."""
        return bool(self.names)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(self.sizes)

    @property
    def hosts(self) -> range:
        """The numbers of the hosts with ranks."""
        return range(int(self.far), int(self.far) + len(self.sizes))

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return int(self.far) + self.group(rank)[0]

    def name(self, host: int) -> str:
        """Return what the user calls a host; empty for the notebook's own."""
        return self.names[host - 1] if host else ""

    def group(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's host among the hosts with ranks, and how many these are."""
        ends = accumulate(self.sizes)
        return next(i for i, end in enumerate(ends) if rank < end), len(self.sizes)

    def local(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank among those of its host, and how many these are."""
        index, _ = self.group(rank)
        return rank - sum(self.sizes[:index]), self.sizes[index]

    def ranks(self, host: int) -> Ranks:
        """Return the ranks on a host."""
        index = host - int(self.far)
        first = sum(self.sizes[:index])
        return tuple(range(first, first + self.sizes[index]))

    def among(self, ranks: Ranks) -> Placement:
        """Return the placement of a run of these ranks alone, which counts them from 0."""
        counts = Counter(self.host(rank) for rank in ranks)
        hosts = sorted(counts)
        return Placement(tuple(counts[h] for h in hosts), tuple(map(self.name, hosts * self.far)))


def parse_hosts(text: str) -> tuple[HostSpec, ...]:
    """Read ``gpu01,gpu02:4``, or the lines of a host file. Raises UsageMistake.

    In a host file a comment begins with #, and the number of ranks is also written ``slots=4``.
    """
    hosts: dict[str, HostSpec] = {}
    for line in text.splitlines():
        for word in line.partition("#")[0].replace("slots=", ":").replace(" :", ":").split(","):
            name, _, count = word.strip().partition(":")
            if not word.strip():
                continue
            if not HOST_NAME.fullmatch(name) or (count and not re.fullmatch("[0-9]{1,3}", count)):
                raise UsageMistake(
                    f"{word.strip()!r} is no host: a name that ssh knows, and perhaps the number "
                    "of its ranks, such as --hosts gpu01,gpu02:4"
                )
            if name in hosts:
                raise UsageMistake(f"Host {name} is named twice. Name it once: {name}:2")
            hosts[name] = HostSpec(name, int(count or 0))
    if not hosts:
        raise UsageMistake("No host is named. Such as: --hosts gpu01,gpu02:4")
    return tuple(hosts.values())


def place(world_size: int, hosts: Sequence[HostSpec]) -> Placement:
    """Place ranks on hosts: as many as each asks for, the others in equal shares.

    Without `hosts` all are on the notebook's own. Raises UsageMistake where the numbers do not fit.
    """
    if not hosts:
        return Placement((world_size,))
    open_hosts = [host for host in hosts if not host.ranks]
    rest = world_size - sum(host.ranks for host in hosts)
    if rest < len(open_hosts) or (rest and not open_hosts):
        fits = sum(host.ranks or 1 for host in hosts)
        raise UsageMistake(
            f"{counted(world_size, 'rank')} cannot be placed on {counted(len(hosts), 'host')} that "
            f"{'need at least' if open_hosts else 'are to have'} {fits} in all. "
            f"Type: --world-size {fits}"
        )
    each, more = divmod(rest, len(open_hosts)) if open_hosts else (0, 0)
    shares = iter([each + 1] * more + [each] * (len(open_hosts) - more))
    sizes = tuple(host.ranks or next(shares) for host in hosts)
    if max(sizes) > MOST_RANKS:
        raise UsageMistake(
            f"{max(sizes):,} ranks are more than one machine can hold: at most {MOST_RANKS} a host."
        )
    return Placement(sizes, tuple(host.name for host in hosts))
