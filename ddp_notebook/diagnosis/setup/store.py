"""Rules about the store: no answer, gone, left over, a key that no rank sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.progress import evidence_of, in_setup, opens_store, where_busy, works
from ddp_notebook.diagnosis.setup.reach import network_of, on_two_hosts
from ddp_notebook.diagnosis.setup.torch_errors import first_line
from ddp_notebook.model import (
    OWN_STORE,
    Activity,
    Case,
    Category,
    Finding,
    RankReport,
    name_ranks,
    verb,
)

_ENDED = (Activity.FAILED, Activity.DEAD)


def stale_files(context: Context) -> Iterator[Finding]:
    """The file of a ``file://`` rendezvous holds an earlier run's addresses."""
    case = context.case
    callers = tuple(e for e in case.callers if e.arguments.method == "file")
    claimed = [e.arguments.rank for e in callers]
    proofs = [
        f"rank {e.rank} found an address of its own in it when it called init_process_group"
        for e in callers
        if e.arguments.stale
    ]
    for rank, count in sorted(next((e.file.claims for e in callers if e.file.exists), {}).items()):
        if count > max(1, claimed.count(int(rank))):
            proofs.append(f"rank {rank} is in it more than once")
        elif int(rank) >= case.world_size:
            proofs.append(f"rank {rank} is in it, and there is no such rank")
    if proofs:
        yield Finding(
            Category.STALE_STORE,
            tuple(e.rank for e in callers),
            f"the file {callers[0].arguments.path} holds the addresses of an earlier run",
            "Delete the file before each run, or use a new name (or env://, tcp://).",
            case.waiting,
            tuple(proofs),
        )


def opened_twice(context: Context) -> Iterator[Finding]:
    """Several ranks open one store with is_master=True, and one could not have the port."""
    case = context.case
    masters: dict[str, list[RankReport]] = {}
    for e in case.ranks:
        if e.arguments.method == OWN_STORE and e.arguments.hosts_store:
            masters.setdefault(_address_of(e), []).append(e)
    for address, reports in masters.items():
        first, *others = (e.rank for e in reports)
        if others and any(_found_port_in_use(e) for e in reports):
            yield Finding(
                Category.PORT_IN_USE,
                tuple(others),
                f"{verb(tuple(others), 'opens', 'open')} the store at {address} with "
                f"is_master=True, as rank {first} does: one process can listen there",
                f"Have one rank open it: TCPStore(..., is_master=(rank == {first})).",
                case.waiting,
                tuple(f"rank {e.rank}: is_master=True" for e in reports),
            )


def _found_port_in_use(e: RankReport) -> bool:
    return e.activity is Activity.FAILED and "EADDRINUSE" in e.error.text


def missing_folders(context: Context) -> Iterator[Finding]:
    """The folder that the file of a ``file://`` rendezvous is to be in does not exist."""
    case = context.case
    waiting = tuple(
        e for e in case.ranks if in_setup(e) and e.inside == "store" and e.file.missing_folder
    )
    if waiting:
        yield Finding(
            Category.FILESYSTEM,
            tuple(e.rank for e in waiting),
            f"the folder {waiting[0].file.missing_folder}, in which init_process_group is to make "
            "the file of its store, does not exist there",
            "Make the folder before, or name a file in one that exists on every rank.",
            case.waiting,
            tuple(f"rank {e.rank}: {e.file.missing_folder} does not exist" for e in waiting),
        )


def store_host_left(context: Context) -> Iterator[Finding]:
    """The rank that hosted the store has finished, while others still look for the store."""
    case = context.case
    if not any(in_setup(e) and e.inside == "store" for e in case.ranks):
        return
    for e in case.ranks:
        if e.rank == case.store_host and e.activity is Activity.IDLE and e.entered:
            yield Finding(
                Category.STORE_GONE,
                (e.rank,),
                "hosted the store and has left, while others still need it",
                "Let rank 0 wait for the others (dist.barrier()) before it ends.",
                case.waiting,
            )


