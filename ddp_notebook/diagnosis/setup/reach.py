"""Rules about ranks of several hosts that reach the store, but not each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Finding,
    RankReport,
    Ranks,
    name_ranks,
    verb,
)


def network_of(evidence: RankReport) -> str:
    """What is the same for ranks that share a loopback; empty where it is not known."""
    return evidence.network.loopback or evidence.network.host


def on_two_hosts(one: RankReport, other: RankReport) -> bool:
    """These two are known to be on two hosts."""
    mine, others = network_of(one), network_of(other)
    return bool(mine and others) and mine != others


def loopback_listeners(context: Context) -> Iterator[Finding]:
    """A rank listens at 127.x alone, and sends that address to ranks of another host."""
    for reports in context.meetings:
        culprits = tuple(
            e for e in reports if _connects(e) and _at_loopback(e) and _apart(e, reports)
        )
        if culprits:
            yield _loopback(context.case, reports, culprits)


def _loopback(
    case: Case, reports: tuple[RankReport, ...], culprits: tuple[RankReport, ...]
) -> Finding:
    ranks = tuple(e.rank for e in culprits)
    elsewhere = tuple(o.rank for o in reports if any(on_two_hosts(e, o) for e in culprits))
    first = culprits[0]
    on = f" on {first.network.host}" if first.network.host else ""
    return Finding(
        Category.HOSTNAME_LOOPBACK,
        ranks,
        f"listens at {first.network.listens[0]}{on}, where no other host can reach it: "
        f"{verb(elsewhere, 'is', 'are')} on another host",
        f"Set GLOO_SOCKET_IFNAME on {name_ranks(ranks)} to the interface that the others reach, "
        "or correct /etc/hosts there: the host's name must not resolve to 127.x.",
        case.waiting,
        (
            *(f"rank {e.rank} listens at {each}" for e in culprits for each in e.network.listens),
            *(f"rank {o.rank}: {line}" for o in reports if (line := _gloo_error(o))),
        ),
    )


def _gloo_error(evidence: RankReport) -> str:
    """The error of gloo on a rank that could not connect."""
    failed = evidence.activity is Activity.FAILED and "connectFullMesh" in evidence.error.text
    return evidence.error.text.strip().splitlines()[0][:300] if failed else ""


def _at_loopback(evidence: RankReport) -> bool:
    try:
        hosts = [ipaddress.ip_address(each.rpartition(":")[0]) for each in evidence.network.listens]
    except ValueError:  # a name says nothing of where it is
        return False
    return bool(hosts) and all(host.is_loopback for host in hosts)


def _apart(evidence: RankReport, reports: tuple[RankReport, ...]) -> bool:
    return any(on_two_hosts(evidence, other) for other in reports)


def _connects(evidence: RankReport) -> bool:
    """It waits while the default group's ranks connect to each other."""
    waits = evidence.activity is Activity.WAITING and evidence.inside == "process-group"
    return waits and not evidence.initialized


# -- a firewall --------------------------------------------------------------------------


def blocked_ranks(context: Context) -> Iterator[Finding]:
    """The store answers on every host, and nothing comes back from the other hosts' ranks."""
    case = context.case
    connecting = tuple(
        e for e in case.ranks if _connects(e) and e.network.probe.state in ("", "open")
    )
    where = {each: e for e in connecting for each in e.network.listens}
    blocked = [
        (e, where[probe.target], probe)
        for e in connecting
        for probe in e.network.reach
        if probe.state == "timeout"
        and probe.target in where
        and on_two_hosts(e, where[probe.target])
    ]
    if not blocked:
        return
    hosts = _behind({(network_of(a), network_of(b)) for a, b, _ in blocked})
    ranks = tuple(e.rank for e in connecting if network_of(e) in hosts)
    yield Finding(
        Category.FIREWALL,
        ranks,
        "the store answers, but the ranks cannot reach each other: nothing comes back "
        f"{_from(blocked)}",
        "Open all TCP ports between the hosts of the job (firewall, security group): gloo and NCCL "
        "listen at ports that the system chooses.",
        case.waiting,
        tuple(f"rank {a.rank} -> rank {b.rank}: {p.target}: {p.detail}" for a, b, p in blocked),
    )


def _behind(pairs: set[tuple[str, str]]) -> set[str]:
    """The hosts that a firewall cuts off, by who does not reach whom.

    One host that is part of every such pair explains them all. Two hosts of which neither
    reaches the other do not tell which of them has the firewall: then it is both, as it is
    everyone that is not reached where no one host explains it.
    """
    in_all = set.intersection(*(set(pair) for pair in pairs))
    if len(in_all) == 1:
        return in_all
    return {unreached for _, unreached in pairs}


def _from(blocked: Sequence[tuple[RankReport, RankReport, object]]) -> str:
    """From whom nothing comes back to whom, in words."""
    unreached: Ranks = tuple(sorted({b.rank for _, b, _ in blocked}))
    askers: Ranks = tuple(sorted({a.rank for a, _, _ in blocked}))
    if unreached == askers:
        return "from one host to the other"
    return f"from {name_ranks(unreached)} to {name_ranks(askers)}"
