"""Rank sets, and how rank sets, sizes and long texts are displayed."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeAlias, TypeVar

Ranks: TypeAlias = tuple[int, ...]
"""A rank set: sorted, without repeats. Written ``0``, ``0,2``, ``1-3`` or ``all``."""

T = TypeVar("T", bound=Hashable)
DASHES = "-\u2013\u2014\u2212"
"""A hyphen, and what web pages and word processors make of it."""
_RANK_PART = re.compile(rf"(\d+)(?:[{DASHES}](\d+))?")


def parse_ranks(text: str, world_size: int) -> Ranks:
    """The rank set that `text` writes (``0``, ``0,2``, ``1-3``, ``all``).

    Raises ValueError, with a message for the user, when the text is not a rank set or
    names a rank that `world_size` ranks do not have.
    """
    if text.strip().lower() == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in (p.strip() for p in text.split(",")):
        match = _RANK_PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a set of ranks: write 0, 0,2, 1-3 or all.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} runs backwards: write {last}-{first}.")
        if last >= world_size:
            absent = first if first >= world_size else last
            last_rank = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "the rank is 0"
            raise ValueError(
                f"Rank {absent} does not exist: world size is {world_size}, so {last_rank}."
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """A rank set as it is written: ``0,2-4`` (the inverse of `parse_ranks`)."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(ranks))


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """The first and the last rank of each run of consecutive ones."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def name_ranks(ranks: Iterable[int]) -> str:
    """A rank set in a sentence: ``rank 1``, ``ranks 0, 1 and 3``, ``ranks 0-2 and 5``."""
    members = tuple(ranks)
    parts: list[str] = []
    for first, last in _runs(members):  # of two consecutive ranks both are named
        parts += [f"{first}-{last}"] if last > first + 1 else map(str, range(first, last + 1))
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    return f"{'rank' if len(members) == 1 else 'ranks'} {listed}"


def agree(ranks: Collection[object], one: str, many: str) -> str:
    """The form of a verb or pronoun that goes with how many there are: ``waits``, ``wait``."""
    return one if len(ranks) == 1 else many


def verb(ranks: Collection[int], one: str, many: str) -> str:
    """Ranks with the verb that goes with their number: ``rank 1 is``, ``ranks 0,2 are``."""
    return f"{name_ranks(ranks)} {agree(ranks, one, many)}"


def are(ranks: Collection[int]) -> str:
    """``is`` of one rank, ``are`` of several."""
    return agree(ranks, "is", "are")


def them(ranks: Collection[int]) -> str:
    """``it`` for one rank, ``them`` for several."""
    return agree(ranks, "it", "them")


def by_value(values: Mapping[int, T]) -> list[tuple[Ranks, T]]:
    """The ranks that have the same value, and that value; the set of the lowest rank first."""
    groups: dict[T, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return [(tuple(ranks), value) for value, ranks in groups.items()]


def said_by(texts: Mapping[int, str], joint: str = ": ") -> str:
    """Return the texts of ranks, equal ones once: ``rank 0: no memory; ranks 1-3: no answer``."""
    return "; ".join(f"{name_ranks(ranks)}{joint}{text}" for ranks, text in by_value(texts))


def counted(count: int, thing: str) -> str:
    """``1 bucket``, ``1,200 buckets``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def cut(text: str, most: int) -> str:
    """`text` cut to at most this many characters, with an ellipsis if it was cut."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def without_ports(text: str) -> str:
    """gloo's message without the peer's port: ``Connection closed by peer [127.0.0.1]``.

    The port differs on every rank and means nothing to a user: without it equal ends are equal.
    """
    return _PEER.sub(r"\1", text)


_PEER = re.compile(r"(\[[\w.:%]+\]):\d+")


def format_bytes(count: int) -> str:
    """A readable number of bytes: ``4 B``, ``64 KiB``, ``1.5 MiB``. 1 KiB is 1024 bytes."""
    for unit, worth in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if round(1024 * count / worth, 1) >= 1024:  # the next unit down would say 1024 or more
            return f"{count / worth:.1f} {unit}".replace(".0 ", " ")
    return f"{count} B"
