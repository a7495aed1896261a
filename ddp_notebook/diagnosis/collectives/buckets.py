"""Buckets of gradients: which backward passes of DDP reduced all, some or none of theirs."""

from __future__ import annotations

from enum import Enum

from ddp_notebook.diagnosis.collectives.alignment import Track, site
from ddp_notebook.model import Part


class Lack(Enum):
    """What a rank's backward pass lacks."""

    SOME_BUCKETS = "some buckets"
    ALL_AFTER_FORWARD = "all buckets, and its forward was there"
    ALL = "all buckets"


def lack(full: Track, full_at: int, short: Track, short_at: int, count: int = 1) -> Lack | None:
    """What the short track lacks where the full one has `count` buckets, from these slots on.

    None where the full one has no bucket there.
    """
    bucket = full.at(full_at)
    if bucket is None or bucket.part is not Part.BACKWARD:
        return None
    first = _first_of_run(full, full_at)
    after = full.at(full_at + count)
    goes_on = after is not None and after.part is Part.BACKWARD and site(after) == site(bucket)
    if _key(full, full_at) != first or (goes_on and _key(full, full_at + count) != first):
        return Lack.SOME_BUCKETS
    last = short.at(short_at - 1)
    if last is not None and last.part is Part.FORWARD:
        return Lack.ALL_AFTER_FORWARD
    return Lack.ALL


def _first_of_run(track: Track, slot: int) -> int:
    """The key of the bucket with which each backward pass begins.

    Passes of one loop may follow on each other without anything between: each begins with the
    bucket that the first of them began with.
    """
    like = site(track.records[slot - track.first])
    first = slot
    while first > track.first:
        before = track.records[first - 1 - track.first]
        if before.part is not Part.BACKWARD or site(before) != like:
            break
        first -= 1
    return _key(track, first)


def _key(track: Track, slot: int) -> int:
    return track.keys[slot - track.first]
