"""Rings of messages: why ranks wait for each other's sends and receives, and which one is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import call_site
from ddp_notebook.diagnosis.collectives.describe import named
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.model import (
    Collective,
    Phase,
    Place,
    Ranks,
    by_value,
    name_ranks,
)

_Way: TypeAlias = tuple[int, int, str, int]
"""A message's sender and receiver, its group and tag."""


def mistake(
    context: Context, ring: Ranks, misdirected: tuple[str, str, Ranks] | None
) -> tuple[str, str, Ranks]:
    """Why ranks wait for each other, the remedy, and the culprits."""
    records = {rank: at for rank, at in context.graph.at.items() if rank in ring}
    if _tags_differ(records):
        odd = _with_odd_tags(context, records)
        culprits = odd if len(odd) == 1 else tuple(sorted({*ring, *_by_other_tags(context)}))
        return "the tags differ", "Use one tag= on both sides.", culprits
    if misdirected is not None and set(misdirected[2]) <= set(ring):
        return misdirected
    known = _first(_CERTAIN, context, records)
    if known is not None:
        return known
    if any(record.api in _ASYNC for record in records.values()):
        return "no send meets a recv", "Pair every isend with an irecv on its peer.", ring
    return _first(_LIKELY, context, records) or _undecided(records, ring)


