"""Rules about sends and receives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import permutations

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.describe import code, function_of, lacking, named, tensor
from ddp_notebook.diagnosis.collectives.exits import unwinding
from ddp_notebook.diagnosis.collectives.out_of_step import group_destroyed
from ddp_notebook.diagnosis.collectives.split_models import other_schedules
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.model import Collective, Collectives, Finding, Phase, Ranks, by_value

_ASYNC = ("isend", "irecv", "batch_isend_irecv")


def unmatched_messages(context: Context) -> Iterator[Finding]:
    """Find sends without their recv, recvs without their send, and rings of ranks in them."""
    if any(other_schedules(context)):
        return  # ranks of a pipeline do not agree what to send
    # Messages are judged only where nothing can move any more: a send of a small tensor returns
    # before anybody receives it, so who waits where is no order of events, and a sender that has
    # gone on may well come to its recv later.
    at, graph = context.graph.at, context.graph
    rings: dict[tuple[str, frozenset[str]], set[int]] = {}
    in_rings: set[int] = set()
    raised = {rank for finding in unwinding(context) for rank in finding.ranks}
    for ring in graph.cycles:
        records = [at[rank] for rank in ring if rank in at]
        # While an error unwinds a rank, it matches no other.
        if not raised.isdisjoint(ring) or not any(e.is_point_to_point for e in records):
            continue
        in_rings.update(ring)
        from_any = next((e for e in records if e.operation == "recv" and e.peer is None), None)
        if from_any is not None and not _tags_differ(records):
            yield _unsent(context, from_any)
            continue
        # Pairs that wait at the same lines for the same reason are one mistake.
        lines = frozenset(str(record.place) for record in records)
        rings.setdefault((_why(records), lines), set()).update(ring)
    for (kind, _), ranks in rings.items():
        alike = tuple(sorted(ranks))
        tags = {str(at[rank].tag) for rank in alike if rank in at}
        yield catalogue.finding(
            kind,
            alike,
            waiting=context.victims,
            evidence=tuple(f"rank {rank}, {_message(at[rank])}" for rank in alike if rank in at),
            tags=tuple(sorted(tags)),
            functions=tuple(dict.fromkeys(function_of(at[r]) for r in alike if r in at)),
        )
    for rank, record in sorted(at.items()):
        if not record.is_point_to_point or rank in in_rings or rank not in graph.stuck:
            continue
        peers = graph.waits[rank]
        gone = tuple(peer for peer in peers if context.finished(peer))
        if gone and (record.peer is not None or len(gone) == len(peers)):
            yield _peer_gone(context, rank, record, gone)


def _why(records: Collection[Collective]) -> str:
    """Return the kind of a ring's mistake; which of its ranks is wrong is not judged."""
    if _tags_differ(records):
        return "p2p-mismatch.tags"
    if any(record.api in _ASYNC for record in records):
        return "p2p-mismatch.unpaired"
    operations = {record.operation for record in records}
    if len(operations) > 1:
        return "p2p-mismatch.ring"
    return "p2p-mismatch.send-first" if "send" in operations else "p2p-mismatch.recv-first"


def _tags_differ(records: Collection[Collective]) -> bool:
    """Return whether two of these ranks address each other, under different tags."""
    return any(
        mine.peer in (theirs.rank, None)
        and theirs.peer in (mine.rank, None)
        and mine.tag != theirs.tag
        for mine, theirs in permutations(records, 2)
        if mine.is_point_to_point and theirs.is_point_to_point
    )


def _message(record: Collective) -> str:
    tag = f", tag {record.tag}" if record.is_point_to_point else ""
    what = f", {tensor(record)}" if record.dtype else ""
    return f"{named(record)}{what}{tag}"


def _peer_gone(context: Context, rank: int, record: Collective, gone: Ranks) -> Finding:
    between = partial(wait_graph.between, context.collectives)
    lacks = "recv" if record.operation == "send" else "send"
    # A rank that did it before has left a loop; else it left without serving its peer. So it has
    # where it has not received all that it was sent: a small message is taken by the system, and
    # its sender waits only at what comes next.
    before = all(between(peer, lacks, rank, record) for peer in gone)
    left = not before or any(
        len(between(rank, "send", peer, record)) > len(between(peer, "recv", rank, record))
        for peer in gone
    )
    if left and all(context.destroyed(peer) for peer in gone):
        message = f"rank {rank}, {_message(record)}"
        return group_destroyed(context, gone, (rank,), record, message)
    if record.peer is None:
        return _unsent(context, record)
    return catalogue.finding(
        "p2p-mismatch.peer-finished",
        gone,
        waiting=context.victims,
        evidence=(f"rank {rank}, {_message(record)}",),
        lacking=lacking(record),
        operation=code(record.operation),
        counterpart=code(lacks),
    )


def _unsent(context: Context, record: Collective) -> Finding:
    """Name who has sent less to a recv from any rank than others have.

    Where all have sent as many messages, the receiver waits for one too many itself.
    """
    rank = record.rank
    sent = {
        other: len(wait_graph.between(context.collectives, other, "send", rank, record))
        for other in wait_graph.members(context.case, record.group)
        if other != rank
    }
    few = tuple(other for other, count in sent.items() if count < max(sent.values()))
    counts = (
        catalogue.words("p2p-mismatch.unsent.sent", ranks=who, receiver=(rank,), count=count)
        for who, count in by_value(sent)
    )
    return catalogue.finding(
        "p2p-mismatch.unsent",
        few or (rank,),
        waiting=context.victims,
        evidence=(f"rank {rank}, {_message(record)}", *counts),
        receiver=(rank,),
    )


def unequal_counts(collectives: Collectives) -> tuple[str, ...]:
    """Return a line of evidence for each two ranks whose sends and recvs differ in number.

    None of ranks whose older records were dropped, or that receive from a rank not known yet.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    unknown = {rank for rank, first in collectives.first.items() if first}
    for rank, records in collectives.of.items():
        for record in records:
            if not record.is_point_to_point or record.phase in (Phase.HELD, Phase.REFUSED):
                continue
            if record.peer is None:
                unknown.add(rank)
            elif record.operation == "send":
                counts.setdefault((rank, record.peer), [0, 0])[0] += 1
            else:
                counts.setdefault((record.peer, rank), [0, 0])[1] += 1
    return tuple(
        catalogue.words(
            "undecided.nothing-moves.messages",
            sender=pair[:1],
            receiver=pair[1:],
            sent=sent,
            received=received,
        )
        for pair, (sent, received) in sorted(counts.items())
        if sent != received and unknown.isdisjoint(pair)
    )


def unequal_messages(context: Context) -> Iterator[Finding]:
    """A send and its recv of another dtype, or larger than what it is received into.

    A tensor that is larger than the message is filled partly, which may be intended.
    """
    if any(other_schedules(context)):
        return
    for sent, received in wait_graph.pairs(context.collectives):
        unequal = sent.dtype != received.dtype or sent.numel > received.numel
        if sent.dtype and received.dtype and unequal:
            yield catalogue.finding(
                "p2p-mismatch.unequal",
                tuple(sorted({sent.rank, received.rank})),
                waiting=context.victims,
                evidence=tuple(f"rank {r.rank}, {_message(r)}" for r in (sent, received)),
                sender=(sent.rank,),
                receiver=(received.rank,),
                sends=tensor(sent),
                receives=tensor(received),
            )
            return
