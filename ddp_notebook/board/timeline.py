"""The collectives as slices for the live board's timeline: the new ones, or all.

A slice is ``[rank, number, kind, collective_seq_id, issued, done, phase, held, step]``; times are
microseconds since `epoch_ns`, `done` 0 for not yet, `held` is for how long the rank was paused
before it issued it, and `step` how many backward passes it had begun. A pause at a line is a slice
as well: its number is negative, its collective_seq_id counts the stops of its rank. What many
slices have in common (operation, shape, line, bucket) is a kind, sent once. The page files slices
by rank and number: a repeated one does no harm, so two pages may get the same messages, and one
that is opened late asks for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from ddp_notebook.model import (
    Collective,
    Collectives,
    Diagnosis,
    Part,
    Phase,
    Ranks,
    Snapshot,
    Status,
)
from ddp_notebook.model.fold import LinePause

if TYPE_CHECKING:
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.run import CellRun

FREED, PAUSED = "freed", "paused"
PHASES = (*map(str, Phase), FREED, PAUSED)
"""As a page has them: a collective is freed that no rank waits for any more, by %ddp_abort, by an
interrupt or because its rank left the cell; PAUSED is a pause at a line that is over."""
MOST_PER_RANK = 2_000
MOST_AT_ONCE = 2_000
"""In one message about what is new; of more, the oldest are skipped, and their number is sent."""
MOST_KINDS = 4_000
"""With more, the page has to forget everything, and gets the newest again."""

Slice = list[int]
RANK, NUMBER, KIND, SEQ_ID, ISSUED, DONE, PHASE, HELD, STEP = range(9)
"""The fields of a slice."""
_WAITS = (Phase.ISSUED, FREED)


def is_pause(slice_: Slice) -> bool:
    """Return True for a pause at a line, which is no collective."""
    return slice_[NUMBER] < 0


def times_of(slice_: Slice) -> tuple[int, int, int]:
    """When a rank called a collective, when it issued it, and when that ended, as far as it has."""
    issued = slice_[ISSUED]
    return issued - slice_[HELD], issued, slice_[DONE] or issued


def died_ns(snapshot: Snapshot) -> dict[int, int]:
    """When each dead rank died: its last event is the end of its process."""
    dead = (s for s in snapshot.ranks if s.status is Status.DEAD and not s.restarting)
    return {state.rank: state.heard_ns for state in dead}


class Timeline:
    """The slices of the session's runs, the newest of each rank.

    A rank counts its collectives from 0 in each run; their numbers here go on.
    """

    least_cut_us = 200_000
    """The shortest part of a pause that is cut out of the axis: a person looks for longer."""

    def __init__(self, epoch_ns: int, world_size: int) -> None:
        self.epoch_ns = epoch_ns
        self.run = 0
        self._titles: dict[int, str] = {}
        """The titles of the newest runs."""
        self._sent_run = 0
        self.generation = 0
        """Counts how often what was sent before became invalid."""
        self._from = 0
        """The number here of what a rank issues first in this run."""
        self._next = 0
        self._last_pause_ns: dict[int, int] = {}
        """When the newest pause of each rank began."""
        # Of all ranks together 40,000 are kept; a page keeps as many.
        self._per_rank = max(8, min(MOST_PER_RANK, 40_000 // max(1, world_size)))
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._kind_list: list[tuple[Any, ...]] = []
        self._sent_kinds = 0
        self._slices: dict[int, deque[Slice]] = {}
        self._index: dict[tuple[int, int], Slice] = {}
        self._fresh: dict[tuple[int, int], Slice] = {}
        self._open: dict[tuple[int, int], Slice] = {}
        self._buckets: dict[int, tuple[object, int]] = {}
        self._skipped = 0
        self._held: deque[tuple[int, int]] = deque(maxlen=200)
        """Pauses that are over: from when until when."""
        self._cuts: list[tuple[int, int]] | None = []
        self._changes = 0
        self._parted: tuple[object, dict[str, list[tuple[int, int]]]] = None, {}

    def take(
        self,
        run: int,
        records: Iterable[Collective],
        title: str = "",
        pauses: Iterable[LinePause] = (),
    ) -> None:
        """Take in records that are new or have changed, each rank's in their order. `title` is what
        the run is called, `pauses` are all of its pauses at lines.
        """
        # A program that makes new shapes all the time makes new kinds all the time.
        if len(self._kinds) > MOST_KINDS:
            self._forget()
        if run != self.run:
            self.run, self._from = run, self._next
            self._titles = dict([*self._titles.items(), (run, title)][-100:])
            # Unfinished collectives of the run before are freed: no rank waits for them any more.
            for slice_ in list(self._open.values()):
                self._end(slice_, slice_[DONE] or slice_[ISSUED], FREED)
        for record in records:
            # The page files slices by rank and number, and ranks count from 0 in each run: `_from`
            # is where this run begins.
            number = self._from + record.number
            self._next = max(self._next, number + 1)
            progress = [
                self._micros(record.issued_ns),
                self._micros(record.done_ns),
                PHASES.index(FREED if record.call.freed else record.phase),
                record.call.held_ns // 1000,
                record.backwards,
            ]
            if not self._goes_on((record.rank, number), progress):
                kind = self._number_of(self._kind(record))
                self._add([record.rank, number, kind, record.slot, *progress])
        for pause in pauses:
            self._take_pause(pause)

    def _end(self, slice_: Slice, done: int, phase: str) -> None:
        """End an open slice in `phase` at `done`; a pause at a line is over."""
        slice_[DONE] = done
        slice_[PHASE] = PHASES.index(PAUSED if is_pause(slice_) else phase)
        self._changed(slice_)

    def _take_pause(self, pause: LinePause) -> None:
        key = (pause.rank, -1 - abs(pause.began_ns // 1000))
        began, ended = self._micros(pause.began_ns), self._micros(pause.ended_ns)
        progress = [began, ended, PHASES.index(PAUSED if pause.ended_ns else Phase.HELD), 0, 0]
        new = pause.began_ns > self._last_pause_ns.get(pause.rank, 0)
        if not self._goes_on(key, progress) and new:  # else it was dropped for newer ones
            self._last_pause_ns[pause.rank] = pause.began_ns
            # What it has of a collective's kind is its line, and why as the label.
            place = pause.place
            line = (str(place), place.text, pause.why, self.run)
            kind = (f"line {place.line}", "", "", 0, "", "", (), 0, "", -1, *line)
            self._add([*key, self._number_of(kind), pause.stop, *progress])

    def _goes_on(self, key: tuple[int, int], progress: Slice) -> bool:
        """Give a known slice this `progress`; return False for an unknown one."""
        known = self._index.get(key)
        if known is not None and known[ISSUED:] != progress:
            known[ISSUED:] = progress
            self._changed(known)
        return known is not None

    def _add(self, made: Slice) -> None:
        row = self._slices.setdefault(made[RANK], deque())
        row.append(made)
        self._index[made[RANK], made[NUMBER]] = made
        self._changed(made)
        if len(row) > self._per_rank:
            oldest = row.popleft()
            del self._index[oldest[RANK], oldest[NUMBER]]
            self._open.pop((oldest[RANK], oldest[NUMBER]), None)

    def _changed(self, slice_: Slice) -> None:
        key = (slice_[RANK], slice_[NUMBER])
        self._fresh[key] = slice_
        self._changes += 1
        called, issued, done = times_of(slice_)
        held = (issued, done) if is_pause(slice_) else (called, issued)
        if held[1] - held[0] > self.least_cut_us and held not in self._held:
            self._held.append(held)
            self._cuts = None
        if PHASES[slice_[PHASE]] in (Phase.HELD, Phase.ISSUED):
            self._open[key] = slice_
        else:
            self._open.pop(key, None)

    def end(self, ended_ns: Mapping[int, int], phase: str = Phase.FAILED) -> None:
        """End the open slices of ranks that have ended in `phase`: failed when they died in it."""
        for slice_ in list(self._open.values()):
            at_ns = ended_ns.get(slice_[RANK], 0)
            # A board that is opened later has what was issued before at negative times.
            if at_ns and self._micros(at_ns) > slice_[ISSUED]:
                self._end(slice_, self._micros(at_ns), phase)

    def _number_of(self, kind: tuple[Any, ...]) -> int:
        number = self._kinds.setdefault(kind, len(self._kinds))
        if number == len(self._kind_list):
            self._kind_list.append(kind)
        return number

    def _kind(self, record: Collective) -> tuple[Any, ...]:
        place, bucket = record.place, 0
        if record.part is Part.BACKWARD:  # which bucket of its backward pass it is, from 1
            passing = (record.path, record.backwards)
            before, count = self._buckets.get(record.rank, (None, 0))
            bucket = count + 1 if before == passing else 1
            self._buckets[record.rank] = (passing, bucket)
        return (
            record.operation,
            record.api if record.api != record.operation else "",
            record.part.value if record.part is not None else "",
            bucket,
            record.group,
            record.dtype,
            record.shape,
            record.bytes,
            record.reduce_op,
            record.peer if record.peer is not None else -1,
            str(place) if place is not None else "",
            place.text if place is not None else "",
            record.label,
            self.run,
        )

    def _micros(self, at_ns: int) -> int:
        return (at_ns - self.epoch_ns) // 1000 if at_ns else 0

    # -- queries -----------------------------------------------------------------------

    def cuts(self) -> list[tuple[int, int]]:
        """The parts of pauses in which nothing happened on any rank: the axis leaves them out."""
        if self._cuts is None:
            slices = (slice_ for row in self._slices.values() for slice_ in row)
            events = sorted({at for each in slices for at in times_of(each)})
            self._cuts = [
                (begin, end)
                for begin, end in pairwise(events)
                if end - begin > self.least_cut_us
                and any(held <= begin and end <= until for held, until in self._held)
            ]
        return self._cuts

    def parted(self, ranks: Ranks) -> dict[str, list[tuple[int, int]]]:
        """Where `ranks` diverged from those that wait, each a rank and a time; empty if none waits.

        ``at`` is when each was done with the last collective that it shared with them; ``link``
        joins what should have met: what the others wait in, and what it issued instead.
        """
        key = (ranks, self._changes)
        if key != self._parted[0]:  # asked ten times a second
            self._parted = key, self._find_parted(ranks)
        return self._parted[1]

    def _find_parted(self, ranks: Ranks) -> dict[str, list[tuple[int, int]]]:
        rows = {rank: self._newest(rank) for rank in self._slices}
        others = [row for rank, row in rows.items() if rank not in ranks and row]
        waits = [row[-1] for row in others if PHASES[row[-1][PHASE]] in _WAITS]
        if not waits:
            return {}
        done = PHASES.index(Phase.DONE)
        shared = {self.collective(e) for row in others for e in row if e[PHASE] == done}
        mine = sorted(set(ranks) & set(rows))
        ends = [(rank, *self._parts_at(rows[rank], shared)) for rank in mine if rows[rank]]
        link = [*((each[RANK], each[ISSUED]) for each in waits), *((r, met) for r, _, met in ends)]
        return {"at": [(rank, at) for rank, at, _ in ends], "link": sorted(link)}

    def _parts_at(self, row: Sequence[Slice], shared: Set[tuple[int, str, int]]) -> tuple[int, int]:
        """When the last of a row that is among `shared` was done, and when the next was issued.

        Where there is only one of the two, it stands for both.
        """
        passed = [n for n, each in enumerate(row) if self.collective(each) in shared]
        own = row[passed[-1] + 1 :] if passed else row
        at = times_of(row[passed[-1]])[2] if passed else row[0][ISSUED]
        return at, own[0][ISSUED] if own else at

    def steps_a_second(self, rank: int, now_ns: int) -> float:
        """How many training steps a rank made a second, of late; 0 while it makes none."""
        begun: dict[int, int] = {}
        for each in self._newest(rank):
            if each[STEP]:
                begun.setdefault(each[STEP], each[ISSUED])
        steps = sorted(begun.items())[-20:]
        if len(steps) < 3:
            return 0.0
        (first, from_us), (last, to_us) = steps[0], steps[-1]
        cut_us = sum(end - begin for begin, end in self.cuts() if from_us <= begin < to_us)
        each_us = (to_us - from_us - cut_us) / (last - first)
        quiet_us = self._micros(now_ns) - to_us
        return 1e6 / each_us if each_us > 0 and quiet_us < max(4 * each_us, 2e6) else 0.0

    def _newest(self, rank: int) -> list[Slice]:
        """The newest collectives of a rank in the newest run."""
        last = self.last(rank, 300)
        return [each for each in last if not is_pause(each) and self.run_of(each) == self.run]

    def last(self, rank: int, most: int) -> list[Slice]:
        """The newest slices of a rank, the oldest of them first."""
        row = self._slices.get(rank, ())
        return list(islice(row, max(0, len(row) - most), None))

    def operation(self, slice_: Slice) -> str:
        """The operation of a slice: all_reduce, send, ..."""
        return str(self._kind_of(slice_)[0])

    def run_of(self, slice_: Slice) -> int:
        """The number of the run that issued it."""
        return int(self._kind_of(slice_)[13])

    def collective(self, slice_: Slice) -> tuple[int, str, int]:
        """Equal for slices of ranks that are one collective; a send or receive is its own."""
        kind = self._kind_of(slice_)
        group = f"rank {slice_[RANK]}" if kind[9] >= 0 else kind[4]
        return kind[13], group, slice_[SEQ_ID]

    def last_arrivals(self) -> dict[tuple[int, str, int], int]:
        """When the last rank issued each collective, as far as it is known."""
        latest: dict[tuple[int, str, int], int] = {}
        for row in self._slices.values():
            for slice_ in row:
                if PHASES[slice_[PHASE]] not in (Phase.HELD, Phase.REFUSED, FREED, PAUSED):
                    key = self.collective(slice_)
                    latest[key] = max(latest.get(key, 0), slice_[ISSUED])
        return latest

    def _kind_of(self, slice_: Slice) -> tuple[Any, ...]:
        return self._kind_list[slice_[KIND]]

    # -- messages ----------------------------------------------------------------------

    def news(self) -> dict[str, Any] | None:
        """The slices that are new since the last call; None for none."""
        if not self._fresh and self._sent_kinds == len(self._kinds) and self.run == self._sent_run:
            return None
        fresh = list(self._fresh.values())
        skipped = max(0, len(fresh) - MOST_AT_ONCE)
        if skipped:
            # A page that got a hundred thousand slices in one message would freeze; the newest are
            # what it shows.
            fresh = sorted(fresh, key=lambda slice_: slice_[ISSUED])[skipped:]
        message = self._message(fresh, self._sent_kinds)
        self._skipped += skipped
        self._fresh = {}
        self._sent_kinds, self._sent_run = len(self._kinds), self.run
        return message

    def whole(self) -> dict[str, Any]:
        """All slices."""
        return self._message([slice_ for row in self._slices.values() for slice_ in row], 0)

    def _message(self, slices: Sequence[Slice], first_kind: int) -> dict[str, Any]:
        kinds = self._kind_list[first_kind:]
        titles = self._titles if not first_kind else {self.run: self._titles.get(self.run, "")}
        return {
            "kind": "slices",
            "run": self.run,
            "titles": [list(each) for each in titles.items()],
            "generation": self.generation,
            "first_kind": first_kind,
            "kinds": [list(kind) for kind in kinds],
            "slices": [list(slice_) for slice_ in slices],
            "skipped": self._skipped,
            "cuts": list(map(list, self.cuts())),
        }


def parted(timeline: Timeline, diagnosis: Diagnosis | None) -> dict[str, list[tuple[int, int]]]:
    """Where the ranks of the first finding diverged from the others, unless that may pass."""
    found = diagnosis.findings[:1] if diagnosis is not None else ()
    return timeline.parted(found[0].ranks) if found and not found[0].passing else {}


# -- the newest records, while ranks issue them ------------------------------------------


class Tails:
    """Follows one run after another. Not for several threads at once."""

    def __init__(self) -> None:
        self.run = 0
        """The number of the run that is followed."""
        self._kept: dict[int, dict[int, Collective]] = {}
        self._next: dict[int, int] = {}
        self._groups: dict[str, Ranks] = {}

    def follow(self, logs: CollectiveLogs, run: CellRun) -> tuple[Collective, ...]:
        """The records of `run` that are new or have changed since the last call."""
        if run.cell != self.run:
            self.run, self._kept, self._next, self._groups = run.cell, {}, {}, {}
        # Of more than 512 new records of a rank the oldest are skipped.
        found = logs.read_since(run.ranks, run.cell, self._next, 512)
        self._groups.update(found.groups)
        news: list[Collective] = []
        for rank, records in found.of.items():
            kept = self._kept.setdefault(rank, {})
            changed = [record for record in records if kept.get(record.number) != record]
            kept.update((record.number, record) for record in changed)
            news += changed
            # The newest 256 of a rank are enough to describe what it does.
            for number in list(kept)[: max(0, len(kept) - 256)]:
                del kept[number]
            end = max(kept, default=-1) + 1
            # Pending records are read again, as they may have changed; but work that no code waits
            # for is never seen to be done, so only the newest 64 are.
            pending = [n for n, record in kept.items() if n >= end - 64 and not record.over]
            self._next[rank] = min([*pending, end])
        return tuple(news)

    @property
    def collectives(self) -> Collectives:
        """The newest records of each rank."""
        return Collectives(
            {rank: tuple(kept.values()) for rank, kept in self._kept.items()}, dict(self._groups)
        )


# -- earlier moments ---------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The findings from a time on, as a page has them."""

    at_ns: int = 0
    findings: Sequence[Any] = ()
    locations: Sequence[Any] = ()


