"""Rules about the store and the network: no answer, gone, left over, a key unset, a firewall."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.progress import evidence_of, in_setup, opens_store, where_busy, works
from ddp_notebook.diagnosis.setup.torch_errors import first_line
from ddp_notebook.model import (
    OWN_STORE,
    Activity,
    Case,
    Finding,
    RankReport,
    by_value,
)

_ENDED = (Activity.FAILED, Activity.DEAD)


def stale_files(context: Context) -> Iterator[Finding]:
    """The file of a ``file://`` rendezvous holds an earlier run's addresses."""
    case = context.case
    callers = tuple(e for e in case.callers if e.arguments.method == "file")
    claimed = [e.arguments.rank for e in callers]
    stale = tuple(e.rank for e in callers if e.arguments.stale)
    proofs = [catalogue.words("stale-store.earlier-run.own", ranks=stale)] if stale else []
    for rank, count in sorted(next((e.file.claims for e in callers if e.file.exists), {}).items()):
        if count > max(1, claimed.count(int(rank))):
            proofs.append(catalogue.words("stale-store.earlier-run.twice", rank=rank))
        elif int(rank) >= case.world_size:
            proofs.append(catalogue.words("stale-store.earlier-run.unknown", rank=rank))
    if proofs:
        yield catalogue.finding(
            "stale-store.earlier-run",
            tuple(e.rank for e in callers),
            waiting=case.waiting,
            evidence=tuple(proofs),
            path=callers[0].arguments.path,
        )


def opened_twice(context: Context) -> Iterator[Finding]:
    """Several ranks open one store with is_master=True, and one could not have the port."""
    case = context.case
    masters = {
        e.rank: f"{e.arguments.master_addr}:{e.arguments.master_port}"
        for e in case.ranks
        if e.arguments.method == OWN_STORE and e.arguments.hosts_store
    }
    for ranks, address in by_value(masters):
        first, others = ranks[0], ranks[1:]
        failed = [e for e in case.ranks if e.rank in ranks and e.activity is Activity.FAILED]
        if others and any("EADDRINUSE" in e.error.text for e in failed):
            yield catalogue.finding(
                "port-in-use.opened-twice",
                others,
                waiting=case.waiting,
                evidence=tuple(f"rank {rank}: is_master=True" for rank in ranks),
                address=address,
                first=first,
            )


def missing_folders(context: Context) -> Iterator[Finding]:
    """The folder that the file of a ``file://`` rendezvous is to be in does not exist."""
    case = context.case
    waiting = tuple(
        e for e in case.ranks if in_setup(e) and e.inside == "store" and e.file.missing_folder
    )
    if waiting:
        yield catalogue.finding(
            "filesystem.no-folder",
            tuple(e.rank for e in waiting),
            waiting=case.waiting,
            evidence=tuple(
                f"rank {e.rank}: {e.file.missing_folder} does not exist" for e in waiting
            ),
            folder=waiting[0].file.missing_folder,
        )


def store_host_left(context: Context) -> Iterator[Finding]:
    """The rank that hosted the store has finished, while others still look for the store."""
    case = context.case
    if not any(in_setup(e) and e.inside == "store" for e in case.ranks):
        return
    for e in case.ranks:
        if e.rank == case.store_host and e.activity is Activity.IDLE and e.entered:
            yield catalogue.finding("store-gone.host-left", (e.rank,), waiting=case.waiting)


def unreachable_store(context: Context) -> Iterator[Finding]:
    """No process answers at MASTER_ADDR:MASTER_PORT, though one should by now."""
    case = context.case
    asking = [e for e in case.ranks if e.activity is Activity.WAITING and e.inside == "store"]
    # A resolver that all ranks ask at once answers some of them seconds later: on its host, they
    # will get the same answer.
    known = {
        (e.arguments.master_addr, e.network.host)
        for e in asking
        if e.network.probe.state == "unresolved"
    }
    unresolved = [
        e
        for e in asking
        if e.network.probe.state in ("unresolved", "resolving")
        and (e.arguments.master_addr, e.network.host) in known
    ]
    if unresolved:
        yield catalogue.finding(
            "unreachable-master.unresolved",
            tuple(e.rank for e in unresolved),
            waiting=case.waiting,
            evidence=tuple(
                f"rank {e.rank}: {e.network.probe.target}: "
                f"{e.network.probe.detail or 'no answer from the resolver yet'}"
                for e in unresolved
            ),
            address=unresolved[0].arguments.master_addr,
        )
    if any(e.arguments.hosts_store and e.activity in _ENDED for e in case.ranks):
        return  # its own error says why it opened none
    shut_out = tuple(
        e
        for e in asking
        if e.network.probe.state in ("refused", "timeout", "other")
        and not e.arguments.hosts_store
        and _should_answer(e, case)
    )
    if shut_out:
        yield _unreachable(case, shut_out)


