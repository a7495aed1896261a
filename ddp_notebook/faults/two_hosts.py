"""The faults that need a second host."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_notebook.faults.fault import ALL, Fault, Kind, TwoHosts
from ddp_notebook.model import Category

_SIMULATED = (
    "two network namespaces of this machine stand for the hosts, with rank 1 alone on the second; "
    "that needs Linux and root"
)
_DROPS = f"{_SIMULATED}. A routing rule drops what a firewall would"


def _fault(
    name: str,
    title: str,
    lesson: str,
    category: Category,
    culprits: tuple[int, ...],
    hosts: TwoHosts,
    settings: Mapping[int, Mapping[str, str]] | None = None,
) -> Fault:
    return Fault(
        name,
        title,
        lesson,
        category,
        culprits,
        kind=Kind.HOSTS,
        settings=settings or {},
        store="rank0",
        job="two_hosts",
        simulated=_DROPS if hosts.drops else _SIMULATED,
        hosts=hosts,
    )


TWO_HOSTS = (
    _fault(
        "other-host-localhost",
        "MASTER_ADDR is localhost, and one rank is on another host",
        "Each host takes localhost for itself. The rank on the second host knocks at its own door, "
        "where nobody listens.",
        Category.HOSTNAME_LOOPBACK,
        (1,),
        TwoHosts(),
        {ALL: {"MASTER_ADDR": "localhost"}},
    ),
    _fault(
        "loopback-name",
        "the name of one host means 127.0.0.1",
        "gloo listens where its host's name leads and tells that address to the others. They look "
        "for 127.0.0.1 on their own host and find nobody, or somebody else.",
        Category.HOSTNAME_LOOPBACK,
        (1,),
        TwoHosts(name="localhost"),
        {1: {"GLOO_SOCKET_IFNAME": ""}},
    ),
    _fault(
        "firewall-store",
        "a firewall drops what is for MASTER_PORT",
        "Rank 0 listens, and what comes from the other host is dropped without a word. The rank "
        "there tries again and again until its time-out.",
        Category.UNREACHABLE_MASTER,
        (1,),
        TwoHosts(drops="store"),
    ),
    _fault(
        "firewall-ranks",
        "a firewall drops everything but MASTER_PORT",
        "All ranks reach the store, so they seem to meet. Then they connect to each other at ports "
        "that the system chose, and those are shut.",
        Category.FIREWALL,
        (ALL,),
        TwoHosts(drops="ranks"),
    ),
)