def unreachable_store(context: Context) -> Iterator[Finding]:
    """No process answers at MASTER_ADDR:MASTER_PORT, though one should by now."""
    case = context.case
    unresolved = _unresolved(case)
    if unresolved:
        address = unresolved[0].arguments.master_addr
        yield Finding(
            Category.UNREACHABLE_MASTER,
            tuple(e.rank for e in unresolved),
            f"MASTER_ADDR {address!r} does not resolve",
            "Set MASTER_ADDR to a name or address of rank 0's machine (127.0.0.1 on one machine).",
            case.waiting,
            tuple(f"rank {e.rank}: {e.network.probe.target}: {_answer_of(e)}" for e in unresolved),
        )
    if any(e.arguments.hosts_store and e.activity in _ENDED for e in case.ranks):
        return  # its own error says why it opened none
    shut_out = tuple(
        e
        for e in case.ranks
        if e.activity is Activity.WAITING
        and e.inside == "store"
        and e.network.probe.state in ("refused", "timeout", "other")
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
    for key, waiters in _by_key(filter(None, map(_gave_up, context.case.ranks))):
        if not (unset := _unset_of(context.case, key)):
            yield from _set_too_late(context, key, waiters)
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
"""What torch puts before the names of keys in the default group's store."""


def _unset_of(case: Case, keys: str) -> str:
    """Return those of several keys that no rank is known to have set."""
    return ", ".join(key for key in keys.split(", ") if not _set_by(case, key))


def _set_by(case: Case, key: str) -> set[int]:
    """Return the ranks that have set a key, to whose name their stores have added a prefix."""
    return {e.rank for e in case.ranks for own in e.keys_set if f"/{key}".endswith(f"/{own}")}


def _set_too_late(context: Context, keys: str, waiters: list[RankReport]) -> Iterator[Finding]:
    """Name who set a key after others gave it up; of several keys only if one rank can be meant."""
    waiting = tuple(e.rank for e in waiters)
    late = set().union(*(_set_by(context.case, key) for key in keys.split(", ")))
    ranks = tuple(sorted(late.difference(waiting)))
    if len(ranks) == 1:
        yield Finding(
            Category.STRAGGLER,
            ranks,
            f"{verb(ranks, 'has', 'have')} set the store's key {keys!r} only after "
            f"{name_ranks(waiting)} gave it up{_place(waiters)}: the timeout was over",
            "Give the wait a timeout longer than the slowest rank needs.",
            context.victims,
            by_ranks({e.rank: first_line(e) for e in waiters}),
        )


def _late_to_set(
    context: Context, key: str, waiters: list[RankReport], late: RankReport
) -> Finding:
    where = f" at {late.path[-1]}" if late.path else where_busy(late)
    return Finding(
        Category.STRAGGLER,
        (late.rank,),
        f"it is busy{where}; the store's key {key!r}, for which others wait, is not set yet",
        "Wait for it, or interrupt the cell.",
        tuple(e.rank for e in waiters),
        evidence_of(late),
        passing=True,
    )


def _never_set(context: Context, key: str, waiters: list[RankReport]) -> Iterator[Finding]:
    """Name the ranks without which a key stays unset: the side with fewer ranks, or all."""
    waiting = tuple(e.rank for e in waiters)
    others = tuple(e.rank for e in context.case.ranks if e.rank not in waiting)
    if any(context.gone(rank) and not context.finished(rank) for rank in others):
        return  # one of them failed or died before it came to that
    wait = verb(waiting, "waits", "wait")
    if waiters[0].activity is Activity.FAILED:
        wait = verb(waiting, "waited", "waited")
    where = f": {context.standing(others)}" if others else ""
    ranks = others if 0 < len(others) < len(waiting) else waiting
    if len(waiting) == len(others):
        ranks = tuple(sorted((*waiting, *others)))
        where += "; which rank had to set it is not known"
    lacks = f"the store's key {key!r}, which no rank has set"
    if _set_by(context.case, key):  # a loop of the user's asks for its value
        lacks = f"another value of the store's key {key!r}, which no rank will set"
    yield Finding(
        Category.UNSET_KEY,
        ranks,
        f"{wait}{_place(waiters)} for {lacks}{where}",
        f"Set it before any rank waits for it: store.set({key!r}, ...). Compare the names of the "
        "keys, and that both sides use the same store.",
        context.victims,
        tuple(
            f"rank {e.rank} has set {', '.join(map(repr, e.keys_set[-4:]))}"
            for e in context.case.ranks
            if e.keys_set
        ),
    )


def _place(waiters: Iterable[RankReport]) -> str:
    return next((f" at {e.path[-1]}" for e in waiters if e.path), "")


def _unresolved(case: Case) -> tuple[RankReport, ...]:
    """The ranks whose MASTER_ADDR does not resolve; also those whose resolver has yet to answer.

    A resolver that is asked by all ranks at once answers some of them seconds later.
    """
    asked = [e for e in case.ranks if e.activity is Activity.WAITING and e.inside == "store"]
    known = {
        (e.arguments.master_addr, e.network.host)
        for e in asked
        if e.network.probe.state == "unresolved"
    }
    return tuple(
        e
        for e in asked
        if e.network.probe.state in ("unresolved", "resolving")
        and (e.arguments.master_addr, e.network.host) in known
    )


def _answer_of(e: RankReport) -> str:
    return e.network.probe.detail or "the resolver has not answered yet"


def _should_answer(e: RankReport, case: Case) -> bool:
    """The store's host is known to be past the point where the store opens, or never opens one."""
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
            h.network.probe.state == "open" and h.arguments.master_port == port for h in hosts
        )
    # Rank 0 takes the store for another process's, and connects like the others.
    return any(o.activity is Activity.WAITING and o.inside == "store" for o in first)