def unset_keys(context: Context) -> Iterator[Finding]:
    """Find keys for which ranks wait, or waited until their timeout, and that no rank has set.

    A rank that is busy may be late to set it; else it comes no more.
    """
    working = [e for e in context.case.ranks if works(e)]
    for key, waiters in _by_key(e for e in context.case.ranks if wait_graph.waits_for_key(e)):
        unset = _unset_of(context.case, key) or key
        if working:
            yield from (_late_to_set(context, unset, waiters, e) for e in working)
        elif all(e.rank in context.graph.stuck for e in waiters):
            yield from _never_set(context, unset, waiters)
    # A wait that timed out is no proof: the key may have been set a moment later, and whoever works
    # may have been about to. So it counts what the ranks say that they have set by now.
    for key, waiters in _by_key(filter(None, map(_gave_up, context.case.ranks))):
        if not (unset := _unset_of(context.case, key)):
            waiting = tuple(e.rank for e in waiters)
            late = set().union(*(_set_by(context.case, each) for each in key.split(", ")))
            ranks = tuple(sorted(late.difference(waiting)))
            if len(ranks) == 1:  # of several keys only if one rank can be meant
                yield catalogue.finding(
                    "straggler.set-key-too-late",
                    ranks,
                    waiting=context.victims,
                    evidence=(*by_ranks({e.rank: first_line(e) for e in waiters}), *_at(waiters)),
                    key=key,
                    waiters=waiting,
                )
        elif len(working) == 1:
            yield replace(_late_to_set(context, unset, waiters, working[0]), passing=False)
        elif not working:
            yield from _never_set(context, unset, waiters)


def _by_key(waiters: Iterable[RankReport]) -> Iterable[tuple[str, list[RankReport]]]:
    same: dict[str, list[RankReport]] = {}
    for e in waiters:
        same.setdefault(e.awaits.key, []).append(e)
    return same.items()


def _gave_up(e: RankReport) -> RankReport | None:
    """Return a report with the key whose wait has timed out in a call of the user's own."""
    asked = _GIVEN_UP.search(e.error.text) if e.activity is Activity.FAILED else None
    if not asked or not e.error.at or not _ASKS.search(e.error.at[-1].text):
        return None
    key = ", ".join(_OF_TORCH.sub("", each) for each in asked[1].split(", "))
    return replace(e, awaits=replace(e.awaits, key=key), path=e.error.at)


_GIVEN_UP = re.compile(r"wait timeout after \d+ ?ms, keys: (.+)")
_ASKS = re.compile(r"\.(?:wait|get|multi_get)\(")
_OF_TORCH = re.compile(r"^/?(?:default_pg/\d+/+)?")
"""The prefix that torch adds to the names of keys in the default group's store."""


def _unset_of(case: Case, keys: str) -> str:
    """Return those of several keys that no rank is known to have set."""
    return ", ".join(key for key in keys.split(", ") if not _set_by(case, key))


def _set_by(case: Case, key: str) -> set[int]:
    """Return the ranks that have set a key, to whose name their stores have added a prefix."""
    return {e.rank for e in case.ranks for own in e.keys_set if f"/{key}".endswith(f"/{own}")}


def _late_to_set(
    context: Context, key: str, waiters: list[RankReport], late: RankReport
) -> Finding:
    where = f" at {late.path[-1]}" if late.path else where_busy(late)
    return catalogue.finding(
        "straggler.key-not-set-yet",
        (late.rank,),
        waiting=tuple(e.rank for e in waiters),
        evidence=(f"rank {late.rank} is busy{where}", *evidence_of(late)),
        passing=True,
        key=key,
    )