@dataclass
class Memory:
    """The memory of the boards of a session, one after another: a new one begins with it.

    For one board at a time; `of` says which session it is, by its beginning and its number of
    ranks. Times are counted from `epoch_ns`.
    """

    of: tuple[int, int]
    epoch_ns: int
    timeline: Timeline
    past: Past


@dataclass
class Past:
    """Records what a board shows, for when its user scrubs back."""

    # Bounded: a board may be open for days.
    _moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=400))
    _runs: deque[tuple[int, int, Collectives]] = field(default_factory=lambda: deque(maxlen=30))

    def note(self, moment: Moment) -> None:
        """Record what is shown from now on."""
        last = self._moments[-1] if self._moments else Moment()
        if (last.findings, last.locations) != (moment.findings, moment.locations):
            self._moments.append(moment)

    def keep(self, run: int, at_ns: int, collectives: Collectives) -> None:
        """Record the newest collectives of a run as they are at `at_ns`."""
        began_ns = at_ns
        if self._runs and self._runs[-1][0] == run:
            began_ns = self._runs.pop()[1]
        self._runs.append((run, began_ns, collectives))

    def found_at(self, at_ns: int) -> Moment:
        """The findings at a time."""
        earlier = [moment for moment in self._moments if moment.at_ns <= at_ns]
        return earlier[-1] if earlier else Moment()

    def collectives_at(self, at_ns: int) -> Collectives:
        """The newest collectives of the run at a time."""
        earlier = [kept for _, began_ns, kept in self._runs if began_ns <= at_ns]
        return earlier[-1] if earlier else Collectives()
