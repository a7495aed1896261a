"""Rules about ranks that stopped short: all they did was right, and others need more of them."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.collectives.alignment import Alignment, Track, site
from ddp_notebook.diagnosis.collectives.buckets import Lack
from ddp_notebook.diagnosis.collectives.divergence import Side
from ddp_notebook.diagnosis.collectives.extra_rules import begun, only_here, some_buckets
from ddp_notebook.diagnosis.collectives.loop_rules import TOGETHER, UNEVEN_REMEDY
from ddp_notebook.diagnosis.context import Picture, fact, named, nothing_after
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    Part,
    Phase,
    Ranks,
    name_ranks,
)


def stopped_short(picture: Picture) -> Iterator[Finding]:
    """Ranks that are through, or were never asked, while others wait for them in a collective."""
    seen: set[tuple[str, int]] = set()
    for rank in picture.graph.stuck:
        record = picture.graph.at.get(rank)
        if record is not None and _out_of_step(picture, record):
            continue  # who parted from whom before explains who is missing now
        if record is None or record.is_point_to_point or (record.group, record.slot) in seen:
            continue
        seen.add((record.group, record.slot))
        absent = tuple(r for r in picture.graph.waits[rank] if _has_nothing(picture, r, record))
        not_asked = tuple(r for r in absent if _not_asked(picture, r))
        if not_asked:
            yield _never_asked(picture, not_asked, record)
        short = tuple(r for r in absent if picture.finished(r))
        if short:
            yield _fewer(picture, short, record)


def _out_of_step(picture: Picture, record: Collective) -> bool:
    return any(
        each.fault is not None and each.alignment.group == record.group for each in picture.judged
    )


def _has_nothing(picture: Picture, rank: int, record: Collective) -> bool:
    """True when a rank ended before this slot; one with another collective there did not."""
    alignment = picture.alignments.get(record.group)
    track = alignment.tracks.get(rank) if alignment else None
    return track is None or track.end <= record.slot


def _not_asked(picture: Picture, rank: int) -> bool:
    e = picture.evidence.get(rank)
    return e is not None and e.activity is Activity.IDLE and e.run != picture.run


def _never_asked(picture: Picture, ranks: Ranks, record: Collective) -> Finding:
    those = name_ranks(ranks)
    return Finding(
        Category.MISSING_RANK,
        ranks,
        f"{those} {'does' if len(ranks) == 1 else 'do'} not run this code; "
        f"{picture.standing(picture.graph.stuck)}",
        "Run it on every rank of the group (%%ddp without --ranks), or use a group of the "
        "ranks that run it.",
        picture.victims,
        tuple(f"rank {rank} runs nothing" for rank in ranks),
    )


def _fewer(picture: Picture, short: Ranks, record: Collective) -> Finding:
    """Finished ranks lack a collective that others are in: whose mistake is it?"""
    alignment = picture.alignments[record.group]
    track = alignment.tracks.get(short[0]) or Track(short[0], 0, (), ())
    # They wait in the last of several buckets, say: what lacks begins where the short one ends.
    record = alignment.tracks[record.rank].at(track.end) or record
    ahead = tuple(r for r, t in sorted(alignment.tracks.items()) if _issued(t, record))
    full = Side(ahead, alignment.tracks[record.rank], record.slot)
    side = Side(short, track, track.end)
    if side.knows(record) or _is_a_step(picture, record):
        return _one_step_less(picture, alignment, full, side, record)
    if len(short) < len(ahead) or (len(short) == len(ahead) and _always_reached(picture, record)):
        if picture.sources.condition(record) is None:
            return _left_early(picture, short, ahead, record)
        return only_here(picture, short, full, side, record, None)
    return only_here(picture, ahead, full, side, record, None)


def _is_a_step(picture: Picture, record: Collective) -> bool:
    """True of a backward pass: an epoch may have none of it on a rank without data.

    Not where a condition decides whether a rank comes there at all.
    """
    if picture.sources.condition(record) is not None:
        return False
    return record.part is Part.BACKWARD and picture.sources.in_a_loop(record) is not False


def _issued(track: Track, record: Collective) -> bool:
    """True when it has the same there: one that stands elsewhere in that slot does not count."""
    mine = track.at(record.slot)
    return mine is not None and mine.phase is not Phase.HELD and site(mine) == site(record)


def _always_reached(picture: Picture, record: Collective) -> bool:
    known = picture.sources.knows(record)
    return known and picture.sources.condition(record) is None


def _one_step_less(
    picture: Picture, alignment: Alignment, full: Side, short: Side, record: Collective
) -> Finding:
    """They have been there before: one step less of a loop."""
    facts = (
        fact(full.ranks, record),
        *(f"rank {r}: {_count(alignment, r, record)} times there" for r in _some(full, short)),
    )
    culprits = short.ranks if len(short.ranks) <= len(full.ranks) else full.ranks
    if begun(full, short) is Lack.SOME_BUCKETS:
        return some_buckets(picture, full, short, record)
    way = picture.sources.way_around(record)
    is_or_are, has = full.verb("is", "are"), short.verb("has", "have")
    if way is None:
        return Finding(
            Category.UNEVEN_INPUTS,
            culprits,
            f"{short.named} {has} left the loop; {full.named} {is_or_are} once more in "
            f"{named(record)}",
            UNEVEN_REMEDY,
            picture.victims,
            facts,
        )
    said = (
        f"{short.named} {has} skipped {named(record)} in some iteration ({way.place.text}) and "
        f"finished, while {full.named} {is_or_are} there"
    )
    if culprits == full.ranks:
        said = (
            f"{full.named} {is_or_are} once more in {named(record)} than the others, who have "
            f"finished: it came there again in some iteration ({way.place.text})"
        )
    return Finding(
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        said,
        TOGETHER,
        picture.victims,
        (*facts, f"{way.place}: {way.place.text}"),
    )


def _some(full: Side, short: Side) -> Ranks:
    return tuple(sorted((*full.ranks[:2], *short.ranks[:2])))


def _count(alignment: Alignment, rank: int, record: Collective) -> int:
    like = site(record)
    track = alignment.tracks.get(rank)
    return sum(site(each) == like for each in track.records) if track else 0


def _left_early(picture: Picture, short: Ranks, ahead: Ranks, record: Collective) -> Finding:
    """They left with something still to do, on which no condition stands."""
    destroyed = all(picture.destroyed(rank) for rank in short)
    waiters = f"{name_ranks(ahead)} {'is' if len(ahead) == 1 else 'are'} in {named(record)}"
    if destroyed:
        return Finding(
            Category.MISSING_DESTROY,
            short,
            f"{name_ranks(short)} destroyed the group, or ended, while {waiters}",
            "Let every rank finish before one leaves: dist.barrier() before "
            "destroy_process_group().",
            picture.victims,
            (fact(ahead, record), f"{name_ranks(short)}: no process group any more"),
        )
    return Finding(
        Category.EARLY_EXIT,
        short,
        f"{name_ranks(short)} {'has' if len(short) == 1 else 'have'} finished, while {waiters}",
        "Every rank must take part in every collective: see where the others wait.",
        picture.victims,
        (fact(ahead, record), nothing_after(name_ranks(short), record.slot - 1)),
    )
