"""Which rank is on which host: hosts in the order given, ranks in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddp_notebook.errors import UsageMistake


@dataclass(frozen=True)
class HostSpec:
    """A host as the user names it, with its number of ranks; 0: an equal share of the others."""

    name: str
    ranks: int = 0


@dataclass(frozen=True)
class Hello:
    """What a host's agent says of its machine, once, when it is there."""

    name: str
    """The machine's own name (gethostname), which may differ from what the user calls it."""
    python: str
    torch: str
    """Its version; empty where torch is not installed."""
    product: str
    cores: int
    memory_bytes: int
    """What new processes may take."""
    gpus: tuple[str, ...]
    """The GPUs that ranks may use there, as `devices.visible_gpus` gives them."""
    for_gpus: bool
    """Whether torch was built for GPUs there."""
    address: str
    """The address at which it was reached; empty where that is not known."""
    folder: str
    """The session's folder there."""
    shared_folder: bool
    """The notebook's current folder is there too, and is the same."""
    clock_offset_ns: int
    """What is added to its monotonic clock to have the notebook's."""
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
    def hosts(self) -> range:
        """The numbers of the hosts with ranks."""
        return range(int(self.far), int(self.far) + len(self.sizes))

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self.group_rank(rank) + int(self.far)

    def name(self, rank: int) -> str:
        """Return what the user calls a rank's host; empty for the notebook's own."""
        return self.names[self.group_rank(rank)] if self.far else ""

    def group_rank(self, rank: int) -> int:
        """Return the index of a rank's host among the hosts with ranks."""
        return next(i for i, end in enumerate(accumulate(self.sizes)) if rank < end)

    def local_rank(self, rank: int) -> int:
        """Return the index of a rank among those of its host."""
        return rank - sum(self.sizes[: self.group_rank(rank)])

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks on a host."""
        index = host - int(self.far)
        first = sum(self.sizes[:index])
        return tuple(range(first, first + self.sizes[index]))

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables by which a rank knows its place."""
        group = self.group_rank(rank)
        return {
            "LOCAL_RANK": str(self.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(self.sizes[group]),
            "GROUP_RANK": str(group),
            "GROUP_WORLD_SIZE": str(len(self.sizes)),
        }


def place(world_size: int, hosts: Sequence[HostSpec]) -> Placement:
    """Place ranks on hosts: as many as each asks for, the others in equal shares.

    Without `hosts` all are on the notebook's own. Raises UsageMistake where the numbers do not fit.
    """
    if not hosts:
        return Placement((world_size,))
    open_hosts = [host for host in hosts if not host.ranks]
    rest = world_size - sum(host.ranks for host in hosts)
    if rest < len(open_hosts) or (rest and not open_hosts):
        asked = ",".join(f"{host.name}:{host.ranks}" if host.ranks else host.name for host in hosts)
        fits = sum(host.ranks or 1 for host in hosts)
        raise UsageMistake(
            f"{world_size} ranks cannot be placed on --hosts {asked}: "
            f"{'each host has at least one' if open_hosts else f'they hold {fits}'}. "
            f"Type: --world-size {fits}"
        )
    each, more = divmod(rest, len(open_hosts)) if open_hosts else (0, 0)
    shares = iter([each + 1] * more + [each] * (len(open_hosts) - more))
    sizes = tuple(host.ranks or next(shares) for host in hosts)
    return Placement(sizes, tuple(host.name for host in hosts))