def _first(
    rules: Sequence[_Rule], context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    return next((found for rule in rules if (found := rule(context, records))), None)


def _undecided(records: Mapping[int, Collective], ring: Ranks) -> tuple[str, str, Ranks]:
    """What is said of a ring in which no rank can be blamed more than the others."""
    operations = {record.operation for record in records.values()}
    both = ", or use dist.batch_isend_irecv (isend and irecv)."
    if operations == {"send"}:
        cause = "each sends first and waits for the other's recv"
        return cause, f"Let one side receive first{both}", ring
    if operations == {"recv"}:
        cause = "each receives first and waits for the other's send"
        return cause, f"Let one side send first{both}", ring
    remedy = "Pair every send with a recv on its peer before both continue."
    return "they wait for each other", remedy, ring


_FEWEST_OTHERS = 2
_OPERATIONS = {"send", "recv"}
_ANSWER_ALWAYS = "Answer every message, also where there is nothing to say: send an empty result."
_ASYNC = ("isend", "irecv", "batch_isend_irecv")


def misdirected(context: Context) -> tuple[str, str, Ranks] | None:
    """Several ranks whose peers do not address them, while as many others do.

    If the senders of messages that no rank receives are those that others wait for, they named the
    wrong peers. If their receivers are, those did. If both are, either may be wrong.
    """
    lost, lacking = _unpaired(context)
    of_senders = _ends(lost, 0) == _ends(lacking, 0)
    if len(lost) < 2 or of_senders == (_ends(lost, 1) == _ends(lacking, 1)):
        return None
    mine, theirs = (lost, lacking) if of_senders else (lacking, lost)
    own, peer = (0, 1) if of_senders else (1, 0)
    does, done = ("sends to", "receives from")[:: 1 if of_senders else -1]
    callers = {way[:2][own]: way[:2][peer] for way in theirs}
    wrong = [
        f"rank {w[own]} {does} rank {w[peer]}, and rank {callers[w[:2][own]]} {done} rank {w[own]}"
        for w in mine
    ]
    return (
        "; ".join(sorted(wrong)),
        "Have each rank and its peer name each other: look at how the peer is computed, most of "
        "all at the first and the last rank.",
        tuple(sorted(callers)),
    )


def _unpaired(context: Context) -> tuple[Counter[_Way], Counter[_Way]]:
    """The messages that are sent and not received, and the reverse.

    Both are empty if a rank receives from any source, or if its records are not complete.
    """
    sent: Counter[_Way] = Counter()
    received: Counter[_Way] = Counter()
    for rank, records in context.collectives.of.items():
        for record in records:
            if not record.is_point_to_point or record.phase in (Phase.HELD, Phase.REFUSED):
                continue
            if record.peer is None or context.collectives.first.get(rank):
                return Counter(), Counter()
            if record.operation == "send":
                sent[rank, record.peer, record.group, record.tag] += 1
            else:
                received[record.peer, rank, record.group, record.tag] += 1
    return sent - received, received - sent


def _ends(ways: Counter[_Way], end: int) -> Counter[tuple[object, ...]]:
    """How often each rank is the sender (0) or the receiver (1)."""
    return Counter((way[end], *way[2:]) for way in ways.elements())


def _against_the_ring(
    context: Context, _: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """The ranks that send and receive round a ring in another direction than most.

    All do so at the same lines: the ends of a pipeline are at others. Where a ring closes, and in
    rings of some ranks only, peers are further away: there all answer.
    """
    size = context.case.world_size
    ways: dict[int, frozenset[tuple[str, int]]] = {}
    lines: set[frozenset[tuple[str, Place | None]]] = set()
    for rank, issued in context.collectives.of.items():
        here = [e for e in issued if e.is_point_to_point][-2:]
        ways[rank] = frozenset((e.operation, e.peer) for e in here if e.peer is not None)
        lines.add(frozenset((e.operation, e.place) for e in here))
    if len(lines) > 1 or any({what for what, _ in way} != _OPERATIONS for way in ways.values()):
        return None
    around = vote(
        {
            rank: frozenset((operation, (peer - rank) % size) for operation, peer in way)
            for rank, way in ways.items()
        }
    )
    against = around.minority
    if not against or 2 * len(around.majority) <= len(ways):
        return None
    if any(_all_answer(ways, rank) for rank in against):
        return None
    return (
        "a rank exchanges with others than its neighbours do, at the same lines",
        "Compute the peers of a ring on every rank in the same way.",
        against,
    )


def _all_answer(ways: Mapping[int, frozenset[tuple[str, int]]], rank: int) -> bool:
    """True when each peer that a rank addresses addresses it as well."""
    other = {"send": "recv", "recv": "send"}
    return all((other[operation], rank) in ways.get(peer, ()) for operation, peer in ways[rank])


def _astray(_: Context, records: Mapping[int, Collective]) -> tuple[str, str, Ranks] | None:
    """A rank whose peer does not address it, while another rank does."""
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


def _strayed(context: Context, records: Mapping[int, Collective]) -> tuple[str, str, Ranks] | None:
    """A rank that never exchanged a message with its peer, while another rank addresses it.

    In a longer ring two may be said to have the wrong peer: the one whose peer it has never been.
    """
    if len(records) < 3:
        return None
    found = []
    for rank, record in records.items():
        caller = next((r for r in records if _answers(records[r], rank, record.operation)), None)
        if record.peer is None or caller in (None, record.peer):
            continue
        if (
            len(
                wait_graph.between(context.collectives, rank, record.operation, record.peer, record)
            )
            < 2
        ):
            found.append((rank, record.peer, caller, record.operation))
    if len(found) != 1:
        return None
    rank, peer, caller, operation = found[0]
    does, done = ("sends to", "receives from")
    if operation == "recv":
        does, done = done, does
    return (
        f"rank {rank} {does} rank {peer}, as never before, and rank {caller} {done} rank {rank}",
        f"Have ranks {rank} and {caller} name each other on both sides.",
        (rank,),
    )


def _out_of_habit(
    context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """One rank that does once more what it has done, without what always came in between."""
    skipped: dict[int, Collective] = {}
    for rank, record in records.items():
        *earlier, last = [_what(other) for other in context.collectives.of.get(rank, ())]
        after = [b for a, b in pairwise(earlier) if a == earlier[-1]]
        if last == _what(record) and last in earlier and len({*after}) == 1 and last != after[0]:
            skipped[rank] = next(
                other for other in context.collectives.of[rank] if _what(other) == after[0]
            )
    if len(skipped) != 1:
        return None
    ((rank, usual),) = skipped.items()
    return (
        f"rank {rank} went on without the {named(usual)}, which came next on it before",
        _ANSWER_ALWAYS,
        (rank,),
    )


def _what(record: Collective) -> tuple[object, ...]:
    """Identifies a message: the line, the direction, the peer."""
    return call_site(record), record.operation, record.peer


def _left_loop(
    context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """A rank that is past the loop in which several others still wait for its messages."""
    at, graph = context.graph.at, context.graph
    for rank, record in records.items():
        others = {
            other: at[other]
            for other in graph.stuck
            if other in at and at[other].peer == rank and graph.waits[other] == (rank,)
        }
        past = [context.sources.stands_behind(record, other) for other in others.values()]
        if len(others) > 1 and all(past):
            those = tuple(others)
            return (
                f"rank {rank} is past the loop in which {name_ranks(those)} wait for it once more",
                "Send and receive as many messages on every rank: let all ranks leave the loop "
                "after the same turn, and take the number of micro-batches from one place.",
                (rank,),
            )
    return None


def _sent_nothing(
    context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """A rank that came to a collective without the send that all others made on their way there.

    The receiver waits for it where it received theirs; or so many send to it that it collects.
    """
    for rank, record in records.items():
        peer = record.peer if record.peer is not None else -1
        elsewhere = records.get(peer)
        if record.operation != "recv" or elsewhere is None or elsewhere.is_point_to_point:
            continue
        sends = {
            other: theirs
            for other in context.collectives.of
            if other != peer and _calls(context, other, elsewhere)
            if (theirs := wait_graph.between(context.collectives, other, "send", rank, record))
        }
        received = _received_from(context, record)
        collects = not received.isdisjoint(sends) or len(sends) >= _FEWEST_OTHERS
        own = len(wait_graph.between(context.collectives, peer, "send", rank, record))
        if collects and all(len(theirs) > own for theirs in sends.values()):
            send = next(iter(sends.values()))[-1]
            return (
                f"rank {peer} went on{_why_skipped(context, send, elsewhere)} without the "
                f"{named(send)} for which rank {rank} waits, and which "
                f"{name_ranks(sorted(sends))} made",
                _ANSWER_ALWAYS,
                (peer,),
            )
    return None


def _received_from(context: Context, record: Collective) -> set[int]:
    """The ranks from which a rank has received at the line of `record`."""
    here = call_site(record)
    issued = context.collectives.of.get(record.rank, ())
    return {r.peer for r in issued if r.peer is not None and call_site(r) == here}


def _calls(context: Context, rank: int, record: Collective) -> bool:
    """True of a rank that has called, at the same line, what `record` is."""
    here = call_site(record)
    return any(call_site(other) == here for other in context.collectives.of.get(rank, ()))


def _why_skipped(context: Context, send: Collective, here: Collective) -> str:
    """The test on the way to a send that the rank of `here` did not make, in brackets."""
    condition = context.sources.condition(send, here, (), (here.rank,))
    known = condition is not None and not condition.on_rank
    return f" ({condition.quoted})" if condition is not None and known else ""


def _unequal_sender(
    context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """A rank that has sent one receiver fewer messages than another, at one line of both."""
    for rank, record in records.items():
        sender = record.peer if record.peer is not None else -1
        elsewhere = records.get(sender)
        if record.operation != "recv" or elsewhere is None or elsewhere.is_point_to_point:
            continue
        here = call_site(record)
        got = {
            other: sum(
                r.operation == "recv" and r.peer == sender and call_site(r) == here for r in of
            )
            for other, of in context.collectives.of.items()
        }
        equal = tuple(r for r, count in got.items() if r != rank and count >= got[rank] > 1)
        if equal:
            return (
                f"rank {sender} has sent rank {rank} one message less than {name_ranks(equal)}",
                "Send every receiver as many messages as it receives.",
                (sender,),
            )
    return None


def _one_more(context: Context, records: Mapping[int, Collective]) -> tuple[str, str, Ranks] | None:
    """A rank that receives once more than its peer, which went on, has sent: either may err."""
    for rank, record in records.items():
        peer = record.peer if record.peer is not None else -1
        elsewhere = records.get(peer)
        if record.operation != "recv" or elsewhere is None or elsewhere.is_point_to_point:
            continue
        sent = len(wait_graph.between(context.collectives, peer, "send", rank, record))
        received = len(wait_graph.between(context.collectives, rank, "recv", peer, record))
        if sent and received == sent + 1:
            return (
                f"rank {rank} waits for message {received} of rank {peer}, which has sent {sent}",
                "Send and receive as many messages on both sides: take the number of "
                "micro-batches from one place.",
                tuple(records),
            )
    return None


def _skipped_a_send(
    context: Context, records: Mapping[int, Collective]
) -> tuple[str, str, Ranks] | None:
    """The one rank of a ring that left out, in its last round, what it sent in each before.

    A round is from a receive to the next at the same line.
    """
    found = []
    for rank, record in records.items():
        peer = record.peer if record.peer is not None else -1
        here = records.get(peer)
        if record.operation != "recv" or here is None or here.operation != "recv":
            continue
        *earlier, last = _rounds(context.collectives.of[peer], here)
        sends = [[r for r in of if r.operation == "send" and r.peer == rank] for of in earlier]
        if sends and all(sends) and not any(r.peer == rank and r.operation == "send" for r in last):
            found.append((rank, peer, here, sends[-1][0]))
    if len(found) != 1:
        return None
    rank, peer, here, send = found[0]
    return (
        f"rank {peer} went on without the {named(send)} for which rank {rank} waits, and which it "
        f"sent in each round before{_why_skipped(context, send, here)}",
        "Send it in every round; to leave one out, let all ranks decide it together first.",
        (peer,),
    )


def _rounds(records: Sequence[Collective], now: Collective) -> list[list[Collective]]:
    """What a rank issued from each call at the line of `now` to the next; `now` is the last."""
    rounds: list[list[Collective]] = []
    for record in records:
        if record.number == now.number:
            break
        if call_site(record) == call_site(now):
            rounds.append([])
        if rounds:
            rounds[-1].append(record)
    return rounds or [[]]


def _from_any(context: Context, records: Mapping[int, Collective]) -> tuple[str, str, Ranks] | None:
    """A recv from any rank, to which no rank sends any more."""
    of_any = (r for r in records.values() if r.operation == "recv" and r.peer is None)
    record = next(of_any, None)
    return unsent(context, record) if record is not None else None


def unsent(context: Context, record: Collective) -> tuple[str, str, Ranks]:
    """Of a recv from any rank: who has sent fewer messages than others have.

    Where all have sent as many, the receiver waits for one too many itself.
    """
    rank = record.rank
    sent = {
        other: len(wait_graph.between(context.collectives, other, "send", rank, record))
        for other in wait_graph.members(context.case, record.group)
        if other != rank
    }
    few = tuple(other for other, count in sent.items() if count < max(sent.values()))
    counts = ", ".join(f"{name_ranks(who)} {count}" for who, count in by_value(sent))
    return (
        f"rank {rank} waits for one message more from any rank; no rank sends it (sent: {counts})",
        "Have each rank send as many messages as are received, or tell the receiver how many.",
        few or (rank,),
    )


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


def _by_other_tags(context: Context) -> set[int]:
    """Stuck ranks of which one sends to the other under one tag, which receives under another."""
    lost, lacking = _unpaired(context)
    ways = {way[:3] for way in lost} & {way[:3] for way in lacking}
    return {rank for way in ways for rank in way[:2]} & set(context.graph.stuck)


def _with_odd_tags(context: Context, records: Mapping[int, Collective]) -> Ranks:
    return tuple(r for r, record in records.items() if _has_odd_tag(context, r, record))


def _has_odd_tag(context: Context, rank: int, record: Collective) -> bool:
    """True where all other ranks gave one other tag at that line, in that turn."""
    if any(context.collectives.first.values()):
        return False  # turns cannot be counted
    site = call_site(record)
    same = {
        r: [other for other in records if call_site(other) == site]
        for r, records in context.collectives.of.items()
    }
    turn = sum(other.number < record.number for other in same.pop(rank, ()))
    tags = [records[turn].tag for records in same.values() if len(records) > turn]
    return len(tags) >= _FEWEST_OTHERS and len(set(tags)) == 1 and tags[0] != record.tag


_Rule: TypeAlias = Callable[[Context, Mapping[int, Collective]], tuple[str, str, Ranks] | None]
_CERTAIN: tuple[_Rule, ...] = (_sent_nothing, _astray, _from_any, _against_the_ring, _left_loop)
"""Of a ring, by what its ranks wait in: the cause, the remedy and the culprits, if they tell."""
_LIKELY: tuple[_Rule, ...] = (
    _strayed,
    _out_of_habit,
    _unequal_sender,
    _one_more,
    _skipped_a_send,
)
"""The same for messages that are waited for at once."""