def _never_set(context: Context, key: str, waiters: list[RankReport]) -> Iterator[Finding]:
    """Name the ranks without which a key stays unset: the side with fewer ranks, or all."""
    waiting = tuple(e.rank for e in waiters)
    others = tuple(e.rank for e in context.case.ranks if e.rank not in waiting)
    if any(context.gone(rank) and not context.finished(rank) for rank in others):
        return  # one of them failed or died before it came to that
    ranks = others if 0 < len(others) < len(waiting) else waiting
    facts = _at(waiters)
    facts += (context.standing(others),) if others else ()
    if len(waiting) == len(others):
        ranks = tuple(sorted((*waiting, *others)))
        facts += (catalogue.words("unset-key.never-set.ambiguous"),)
    gave_up = waiters[0].activity is Activity.FAILED
    kind = "unset-key.not-set-in-time" if gave_up else "unset-key.never-set"
    yield catalogue.finding(
        # A loop of the user's may ask for its value.
        "unset-key.no-other-value" if _set_by(context.case, key) else kind,
        ranks,
        waiting=context.victims,
        evidence=(
            *facts,
            *(
                f"rank {e.rank} has set {', '.join(map(repr, e.keys_set[-4:]))}"
                for e in context.case.ranks
                if e.keys_set
            ),
        ),
        key=key,
        waiters=waiting,
    )


def _at(waiters: Iterable[RankReport]) -> tuple[str, ...]:
    """Lines of evidence: where ranks wait, or waited, for a key."""
    return by_ranks({e.rank: e.path[-1] for e in waiters if e.path})


def _should_answer(e: RankReport, case: Case) -> bool:
    """The store's host is known to be past the point where the store opens, or never opens one."""
    # Until its host has opened the store, a refused connection is what every healthy job sees. So
    # it must be known that the host is past that: it waits in a later part of setup, or it has
    # reached the store itself, or the session hosts the store, which opens before any rank begins.
    if opens_store(e):
        return not any(map(works, case.ranks))  # one that works may open it yet
    if case.store_host is None:
        return True
    first = tuple(o for o in case.callers if o.arguments.rank == 0)
    hosts = tuple(o for o in first if o.arguments.hosts_store)
    if hosts:
        # It reaches its own store: so that is open, and only the others are shut out. One that
        # is open elsewhere is where differing values send it.
        port = e.arguments.master_port
        return any(
            h.arguments.master_port == port
            and (h.network.probe.state == "open" or _answers_nobody(h))
            for h in hosts
        )
    # Rank 0 takes the store for another process's, and connects like the others.
    return any((o.activity, o.inside) == (Activity.WAITING, "store") for o in first)


def _answers_nobody(host: RankReport) -> bool:
    """True of who hosts the store, and gets no answer itself at the address that it was given.

    An address of its own host would answer at once: it opens the store before it connects.
    """
    return host.activity is Activity.WAITING and host.network.probe.state == "timeout"


def _unreachable(case: Case, shut_out: tuple[RankReport, ...]) -> Finding:
    ranks = tuple(e.rank for e in shut_out)
    first, address = shut_out[0].network.probe, shut_out[0].arguments.master_addr
    evidence = [
        f"rank {e.rank}: {e.network.probe.target}: {e.network.probe.detail}" for e in shut_out
    ]
    hosts = [h for h in case.callers if h.arguments.hosts_store]
    reached = next((h for h in hosts if h.network.probe.state == "open"), None)
    same = [h for h in hosts if h.network.probe.target == first.target]
    mute = next((h for h in same if _answers_nobody(h)), None)
    host: RankReport | None = None
    timed_out = all(e.network.probe.state == "timeout" for e in shut_out)
    # Several of these are true at once, and the first is told. A name that means each host itself
    # explains that others do not answer better than a firewall does. A firewall is told only where
    # the store answers a rank on its own host, and an address of no host only where its own host
    # gets no answer either: what is left is that nobody listens.
    if case.store_host is None and not case.store_alive:
        kind, ranks = "store-gone.session-store", ()
    elif len({network_of(e) for e in case.ranks} - {""}) > 1 and first.target.startswith(
        ("127.", "localhost")
    ):
        kind = "hostname-loopback.master"
    elif reached is not None and timed_out and all(on_two_hosts(e, reached) for e in shut_out):
        kind = "unreachable-master.dropped"
        host = reached
        evidence.append(f"rank {reached.rank}: {reached.network.probe.target}: open")
    elif mute is not None and timed_out:
        kind = "unreachable-master.not-even-its-host"
        host, ranks = mute, tuple(sorted((*ranks, mute.rank)))
        evidence.append(f"rank {mute.rank}: {mute.network.probe.target}: no answer")
    else:
        kind = "unreachable-master.no-answer"
        if first.state == "other":
            kind = "unreachable-master.other-program"
        if opens_store(shut_out[0]):
            opened = [e for e in case.ranks if e.arguments.hosts_store]
            nowhere = "unreachable-master.never-opened"
            kind = "unreachable-master.opened-elsewhere" if opened else nowhere
            evidence += [
                f"rank {e.rank} opens one at {e.arguments.master_addr}:{e.arguments.master_port}"
                for e in opened
            ]
        told = case.told.get("MASTER_ADDR", ""), case.told.get("MASTER_PORT", "")
        # Evidence alone: the launcher may choose another port at the next start.
        evidence += [f"the launcher set {told[0]}:{told[1]}"] if all(told) else []
    return catalogue.finding(
        kind,
        ranks,
        waiting=case.waiting,
        evidence=tuple(evidence),
        address=address,
        target=first.target,
        detail=first.detail.lower(),
        host=host and host.rank,
        port=host and host.arguments.master_port,
    )


