"""Rules about sends and receives, and about groups of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.describe import again, named, numbered, verb
from ddp_notebook.diagnosis.collectives.stopped_short import LEAVE_TOGETHER
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import alike
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    Ranks,
    name_ranks,
)

# -- sends and receives ------------------------------------------------------------------


def unmatched_messages(context: Context) -> Iterator[Finding]:
    """A send without its recv, a recv without its send, and rings of them."""
    at, graph = context.graph.at, context.graph
    in_rings: set[int] = set()
    wrong: dict[tuple[str, str, frozenset[str]], Ranks] = {}
    alike: dict[tuple[str, str, frozenset[str]], Ranks] = {}
    for ring in graph.cycles:
        if any(rank in at and at[rank].is_point_to_point for rank in ring):
            in_rings.update(ring)
            cause, remedy, culprits = _mistake(context, ring)
            lines = frozenset(str(at[rank].place) for rank in ring if rank in at)
            key = cause, remedy, lines
            known = alike.get(key)
            alike[key] = ring if known is None else tuple(sorted({*known, *ring}))
            wrong[key] = tuple(sorted({*wrong.get(key, ()), *culprits}))
    for key, ranks in alike.items():
        yield _ring(context, ranks, wrong[key], key[0], key[1])
    for rank, record in sorted(at.items()):
        if not record.is_point_to_point or rank in in_rings or rank not in graph.stuck:
            continue
        peers = graph.waits[rank]
        gone = tuple(peer for peer in peers if context.finished(peer))
        if gone and (record.peer is not None or len(gone) == len(peers)):
            yield _peer_gone(context, rank, record, gone)


def _ring(context: Context, ring: Ranks, culprits: Ranks, cause: str, remedy: str) -> Finding:
    records = {rank: at for rank, at in context.graph.at.items() if rank in ring}
    return Finding(
        Category.P2P_MISMATCH,
        culprits,
        f"{cause}: {context.standing(ring)}",
        remedy,
        context.victims,
        tuple(f"rank {rank}, {_message(record)}" for rank, record in sorted(records.items())),
    )


def _mistake(context: Context, ring: Ranks) -> tuple[str, str, Ranks]:
    """Why ranks wait for each other, what to do about it, and which of them are wrong."""
    records = {rank: at for rank, at in context.graph.at.items() if rank in ring}
    operations = {record.operation for record in records.values()}
    if _tags_differ(records):
        return "the tags differ", "Use one tag= on both sides.", ring
    astray = _astray(records)
    if astray is not None:
        return astray
    if any(record.api in _ASYNC for record in records.values()):
        return "no send meets a recv", "Pair every isend with an irecv on its peer.", ring
    both = ", or use dist.batch_isend_irecv (isend and irecv)."
    if operations == {"send"}:
        cause = "each sends first and waits for the other's recv"
        return cause, f"Let one side receive first{both}", ring
    if operations == {"recv"}:
        cause = "each receives first and waits for the other's send"
        return cause, f"Let one side send first{both}", ring
    remedy = "Pair every send with a recv on its peer before both continue."
    return "they wait for each other", remedy, ring


_ASYNC = ("isend", "irecv", "batch_isend_irecv")


def _astray(records: Mapping[int, Collective]) -> tuple[str, str, Ranks] | None:
    """One rank that addresses a rank which does not answer, while another addresses it."""
    for rank, record in records.items():
        if not record.is_point_to_point or record.peer is None:
            continue
        caller = next((r for r in records if _answers(records[r], rank, record.operation)), None)
        peer = records.get(record.peer)
        if caller is not None and (peer is None or not peer.is_point_to_point):
            does, done = ("receives from", "sends to")
            if record.operation == "send":
                does, done = done, does
            return (
                f"rank {rank} {does} rank {record.peer}, and rank {caller} {done} rank {rank}",
                f"Have ranks {rank} and {caller} name each other on both sides.",
                (rank,),
            )
    return None


def _answers(record: Collective, rank: int, operation: str) -> bool:
    """True of a recv from `rank`, which sends, and of a send to it, which receives."""
    return record.peer == rank and {record.operation, operation} == {"send", "recv"}


def _tags_differ(records: Mapping[int, Collective]) -> bool:
    return any(
        mine.peer in (theirs.rank, None)
        and theirs.peer in (mine.rank, None)
        and mine.tag != theirs.tag
        for mine in records.values()
        for theirs in records.values()
        if mine is not theirs
    )


def _message(record: Collective) -> str:
    tag = f", tag {record.tag}" if record.is_point_to_point else ""
    what = f", {record.dtype} {list(record.shape)}" if record.dtype else ""
    return f"{named(record)}{what}{tag}"


def _peer_gone(context: Context, rank: int, record: Collective, gone: Ranks) -> Finding:
    those = name_ranks(gone)
    if all(context.destroyed(peer) for peer in gone):
        return Finding(
            Category.MISSING_DESTROY,
            gone,
            f"{those} destroyed the group, or ended, while rank {rank} is in {named(record)}",
            LEAVE_TOGETHER,
            context.victims,
            (f"rank {rank}, {_message(record)}", f"{those}: no process group any more"),
        )
    lacks = "recv" if record.operation == "send" else "send"
    return Finding(
        Category.P2P_MISMATCH,
        gone,
        f"{verb(gone, 'has', 'have')} finished without the {lacks} that "
        f"rank {rank} waits for in {named(record)}",
        f"Pair every {record.operation} with a {lacks} of the same tag on its peer.",
        context.victims,
        (f"rank {rank}, {_message(record)}",),
    )


def unequal_messages(context: Context) -> Iterator[Finding]:
    """A send and its recv of another dtype, or larger than what it is received into.

    A tensor that is larger than the message is filled in part, and may be meant so.
    """
    for sent, received in wait_graph.pairs(context.collectives):
        if sent.dtype and received.dtype and _do_not_fit(sent, received):
            yield _unequal(context, sent, received)
            return


def _do_not_fit(sent: Collective, received: Collective) -> bool:
    return sent.dtype != received.dtype or sent.numel > received.numel


def _unequal(context: Context, sent: Collective, received: Collective) -> Finding:
    ranks = tuple(sorted({sent.rank, received.rank}))
    return Finding(
        Category.P2P_MISMATCH,
        ranks,
        f"rank {sent.rank} sends {_size(sent)}, rank {received.rank} receives {_size(received)}: "
        f"{named(sent)}; {named(received)}",
        "Receive into a tensor of the shape and dtype that is sent.",
        context.victims,
        (f"rank {sent.rank}, {_message(sent)}", f"rank {received.rank}, {_message(received)}"),
    )


def _size(record: Collective) -> str:
    return f"{record.dtype} {list(record.shape)}"


# -- groups of some ranks ----------------------------------------------------------------


_SAME_LISTS = (
    "Call new_group on every rank of the job, members or not, with the same lists in the same "
    "order."
)


def disputed_groups(context: Context) -> Iterator[Finding]:
    """Ranks whose groups of one number have other members: torch tells groups by their number."""
    for group, views in sorted(context.collectives.disputed.items()):
        alignment = context.alignments.get(group)
        users = alignment.sequences if alignment else ()
        of = {rank: members for rank, members in views.items() if rank in users}
        if len(set(of.values())) < 2:
            continue  # nobody uses both
        sides = sorted(alike(of), key=lambda side: -len(side[0]))
        outvoted = len(sides[0][0]) > len(sides[1][0])
        # Where as many say this as that, everybody who is meant may have made the mistake.
        named_by = () if outvoted else (member for _, members in sides for member in members)
        culprits = tuple(
            sorted({r for ranks, _ in sides[outvoted:] for r in ranks} | set(named_by))
        )
        yield Finding(
            Category.SUBGROUP_MISUSE,
            culprits,
            f"ranks disagree who is in group {group}: "
            + "; ".join(f"{verb(ranks, 'says', 'say')} {name_ranks(m)}" for ranks, m in sides),
            _SAME_LISTS,
            context.victims,
            tuple(
                f"{name_ranks(ranks)}: group {group} is of {name_ranks(m)}" for ranks, m in sides
            ),
        )
        return  # later groups are numbered wrongly for the same reason


def new_group_not_by_all(context: Context) -> Iterator[Finding]:
    """Ranks that wait in `new_group` for ranks that will not call it."""
    inside = tuple(e.rank for e in context.case.ranks if wait_graph.in_new_group(e))
    stuck = tuple(rank for rank in inside if rank in context.graph.stuck)
    if not stuck:
        return
    absent = context.graph.waits[stuck[0]]
    elsewhere = tuple(r for r in absent if r in context.graph.stuck or context.finished(r))
    if not elsewhere:
        return
    place = next((e.path[-1] for e in context.case.ranks if e.rank in stuck and e.path), None)
    where = f" at {place}" if place else ""
    # Where more ranks left it out than call it, the call is what only some do.
    culprits = elsewhere if len(elsewhere) <= len(inside) else inside
    standing = context.standing(elsewhere)
    them = "it" if len(elsewhere) == 1 else "them"
    cause = f"{verb(inside, 'waits', 'wait')} in new_group{where} for the others: {standing}"
    if culprits == elsewhere:
        cause = (
            f"{verb(elsewhere, 'is', 'are')} not in new_group{where}, in which "
            f"{verb(inside, 'waits', 'wait')} for {them}; {again(standing, elsewhere)}"
        )
    yield Finding(
        Category.SUBGROUP_MISUSE,
        culprits,
        cause,
        _SAME_LISTS,
        context.victims,
        (f"{name_ranks(elsewhere)}: not in new_group",),
    )


_MAKES_S = 5.0
"""Ranks that make groups one after the other are in different ones for a moment."""


def other_groups(context: Context) -> Iterator[Finding]:
    """Ranks that are all in `new_group`, and make groups of other ranks: none of them is done."""
    ranks = context.case.ranks
    if not ranks or not all(wait_graph.in_new_group(e) and e.makes_s >= _MAKES_S for e in ranks):
        return
    of = {e.rank: e.makes for e in ranks}
    disagree = any(of.get(rank, e.makes) != e.makes for e in ranks for rank in e.makes)
    sides = sorted(alike(of), key=lambda side: -len(side[0]))
    if len(sides) < 2 or not all(members for _, members in sides) or not disagree:
        return
    outvoted = len(sides[0][0]) > len(sides[1][0])
    culprits = tuple(sorted(rank for those, _ in sides[outvoted:] for rank in those))
    place = next((f" at {e.path[-1]}" for e in ranks if e.path), "")
    made = [f"{verb(those, 'makes', 'make')} one of {name_ranks(m)}" for those, m in sides[::-1]]
    yield Finding(
        Category.SUBGROUP_MISUSE,
        culprits,
        f"they make other groups at the same time{place}: {'; '.join(made)}",
        f"{_SAME_LISTS} A DeviceMesh makes them of its tensor of ranks: give it one on all ranks.",
        tuple(e.rank for e in ranks if e.rank not in culprits),
        tuple(f"{name_ranks(those)}: new_group of {name_ranks(m)}" for those, m in sides),
    )


def opposite_groups(context: Context) -> Iterator[Finding]:
    """Ranks that wait for each other in collectives of different groups: a ring."""
    at = context.graph.at
    for ring in context.graph.cycles:
        records = [at[rank] for rank in ring if rank in at]
        if len(records) < len(ring) or any(each.is_point_to_point for each in records):
            continue
        if len({each.group for each in records}) < 2:
            continue
        yield _ring_of_groups(context, ring, records)


def _ring_of_groups(context: Context, ring: Ranks, records: list[Collective]) -> Finding:
    places = {(record.group, record.slot) for record in records}
    # Who waits in the same collective outside of the ring has a vote too.
    votes = {rank: (at.group, at.slot) for rank, at in context.graph.at.items()}
    waiting = alike({rank: place for rank, place in votes.items() if place in places})
    most = max(len(ranks) for ranks, _ in waiting)
    outvoted = {rank for ranks, _ in waiting if len(ranks) < most for rank in ranks}
    culprits = tuple(sorted(outvoted.intersection(ring))) or ring
    barriers = all(record.operation == "barrier" for record in records)
    return Finding(
        Category.BARRIER_MISUSE if barriers else Category.MISMATCHED_ORDER,
        culprits,
        f"{'barriers of different groups' if barriers else 'groups used in opposite order'}: "
        f"{context.standing(ring)}",
        "Give dist.barrier() the same group on every rank."
        if barriers
        else "Use the groups in one order on every rank.",
        context.victims,
        tuple(
            f"rank {record.rank} waits in group {record.group} for "
            f"{name_ranks(context.graph.waits[record.rank])} ({numbered(record)})"
            for record in sorted(records, key=lambda each: each.rank)
        ),
    )