def _unreachable(case: Case, shut_out: tuple[RankReport, ...]) -> Finding:
    ranks = tuple(e.rank for e in shut_out)
    first = shut_out[0].network.probe
    evidence = tuple(
        f"rank {e.rank}: {e.network.probe.target}: {e.network.probe.detail}" for e in shut_out
    )
    if case.store_host is None and not case.store_alive:
        return Finding(
            Category.STORE_GONE,
            (),
            f"the session's store at {first.target} is gone",
            "%ddp_init opens it again.",
            case.waiting,
            evidence,
        )
    networks = {network_of(e) for e in case.ranks} - {""}
    if len(networks) > 1 and first.target.startswith(("127.", "localhost")):
        return Finding(
            Category.HOSTNAME_LOOPBACK,
            ranks,
            f"MASTER_ADDR {shut_out[0].arguments.master_addr} means each host itself",
            "Set MASTER_ADDR to the address of rank 0's host, as the others see it.",
            case.waiting,
            evidence,
        )
    if (inside := _open_inside(case, shut_out)) is not None:
        port = inside.arguments.master_port
        return Finding(
            Category.UNREACHABLE_MASTER,
            ranks,
            f"nothing comes back from {first.target} ({first.detail.lower()}), where the store is "
            f"open to rank {inside.rank} on the same host: a firewall drops it, or there is no "
            "route",
            f"Open TCP port {port} of rank {inside.rank}'s host to the others (firewall, security "
            "group), or set MASTER_PORT to a port that is open.",
            case.waiting,
            (*evidence, f"rank {inside.rank}: {inside.network.probe.target}: open"),
        )
    what = f"no process answers at {first.target} ({first.detail.lower()})"
    if first.state == "other":
        what = f"another program answers at {first.target}, and no store of torch's"
    own = opens_store(shut_out[0])
    opened = tuple(e for e in case.ranks if e.arguments.hosts_store)
    return Finding(
        Category.UNREACHABLE_MASTER,
        ranks,
        f"{what}: no rank opens a store there (is_master=True)" if own and not opened else what,
        "Have one rank open the store with is_master=True, and give all ranks its address and port."
        if own
        else "Set MASTER_ADDR and MASTER_PORT to where rank 0, or the launcher, listens"
        f"{_expected_address(case)}.",
        case.waiting,
        (*evidence, *(f"rank {e.rank} opens one at {_address_of(e)}" for e in opened if own)),
    )


def _address_of(e: RankReport) -> str:
    return f"{e.arguments.master_addr}:{e.arguments.master_port}"


def _open_inside(case: Case, shut_out: tuple[RankReport, ...]) -> RankReport | None:
    """The rank whose store is open on its own host, while others hear nothing from it."""
    for host in case.callers:
        if host.arguments.hosts_store and host.network.probe.state == "open":
            silent = all(
                e.network.probe.state == "timeout" and on_two_hosts(e, host) for e in shut_out
            )
            return host if silent else None
    return None


def _expected_address(case: Case) -> str:
    address, port = case.told.get("MASTER_ADDR", ""), case.told.get("MASTER_PORT", "")
    return f" ({address}:{port})" if address and port else ""