# -- reach -------------------------------------------------------------------------------
# Rules about ranks of several hosts that reach the store, but not each other.


def network_of(evidence: RankReport) -> str:
    """Return the name of the loopback that ranks share; empty where it is not known."""
    return evidence.network.loopback or evidence.network.host


def on_two_hosts(one: RankReport, other: RankReport) -> bool:
    """These two are known to be on two hosts."""
    mine, others = network_of(one), network_of(other)
    return bool(mine and others) and mine != others


def loopback_listeners(context: Context) -> Iterator[Finding]:
    """A rank listens at 127.x alone, and sends that address to ranks of another host.

    Where it has ended by now, the error of a rank that was refused there tells.
    """
    for reports in context.meetings:
        culprits = [
            e
            for e in reports
            if _connects(e) and _at_loopback(e) and any(on_two_hosts(e, o) for o in reports)
        ]
        if not culprits:
            # gloo names the address that it tried, not its rank: so only where it is of one host.
            refused = [
                e
                for e in reports
                if e.activity is Activity.FAILED and _AT_LOOPBACK.search(e.error.text)
            ]
            hosts = {network_of(o) for e in refused for o in reports if on_two_hosts(e, o)}
            culprits = [o for o in reports if {network_of(o)} == hosts]
        if not culprits:
            continue
        ranks, first = tuple(e.rank for e in culprits), culprits[0].network
        elsewhere = tuple(o.rank for o in reports if any(on_two_hosts(e, o) for e in culprits))
        yield catalogue.finding(
            "hostname-loopback.listens",
            ranks,
            waiting=context.case.waiting,
            evidence=(
                *(
                    f"rank {e.rank} listens at {each}"
                    for e in culprits
                    for each in e.network.listens
                ),
                *(
                    f"rank {o.rank}: {o.error.text.strip().splitlines()[0][:300]}"
                    for o in reports
                    if o.activity is Activity.FAILED and "connectFullMesh" in o.error.text
                ),
            ),
            address=next(iter(first.listens), "127.x"),
            host=first.host,
            elsewhere=elsewhere,
        )


_AT_LOOPBACK = re.compile(r"connectFullMesh.*(?:\b127\.\d|(?<![\w:])::1\b)", re.DOTALL)


def _at_loopback(evidence: RankReport) -> bool:
    try:
        hosts = [ipaddress.ip_address(each.rpartition(":")[0]) for each in evidence.network.listens]
    except ValueError:  # a name says nothing of where it is
        return False
    return bool(hosts) and all(host.is_loopback for host in hosts)


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
    # Only probes of an address at which a rank listens at this moment: a port that was given up, or
    # is another process's by now, says nothing about what is between two hosts.
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
    # A probe that times out says that packets are dropped between two hosts, and not on which side.
    # One host that is part of every such pair explains them all. Two hosts of which neither reaches
    # the other do not tell which of them has the firewall: then it is both, as it is everyone that
    # is not reached where no one host explains it.
    pairs = [{network_of(a), network_of(b)} for a, b, _ in blocked]
    hosts = set.intersection(*pairs)
    if len(hosts) != 1:
        hosts = {network_of(b) for _, b, _ in blocked}
    ranks = tuple(e.rank for e in connecting if network_of(e) in hosts)
    unreached = tuple(sorted({b.rank for _, b, _ in blocked}))
    askers = tuple(sorted({a.rank for a, _, _ in blocked}))
    yield catalogue.finding(
        "firewall.both-ways" if unreached == askers else "firewall.one-way",
        ranks,
        waiting=case.waiting,
        evidence=tuple(
            f"rank {a.rank} -> rank {b.rank}: {p.target}: {p.detail}" for a, b, p in blocked
        ),
        unreached=unreached,
        askers=askers,
    )
