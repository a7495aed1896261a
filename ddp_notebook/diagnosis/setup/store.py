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
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.singled_out import who_sets
from ddp_notebook.model import (
    OWN_STORE,
    Activity,
    Case,
    Category,
    Collective,
    Finding,
    RankReport,
    Ranks,
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
    return e.activity is Activity.FAILED and "EADDRINUSE" in e.error_text


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
            tuple(f"rank {e.rank}: {e.probe.target}: {_answer_of(e)}" for e in unresolved),
        )
    if any(e.arguments.hosts_store and e.activity in _ENDED for e in case.ranks):
        return  # its own error says why it opened none
    shut_out = tuple(
        e
        for e in case.ranks
        if e.activity is Activity.WAITING
        and e.inside == "store"
        and e.probe.state in ("refused", "timeout", "other")
        and not e.arguments.hosts_store
        and _should_answer(e, case)
    )
    if shut_out:
        yield _unreachable(case, shut_out)


def unset_keys(context: Context) -> Iterator[Finding]:
    """Keys for which ranks wait: that no rank can set any more, or that one is late to set."""
    ranks_of: dict[str, list[RankReport]] = {}
    for e in context.case.ranks:
        if wait_graph.waits_for_key(e):
            ranks_of.setdefault(_unset_of(context.case, e.key), []).append(e)
    for key, waiters in ranks_of.items():
        working = [e for e in context.case.ranks if works(e)]
        if working:
            yield from (_late_to_set(context, key, waiters, e) for e in working)
        elif all(e.rank in context.graph.stuck for e in waiters):
            yield from _never_set(context, key, waiters)


def given_up_keys(context: Context) -> Iterator[Finding]:
    """Keys for which ranks waited until their timeout: set too late, not set yet, or by no rank."""
    same: dict[str, list[RankReport]] = {}
    for e in context.case.ranks:
        asked = _GIVEN_UP.search(e.error_text) if e.activity is Activity.FAILED else None
        if asked and e.error_at and _ASKS.search(e.error_at[-1].text):
            key = ", ".join(_OF_TORCH.sub("", each) for each in asked[1].split(", "))
            same.setdefault(key, []).append(replace(e, key=key, path=e.error_at))
    for keys, waiters in same.items():
        unset = [key for key in keys.split(", ") if not _set_by(context.case, key)]
        if unset:
            yield from _not_set_in_time(context, ", ".join(unset), waiters)
        else:
            yield from _set_too_late(context, keys, waiters)


def _set_by(case: Case, key: str) -> set[int]:
    """The ranks that have set a key, to whose name their stores have added a prefix."""
    return {e.rank for e in case.ranks for own in e.keys_set if f"/{key}".endswith(f"/{own}")}


def _set_too_late(context: Context, keys: str, waiters: list[RankReport]) -> Iterator[Finding]:
    """Who set a key after others gave it up; of several keys only if one rank can be meant."""
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
            _texts_of(waiters),
        )


def _not_set_in_time(context: Context, key: str, waiters: list[RankReport]) -> Iterator[Finding]:
    """A key that no rank has set: one that is busy may be late, else it is never set."""
    working = [e for e in context.case.ranks if works(e)]
    if not working:
        yield from _never_set(context, key, waiters)
    elif len(working) == 1:
        yield replace(_late_to_set(context, key, waiters, working[0]), passing=False)


def _texts_of(reports: Iterable[RankReport]) -> tuple[str, ...]:
    return by_ranks({e.rank: first_line(e) for e in reports})


_GIVEN_UP = re.compile(r"wait timeout after \d+ ?ms, keys: (.+)")
_ASKS = re.compile(r"\.(?:wait|get|multi_get)\(")
_OF_TORCH = re.compile(r"^/?(?:default_pg/\d+/+)?")
"""What torch puts before the names of keys in the default group's store."""


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
    waiting = tuple(e.rank for e in waiters)
    others = tuple(e.rank for e in context.case.ranks if e.rank not in waiting)
    if any(context.gone(rank) and not context.finished(rank) for rank in others):
        return  # one of them failed or died before it came to that
    wait, place = verb(waiting, "waits", "wait"), _place(waiters)
    if waiters[0].activity is Activity.FAILED:
        wait = verb(waiting, "waited", "waited")
    where = f": {context.standing(others)}" if others else ""
    lacks, remedy = _what_lacks(key, next((e.key_test for e in waiters if e.key_test), ""))
    owners = tuple(sorted(set().union(*(_owners(context.case, k) for k in key.split(", ")))))
    known = owners or _told_to_set(context, key, waiters, others)
    ranks = known or _likely(waiting, others)
    if not known and len(waiting) == len(others):
        where += "; whose it is to set cannot be told"
    yield Finding(
        Category.UNSET_KEY,
        ranks,
        f"{wait}{place} for {lacks}{_whose(known, bool(owners))}{where}",
        f"{remedy} Compare the names of the keys, and that both sides use the same store.",
        context.victims,
        (
            f"{wait} for the key {key!r}",
            *((context.standing(others),) if others else ()),
            *(_keys_of_each(context.case) if owners else ()),
        ),
    )


def _likely(waiting: Ranks, others: Ranks) -> Ranks:
    """Where most ranks wait for a key, it is the others who had to set it; else the odd ones."""
    if len(waiting) == len(others):
        return tuple(sorted((*waiting, *others)))
    return others if others and len(others) < len(waiting) else waiting


