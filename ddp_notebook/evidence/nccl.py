"""What NCCL's watchdogs wrote: which collective each rank gave up on, and how far it had come.

A group's number is that of torch's log. Whose line it is, its first mark says (``[rank3]:``): the
number behind it counts in a group. Without that mark (`marks.py`),
only numbers of the default group are ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_notebook.evidence.frames import Frame
from ddp_notebook.model import name_ranks

_WHERE = r"\[(?:PG (?P<group>[^\]]{1,200}?) )?Rank (?P<number>\d{1,7})\]"
_TIMED_OUT = re.compile(
    rf"{_WHERE} *(?:Process group w|NCCL w|W)atchdog.{{0,200}}?collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<at>\d{1,12}), OpType=(?P<operation>\w{1,60})"
    r"(?:, NumelIn=(?P<numel>\d{1,15})\b)?"
)
_STATUS = re.compile(
    rf"{_WHERE}.{{0,400}}?[Ll]ast enqueued (?:NCCL )?work: (?P<issued>-?\d{{1,12}}), "
    r"last completed (?:NCCL )?work: (?P<done>-?\d{1,12})"
)
_STACK = "Stack trace of the failed collective:"
_FRAME = re.compile(r"#\d{1,4} (\S{1,200}) from (\S[^:]{0,1000}):(\d{1,9})\s*$")
_MOST_FRAMES = 200
DEFAULT = "the default group"


@dataclass(frozen=True, slots=True)
class Watched:
    """One rank's progress in one group, as numbers of torch's log. -1 and None: not known.

    `timed_out` is the collective that it gave up on; `issued` and `done` are the last ones that it
    had issued, and finished. `frames` has the innermost first.
    """

    timed_out: int = -1
    operation: str = ""
    numel: int | None = None
    issued: int | None = None
    done: int | None = None
    frames: tuple[Frame, ...] = ()

    def stands_at(self, number: int) -> bool:
        """True where that one was issued and not finished."""
        return (
            self.done is not None and self.issued is not None and self.done < number <= self.issued
        )

    @property
    def words(self) -> str:
        """``ALLREDUCE of 1,024 elements (SeqNum=808)``."""
        size = f" of {self.numel:,} elements" if self.numel is not None else ""
        return f"{self.operation}{size} (SeqNum={self.timed_out})"


@dataclass
class Watchdogs:
    """What NCCL's watchdogs wrote in logs; `joined` combines it by rank and group."""

    timed_out: list[tuple[int | None, str, Watched]] = field(default_factory=list)
    """Rank, group and collective; None: the line does not tell of which rank."""
    status: dict[tuple[int, str], Watched] = field(default_factory=dict)
    stacks: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def add(self, lines: Sequence[tuple[int | None, str]], rank: int | None) -> None:
        """Read the lines of a log, each with the rank that its mark names; `rank` wrote all of
        them, if it is not None."""
        for number, (marked, line) in enumerate(lines):
            by = marked if marked is not None else rank
            if match := _TIMED_OUT.search(line):
                operation, numel = match["operation"], match["numel"]
                size = int(numel) if numel and operation != "COALESCED" else None
                late = Watched(int(match["at"]), operation, size)
                self.timed_out.append((_rank(match, by), _group(match["group"]), late))
            elif match := _STATUS.search(line):
                who, group = _rank(match, by), _group(match["group"])
                if who is not None and group:
                    far = Watched(issued=int(match["issued"]), done=int(match["done"]))
                    self.status[who, group] = far
            elif _STACK in line and marked is not None:
                after = (text for _, text in lines[number + 1 : number + 1 + _MOST_FRAMES])
                self.stacks.setdefault(marked, tuple(_frames(after)))

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of which something is known."""
        late = {rank for rank, _, _ in self.timed_out if rank is not None}
        return frozenset(late | {rank for rank, _ in self.status})

    def joined(self) -> dict[int, dict[str, Watched]]:
        """What is known by rank and group; nothing if it is not certain whose the timeouts are."""
        of: dict[int, dict[str, Watched]] = {rank: {} for rank in sorted(self.ranks)}
        for (rank, group), far in self.status.items():
            of[rank][group] = far
        found = self._named()
        for rank, named, late in sorted(found, key=lambda each: not each[1]):
            group = named or self._same_elsewhere(late)
            known = of[rank].get(group, Watched())
            if known.timed_out not in (-1, late.timed_out):
                return {}  # of several groups, that are not named
            of[rank][group] = replace(late, issued=known.issued, done=known.done)
        for rank, frames in self.stacks.items():
            if (only := gave_up(of.get(rank, {}))) is not None:
                of[rank][only[0]] = replace(only[1], frames=frames)
        return of if len(found) == len(self.timed_out) else {}

    def _named(self) -> list[tuple[int, str, Watched]]:
        """The timeouts with their groups, where these are known."""
        return [
            (rank, group or self._group_of(rank, late), late)
            for rank, group, late in self.timed_out
            if rank is not None
        ]

    def _group_of(self, rank: int, late: Watched) -> str:
        """The group of a timeout: one that stands with it elsewhere, or was at its number."""
        named = {g for r, g, entry in self.timed_out if r == rank and g and entry == late}
        if not named:
            own = ((group, far) for (who, group), far in self.status.items() if who == rank)
            named = {group for group, far in own if far.stands_at(late.timed_out)}
        return named.pop() if len(named) == 1 else ""

    def _same_elsewhere(self, late: Watched) -> str:
        """The group in which other ranks gave up on the very same; a log may be cut."""
        groups = {group for _, group, entry in self._named() if group and entry == late}
        return groups.pop() if len(groups) == 1 else ""


def _group(text: str | None) -> str:
    """A name for a group, the same on all ranks: its unique id, where the log has that."""
    if text is None:
        return ""
    if "default_pg" in text:
        return DEFAULT
    unique = re.search(r"GUID (\S+)", text)
    return f"group {(unique[1] if unique else text.removeprefix('ID ')).strip()}"


def _rank(match: re.Match[str], rank: int | None) -> int | None:
    """The rank that wrote a line, `rank` if that is known; None where it is not certain."""
    if rank is not None:
        return rank
    in_default = match["group"] is None or "default_pg" in match["group"]
    return int(match["number"]) if in_default else None


def _frames(lines: Iterable[str]) -> Iterator[Frame]:
    for line in lines:
        match = _FRAME.search(line)
        if match is None:
            return
        yield Frame(match[2], int(match[3]), match[1])


# -- what that proves --------------------------------------------------------------------------


def gave_up(groups: Mapping[str, Watched]) -> tuple[str, Watched] | None:
    """The group and the collective that a rank gave up on; None for none, or more than one."""
    late = [(group, entry) for group, entry in groups.items() if entry.timed_out >= 0]
    return late[0] if len(late) == 1 else None


def parted(known: Mapping[int, Mapping[str, Watched]]) -> str:
    """Which ranks gave up on what, and which had not issued it, in words; empty if none did."""
    groups = sorted({name for groups in known.values() for name in groups})
    words = (
        _parted({r: of[name] for r, of in known.items() if name in of}, name) for name in groups
    )
    return next(filter(None, words), "")


def _parted(here: Mapping[int, Watched], group: str) -> str:
    first = min((entry.timed_out for entry in here.values() if entry.timed_out >= 0), default=None)
    if first is None:
        return ""
    at = {rank: entry for rank, entry in here.items() if entry.timed_out == first}
    words = _at_words(at, f" of {group}" if group else "")
    # -1: the watchdog of that rank has seen nothing of the group, which proves nothing.
    lacks = {r: e.issued for r, e in here.items() if e.issued is not None and 0 <= e.issued < first}
    if not lacks:
        return words
    last = "; ".join(f"the last of rank {rank} was {number}" for rank, number in lacks.items())
    return f"{words}, which {name_ranks(lacks)} had not issued by then ({last})"


def _at_words(at: Mapping[int, Watched], where: str) -> str:
    same: dict[str, list[int]] = {}
    for rank, entry in at.items():
        same.setdefault(entry.words, []).append(rank)
    parts = (f"{name_ranks(ranks)} timed out in {words}{where}" for words, ranks in same.items())
    return "; ".join(parts)
