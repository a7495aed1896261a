"""Rules about sends and receives, and about groups of some ranks: who waits for whom in a ring."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.context import Picture, in_slot, named
from ddp_notebook.model import (
    Category,
    Collective,
    Finding,
    Ranks,
    name_ranks,
)

# -- sends and receives ------------------------------------------------------------------


def unmatched_messages(picture: Picture) -> Iterator[Finding]:
    """A send without its recv, a recv without its send, and rings of them."""
    at, graph = picture.graph.at, picture.graph
    told: set[int] = set()
    for ring in graph.cycles:
        messages = tuple(r for r in ring if r in at and at[r].is_point_to_point)
        if messages:
            told.update(ring)
            yield _ring(picture, ring)
    for rank in graph.stuck:
        record = at.get(rank)
        if record is None or not record.is_point_to_point or rank in told:
            continue
        peers = graph.waits[rank]
        gone = tuple(peer for peer in peers if picture.finished(peer))
        if gone and (record.peer is not None or len(gone) == len(peers)):
            yield _peer_gone(picture, rank, record, gone)
        elif all(peer in told for peer in peers):
            continue  # it waits for a ring that is told already


def _ring(picture: Picture, ring: Ranks) -> Finding:
    at = picture.graph.at
    records = {rank: at[rank] for rank in ring if rank in at}
    operations = {record.operation for record in records.values()}
    said = picture.standing(ring)
    if operations == {"send"}:
        remedy = "Let one side receive first, or use dist.batch_isend_irecv (isend and irecv)."
        said = f"each sends first and waits for the other's recv: {said}"
    elif operations == {"recv"}:
        remedy = "Let one side send first, or use dist.batch_isend_irecv (isend and irecv)."
        said = f"each receives first and waits for the other's send: {said}"
    elif operations <= {"send", "recv"} and _tags_differ(records):
        remedy = "Use one tag= on both sides."
        said = f"the tags differ: {said}"
    else:
        remedy = "Pair every send with a recv on its peer before both go on."
        said = f"they wait for each other: {said}"
    return Finding(
        Category.P2P_MISMATCH,
        ring,
        said,
        remedy,
        picture.victims,
        tuple(f"rank {rank}, {_message(record)}" for rank, record in sorted(records.items())),
    )


def _tags_differ(records: dict[int, Collective]) -> bool:
    return any(
        mine.peer == theirs.rank and theirs.peer == mine.rank and mine.tag != theirs.tag
        for mine in records.values()
        for theirs in records.values()
    )


def _message(record: Collective) -> str:
    tag = f", tag {record.tag}" if record.is_point_to_point else ""
    what = f", {record.dtype} {list(record.shape)}" if record.dtype else ""
    return f"{named(record)}{what}{tag}"


def _peer_gone(picture: Picture, rank: int, record: Collective, gone: Ranks) -> Finding:
    left = all(picture.destroyed(peer) for peer in gone)
    those = name_ranks(gone)
    if left:
        return Finding(
            Category.MISSING_DESTROY,
            gone,
            f"{those} destroyed the group, or ended, while rank {rank} is in {named(record)}",
            "Let every rank finish before one leaves: dist.barrier() before "
            "destroy_process_group().",
            picture.victims,
            (f"rank {rank}, {_message(record)}", f"{those}: no process group any more"),
        )
    lacks = "recv" if record.operation == "send" else "send"
    return Finding(
        Category.P2P_MISMATCH,
        gone,
        f"{those} {'has' if len(gone) == 1 else 'have'} finished without the {lacks} that "
        f"rank {rank} waits for in {named(record)}",
        f"Pair every {record.operation} with a {lacks} of the same tag on its peer.",
        picture.victims,
        (f"rank {rank}, {_message(record)}",),
    )


def unequal_messages(picture: Picture) -> Iterator[Finding]:
    """A send and its recv of another dtype, or larger than what it is received into.

    A tensor that is larger than the message is filled in part, and may be meant so.
    """
    for sent, received in wait_graph.pairs(picture.case.collectives):
        if sent.dtype and received.dtype and _do_not_fit(sent, received):
            yield _unequal(picture, sent, received)
            return


def _do_not_fit(sent: Collective, received: Collective) -> bool:
    return sent.dtype != received.dtype or sent.numel > received.numel


def _unequal(picture: Picture, sent: Collective, received: Collective) -> Finding:
    ranks = tuple(sorted({sent.rank, received.rank}))
    return Finding(
        Category.P2P_MISMATCH,
        ranks,
        f"rank {sent.rank} sends {_size(sent)}, rank {received.rank} receives {_size(received)}: "
        f"{named(sent)}; {named(received)}",
        "Receive into a tensor of the shape and dtype that is sent.",
        tuple(rank for rank in picture.victims if rank not in ranks),
        (f"rank {sent.rank}, {_message(sent)}", f"rank {received.rank}, {_message(received)}"),
    )


def _size(record: Collective) -> str:
    return f"{record.dtype} {list(record.shape)}"


# -- groups of some ranks ----------------------------------------------------------------


def strangers(picture: Picture) -> Iterator[Finding]:
    """A rank that uses a group of which it is no member."""
    for group, members in sorted(picture.case.collectives.groups.items()):
        alignment = picture.alignments.get(group)
        for rank, track in sorted(alignment.tracks.items()) if alignment else ():
            if rank not in members:
                record = track.records[0]
                yield Finding(
                    Category.SUBGROUP_MISUSE,
                    (rank,),
                    f"rank {rank} is no member of group {group} ({name_ranks(members)}) and "
                    f"calls {named(record)}",
                    f"Call it on {name_ranks(members)} only.",
                    tuple(r for r in picture.victims if r != rank),
                    (f"rank {rank}, {in_slot(record)}",),
                )


def new_group_not_by_all(picture: Picture) -> Iterator[Finding]:
    """Ranks that wait in `new_group` for ranks that will not call it."""
    inside = tuple(e.rank for e in picture.case.ranks if wait_graph.in_new_group(e))
    stuck = tuple(rank for rank in inside if rank in picture.graph.stuck)
    if not stuck:
        return
    absent = picture.graph.waits[stuck[0]]
    elsewhere = tuple(r for r in absent if r in picture.graph.stuck or picture.finished(r))
    if not elsewhere:
        return
    place = next((e.path[-1] for e in picture.case.ranks if e.rank in stuck and e.path), None)
    where = f" at {place}" if place else ""
    yield Finding(
        Category.SUBGROUP_MISUSE,
        # Where more ranks left it out than call it, the call is what only some do.
        elsewhere if len(elsewhere) <= len(inside) else inside,
        f"{name_ranks(inside)} {'is' if len(inside) == 1 else 'are'} in new_group{where}, which "
        f"{name_ranks(elsewhere)} {'does' if len(elsewhere) == 1 else 'do'} not call: "
        f"{picture.standing(elsewhere)}",
        "Call new_group on every rank of the job, members or not, with the same lists in the "
        "same order.",
        picture.victims,
        (f"{name_ranks(elsewhere)}: not in new_group",),
    )


def opposite_groups(picture: Picture) -> Iterator[Finding]:
    """Ranks that wait for each other in collectives of different groups: a ring."""
    at = picture.graph.at
    for ring in picture.graph.cycles:
        records = [at[rank] for rank in ring if rank in at]
        if len(records) < len(ring) or any(each.is_point_to_point for each in records):
            continue
        if len({each.group for each in records}) < 2:
            continue
        yield _ring_of_groups(picture, ring, records)


def _ring_of_groups(picture: Picture, ring: Ranks, records: list[Collective]) -> Finding:
    places = {(record.group, record.slot) for record in records}
    # Who waits in the same place outside of the ring has a vote too.
    votes = dict.fromkeys(places, 0)
    for each in picture.graph.at.values():
        if (each.group, each.slot) in places:
            votes[each.group, each.slot] += 1
    most = max(votes.values())
    odd = (each.rank for each in records if votes[each.group, each.slot] < most)
    culprits = tuple(sorted(odd)) or ring
    said = picture.standing(ring)
    barriers = all(record.operation == "barrier" for record in records)
    return Finding(
        Category.BARRIER_MISUSE if barriers else Category.MISMATCHED_ORDER,
        culprits,
        f"{'barriers of different groups' if barriers else 'groups used in opposite order'}: "
        f"{said}",
        "Give dist.barrier() the same group on every rank."
        if barriers
        else "Use the groups in one order on every rank.",
        picture.victims,
        tuple(
            f"rank {record.rank} waits in group {record.group} for "
            f"{name_ranks(picture.graph.waits[record.rank])} ({in_slot(record)})"
            for record in sorted(records, key=lambda each: each.rank)
        ),
    )
