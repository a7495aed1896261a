"""Rules about sends and receives."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.describe import named
from ddp_notebook.diagnosis.collectives.exits import unwinding
from ddp_notebook.diagnosis.collectives.rings import misdirected, mistake, unsent
from ddp_notebook.diagnosis.collectives.stopped_short import LEAVE_TOGETHER
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    Ranks,
    name_ranks,
    verb,
)


def unmatched_messages(context: Context) -> Iterator[Finding]:
    """A send without its recv, a recv without its send, and rings of them."""
    at, graph = context.graph.at, context.graph
    in_rings: set[int] = set()
    wrong: dict[tuple[str, str, frozenset[str]], Ranks] = {}
    stuck: dict[tuple[str, str, frozenset[str]], Ranks] = {}
    raised = {rank for finding in unwinding(context) for rank in finding.ranks}
    astray = misdirected(context) if graph.cycles else None
    for ring in graph.cycles:
        if not raised.isdisjoint(ring):
            continue  # while an error unwinds them, they match no rank
        if any(rank in at and at[rank].is_point_to_point for rank in ring):
            in_rings.update(ring)
            cause, remedy, culprits = mistake(context, ring, astray)
            lines = frozenset(str(at[rank].place) for rank in ring if rank in at)
            key = cause, remedy, lines
            known = stuck.get(key)
            stuck[key] = ring if known is None else tuple(sorted({*known, *ring}))
            wrong[key] = tuple(sorted({*wrong.get(key, ()), *culprits}))
    for key, ranks in stuck.items():
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


def _message(record: Collective) -> str:
    tag = f", tag {record.tag}" if record.is_point_to_point else ""
    what = f", {record.dtype} {list(record.shape)}" if record.dtype else ""
    return f"{named(record)}{what}{tag}"


def _peer_gone(context: Context, rank: int, record: Collective, gone: Ranks) -> Finding:
    those = name_ranks(gone)
    lacks = "recv" if record.operation == "send" else "send"
    # A rank that did it before has left a loop; else it left without serving its peer.
    before = all(_has_done(context, peer, lacks, rank, record) for peer in gone)
    left = not before or any(_owes_a_recv(context, peer, rank, record) for peer in gone)
    if left and all(context.destroyed(peer) for peer in gone):
        return Finding(
            Category.MISSING_DESTROY,
            gone,
            f"{those} destroyed the group, or ended, while rank {rank} is in {named(record)}",
            LEAVE_TOGETHER,
            context.victims,
            (f"rank {rank}, {_message(record)}", f"{those}: no process group any more"),
        )
    if record.peer is None:
        cause, remedy, culprits = unsent(context, record)
        message = f"rank {rank}, {_message(record)}"
        return Finding(Category.P2P_MISMATCH, culprits, cause, remedy, context.victims, (message,))
    return Finding(
        Category.P2P_MISMATCH,
        gone,
        f"{verb(gone, 'has', 'have')} finished without the {lacks} that "
        f"rank {rank} waits for in {named(record)}",
        f"Pair every {record.operation} with a {lacks} of the same tag on its peer.",
        context.victims,
        (f"rank {rank}, {_message(record)}",),
    )


def _owes_a_recv(context: Context, peer: int, rank: int, record: Collective) -> bool:
    """True when `rank` has sent `peer` more than that received: it left before its time.

    A small message is taken by the system, and its sender waits only at what comes next.
    """
    sent = wait_graph.between(context.collectives, rank, "send", peer, record)
    received = wait_graph.between(context.collectives, peer, "recv", rank, record)
    return len(sent) > len(received)


def _has_done(context: Context, peer: int, operation: str, rank: int, record: Collective) -> bool:
    return bool(wait_graph.between(context.collectives, peer, operation, rank, record))


def unequal_messages(context: Context) -> Iterator[Finding]:
    """A send and its recv of another dtype, or larger than what it is received into.

    A tensor that is larger than the message is filled partly, which may be intended.
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
