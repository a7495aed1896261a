"""Records as ranks would write them: small programs played rank by rank, as gloo would run them.

A collective is done when every member is in the same slot with the same operation; until then
the ranks in it wait. Whoever is to stop somewhere stops there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_notebook.model import (
    DEFAULT_GROUP,
    GROUPED,
    Activity,
    Case,
    Collective,
    Collectives,
    InitArguments,
    Network,
    Part,
    Phase,
    Place,
    ProcessFacts,
    RankReport,
)


def with_facts(of: RankReport, **facts: Any) -> RankReport:
    """Return a report with other facts: ``with_facts(report, error_text="no", pid=7)``."""
    groups: dict[str, dict[str, Any]] = {}
    plain = {}
    for name, value in facts.items():
        if name in GROUPED and not isinstance(value, (Network, ProcessFacts)):
            group, field = GROUPED[name]
            groups.setdefault(group, {})[field] = value
        else:
            plain[name] = value
    moved = {group: replace(getattr(of, group), **fields) for group, fields in groups.items()}
    return replace(of, **plain, **moved)


def report(rank: int, *args: Any, **facts: Any) -> RankReport:
    """Return the report of a rank: activity, inside and doing, and whatever else is known."""
    return with_facts(RankReport(rank, *args), **facts)


BUSY = replace(RankReport(0), activity=Activity.BUSY)
DONE = replace(RankReport(0), activity=Activity.IDLE, initialized=True)
DESTROYED = replace(RankReport(0), activity=Activity.IDLE, initialized=False)


def raised(text: str, kind: str = "AssertionError") -> RankReport:
    """A rank whose code raises after its last collective."""
    return report(0, Activity.FAILED, error_type=kind, error_text=text)


def died(code: int) -> RankReport:
    """A rank whose process ends after its last collective."""
    return report(0, Activity.DEAD, exit_code=code)


def places(*lines: int | tuple[int, str], file: str = "train.py") -> tuple[Place, ...]:
    """A path: lines of one file, outermost first, each with the function it is in if any."""
    pairs = [(each, "") if isinstance(each, int) else each for each in lines]
    return tuple(Place(file, line, function) for line, function in pairs)


def op(operation: str, *lines: int | tuple[int, str], **more: Any) -> Collective:
    """A collective at these lines, as one rank issues it; a float32 of four unless said."""
    fields: dict[str, Any] = {"api": operation, "path": places(*lines)}
    if operation != "barrier":
        shape = more.get("shape", (4,))
        numel = 1
        for size in shape:
            numel *= size
        fields |= {"shape": shape, "dtype": "float32", "numel": numel}
    if operation in ("all_reduce", "reduce"):
        fields["reduce_op"] = "SUM"
    return Collective(0, 0, operation, **{**fields, **more})


def barrier(*lines: int | tuple[int, str], **more: Any) -> Collective:
    """A barrier at these lines."""
    return op("barrier", *lines, **more)


def all_reduce(*lines: int | tuple[int, str], **more: Any) -> Collective:
    """An all_reduce at these lines."""
    return op("all_reduce", *lines, **more)


def constructor(line: int = 10) -> list[Collective]:
    """What DDP's constructor issues."""
    api = "DistributedDataParallel.__init__"
    return [
        op("all_gather", line, api=api, part=Part.CONSTRUCTOR, dtype="int64", shape=(2,)),
        op("broadcast", line, api=api, part=Part.CONSTRUCTOR, root=0, shape=(10,)),
    ]


def backward(line: int = 20, shape: tuple[int, ...] = (10,)) -> Collective:
    """A bucket of gradients."""
    return all_reduce(line, api="backward", part=Part.BACKWARD, shape=shape)


def forward(line: int = 19) -> Collective:
    """Buffers before a forward pass."""
    return op("broadcast", line, api="forward", part=Part.FORWARD, root=0, shape=(3,))


def message(operation: str, peer: int, *lines: int, **more: Any) -> Collective:
    """A send to, or a recv from, `peer`."""
    return op(operation, *lines, peer=peer, **more)


@dataclass
class _Player:
    """One rank as it goes through its program."""

    rank: int
    program: Sequence[Collective]
    end: RankReport
    records: list[Collective] = field(default_factory=list)
    slots: dict[tuple[str, ...], int] = field(default_factory=dict)
    waits: bool = False

    def issue(self, clock: int) -> None:
        """Issue what comes next."""
        each = self.program[len(self.records)]
        key: tuple[str, ...] = (each.group,)
        if each.is_point_to_point:
            key = (each.group, each.operation, str(each.peer), str(each.tag))
        slot = self.slots.get(key, 0)
        issued = each.phase is not Phase.REFUSED
        self.slots[key] = slot + issued
        number = len(self.records)
        record = replace(each, rank=self.rank, number=number, slot=slot, issued_ns=clock)
        self.records.append(record)
        self.waits = issued

    def evidence(self) -> RankReport:
        """What is known of it now."""
        came = InitArguments(rank=self.rank, backend="gloo")
        if self.waits:
            record = self.records[-1]
            return RankReport(
                self.rank,
                Activity.WAITING,
                "collective",
                entered=1,
                left=1,
                initialized=True,
                arguments=came,
                path=record.path,
                waits_for=record.number,
            )
        through = len(self.records) == len(self.program)
        return replace(
            self.end if through else BUSY, rank=self.rank, entered=1, left=1, arguments=came
        )


def play(
    programs: Mapping[int, Sequence[Collective]],
    ends: Mapping[int, RankReport] | None = None,
    groups: Mapping[str, tuple[int, ...]] | None = None,
    rounds: int = 1_000_000,
) -> Case:
    """Play the programs until nobody gets on; the picture that is then found.

    `ends` is what ranks are when they are through, `DONE` by default. `rounds` stops the play
    earlier: then ranks with something to do are busy.
    """
    ends = ends or {}
    members = {DEFAULT_GROUP: tuple(programs), **(groups or {})}
    players = {r: _Player(r, program, ends.get(r, DONE)) for r, program in programs.items()}
    clock = 0
    moving = True
    while moving and rounds > 0:
        moving, rounds = False, rounds - 1
        for player in players.values():
            clock += 1
            if player.waits and _is_done(player, players, members):
                player.records[-1] = replace(player.records[-1], phase=Phase.DONE, done_ns=clock)
                player.waits, moving = False, True
            if not player.waits and len(player.records) < len(player.program):
                player.issue(clock)
                moving = True
    return Case(
        tuple(player.evidence() for player in players.values()),
        {"WORLD_SIZE": str(len(programs))},
        collectives=Collectives(
            {r: tuple(player.records) for r, player in players.items()}, members
        ),
    )


def _is_done(
    player: _Player, players: Mapping[int, _Player], members: Mapping[str, tuple[int, ...]]
) -> bool:
    mine = player.records[-1]
    if mine.is_point_to_point:
        other = "recv" if mine.operation == "send" else "send"
        if mine.peer is None:
            return False  # from anybody: whoever plays it says from whom, or that nobody sends
        return any(
            each.operation == other
            and each.peer == player.rank
            and each.tag == mine.tag
            and each.slot == mine.slot
            for each in players[mine.peer].records
        )
    return all(
        any(
            each.group == mine.group
            and not each.is_point_to_point
            and each.slot == mine.slot
            and each.operation == mine.operation
            and each.phase is not Phase.REFUSED
            for each in players[rank].records
        )
        for rank in members[mine.group]
    )