def _told_to_set(context: Context, key: str, waiters: list[RankReport], others: Ranks) -> Ranks:
    """Those of the others that had to set a key, as its name or the code tells; else none."""
    named = {int(number) for number in _RANK_IN_KEY.findall(key)} & set(others)
    if named or not others:
        return tuple(sorted(named))
    waiting = tuple(e.rank for e in waiters)
    setting = who_sets(context.sources, key, tuple(sorted((*waiting, *others))))
    if setting and set(setting).isdisjoint(waiting):
        return setting
    is_tie = len(waiting) == len(others)
    return others if is_tie and _wait_by_rank(context, waiters, others) else ()


def _wait_by_rank(context: Context, waiters: list[RankReport], others: Ranks) -> bool:
    """True where a test lets just these ranks come to where they wait: the others are to set it."""
    waiting = tuple(e.rank for e in waiters)
    waits = [Collective(0, 0, e.key, path=e.path) for e in waiters]
    tests = [context.sources.condition(e, reached=waiting, others=others) for e in waits]
    return all(test is not None and test.decides is Varies.JUST_SO for test in tests)


def _keys_of_each(case: Case) -> Iterator[str]:
    for e in case.ranks:
        if e.keys_set:
            keys = ", ".join(map(repr, e.keys_set[-_MOST_SHOWN:]))
            yield f"rank {e.rank} has set {keys}"


def _place(waiters: Iterable[RankReport]) -> str:
    return next((f" at {e.path[-1]}" for e in waiters if e.path), "")


def _what_lacks(key: str, test: str) -> tuple[str, str]:
    """What is waited for, and the remedy; `test` is what a loop asks about the key."""
    if test:
        return (
            f"another value of the store's key {key!r} ({test}), which no rank will set",
            "Set it to what the loop asks for before any rank asks.",
        )
    return (
        f"the store's key {key!r}, which no rank has set",
        f"Set it before any rank waits for it: store.set({key!r}, ...).",
    )


def _unset_of(case: Case, keys: str) -> str:
    """Those of several keys that no rank is known to have set; all if each was."""
    known = {each for e in case.ranks for each in e.keys_set}
    return ", ".join(each for each in keys.split(", ") if each not in known) or keys


def _owners(case: Case, key: str) -> set[int]:
    """Who had to set a key, as the ranks' other keys show: ``done/3/1`` was set by rank 1.

    A key with the rank's number, or that goes on counting where one rank alone has counted.
    """
    words = _NUMBERS.split(key)
    of: dict[int, list[tuple[str, str]]] = {}
    for e in case.ranks:
        for own in map(_NUMBERS.split, e.keys_set):
            if len(words) > 1 and own[::2] == words[::2]:
                pairs = zip(own[1::2], words[1::2], strict=True)
                of.setdefault(e.rank, []).extend(_only_other(pairs))
    by_number = {int(to) for rank, pairs in of.items() for was, to in pairs if was == str(rank)}
    owners = by_number & {e.rank for e in case.ranks}
    return owners if owners or len(of) > 1 else set(of)


def _only_other(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pair of numbers that are not the same, if there is one alone."""
    found = [(a, b) for a, b in pairs if a != b]
    return found if len(found) == 1 else []


_NUMBERS = re.compile(r"(\d+)")
_RANK_IN_KEY = re.compile(r"(?:rank|worker|replica)[-_/:. ]?(\d+)", re.ASCII | re.IGNORECASE)
_MOST_SHOWN = 4


def _whose(ranks: Ranks, by_other_keys: bool) -> str:
    """Words for the ranks that had to set a key, and for what tells that."""
    if not ranks:
        return ""
    shown = "the names of the other keys show" if by_other_keys else "its name or the code tells"
    return f": it is {name_ranks(ranks)}'s to set, as {shown}"


def _unresolved(case: Case) -> tuple[RankReport, ...]:
    """The ranks whose MASTER_ADDR does not resolve; also those whose resolver has yet to answer.

    A resolver that is asked by all ranks at once answers some of them seconds later.
    """
    asked = [e for e in case.ranks if e.activity is Activity.WAITING and e.inside == "store"]
    known = {(e.arguments.master_addr, e.host) for e in asked if e.probe.state == "unresolved"}
    return tuple(
        e
        for e in asked
        if e.probe.state in ("unresolved", "resolving")
        and (e.arguments.master_addr, e.host) in known
    )


def _answer_of(e: RankReport) -> str:
    return e.probe.detail or "the resolver has not answered yet"


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
        return any(h.probe.state == "open" and h.arguments.master_port == port for h in hosts)
    # Rank 0 takes the store for another process's, and connects like the others.
    return any(o.activity is Activity.WAITING and o.inside == "store" for o in first)


def _unreachable(case: Case, shut_out: tuple[RankReport, ...]) -> Finding:
    ranks = tuple(e.rank for e in shut_out)
    first = shut_out[0].probe
    evidence = tuple(f"rank {e.rank}: {e.probe.target}: {e.probe.detail}" for e in shut_out)
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
            (*evidence, f"rank {inside.rank}: {inside.probe.target}: open"),
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
        if host.arguments.hosts_store and host.probe.state == "open":
            silent = all(e.probe.state == "timeout" and on_two_hosts(e, host) for e in shut_out)
            return host if silent else None
    return None


def _expected_address(case: Case) -> str:
    address, port = case.told.get("MASTER_ADDR", ""), case.told.get("MASTER_PORT", "")
    return f" ({address}:{port})" if address and port else ""
