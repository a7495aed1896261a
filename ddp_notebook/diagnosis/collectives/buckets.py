"""DDP's buckets of gradients: what a rank did not reduce of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import takewhile

from ddp_notebook.diagnosis.collectives.alignment import RankSequence, call_site
from ddp_notebook.model import Collective, Part


class MissingBuckets(Enum):
    """The buckets that are missing from a rank's backward pass."""

    SOME = "some buckets"
    ALL_AFTER_FORWARD = "all buckets, and its forward was there"
    ALL = "all buckets"


def missing_buckets(
    full: RankSequence,
    full_at: int,
    short: RankSequence,
    short_at: int,
    ahead: Sequence[Collective],
) -> MissingBuckets | None:
    """The buckets missing from the short sequence where the full one has the collectives `ahead`.

    None if the full one has no bucket there.
    """
    bucket = full.at(full_at)
    if bucket is None or bucket.part is not Part.BACKWARD:
        return None
    # DDP issues the buckets of a pass without waiting for each: all of them may be there.
    count = sum(1 for _ in takewhile(lambda each: call_site(each) == call_site(ahead[0]), ahead))
    first = _first_of_run(full, full_at)
    after = full.at(full_at + count)
    same_pass = _is_bucket_of(after, bucket) and _key(full, full_at + count) != first
    if _key(full, full_at) != first or same_pass:
        return MissingBuckets.SOME
    last = short.at(short_at - 1)
    if last is not None and last.part is Part.FORWARD:
        return MissingBuckets.ALL_AFTER_FORWARD
    return MissingBuckets.ALL


def _is_bucket_of(record: Collective | None, like: Collective) -> bool:
    """True of a bucket that is reduced at the same lines."""
    if record is None or record.part is not Part.BACKWARD:
        return False
    return call_site(record) == call_site(like)


def _first_of_run(sequence: RankSequence, slot: int) -> int:
    """The key of the bucket with which each backward pass begins.

    Passes of one loop may follow on each other without anything between: each begins with the
    bucket that the first of them began with.
    """
    like = call_site(sequence.records[slot - sequence.first])
    first = slot
    while first > sequence.first:
        before = sequence.records[first - 1 - sequence.first]
        if before.part is not Part.BACKWARD or call_site(before) != like:
            break
        first -= 1
    return _key(sequence, first)


def _key(sequence: RankSequence, slot: int) -> int:
    return sequence.keys[slot - sequence.first]
