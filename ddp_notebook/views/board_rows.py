"""The state arranged for drawing, one row for ranks in the same state; and in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ddp_notebook.launch.process_ids import pid_of
from ddp_notebook.model import (
    Board,
    BoardRow,
    Category,
    Collective,
    Collectives,
    Diagnosis,
    Finding,
    LineStopped,
    Loading,
    Place,
    Ranks,
    RankState,
    Remark,
    Role,
    Snapshot,
    Stage,
    Status,
    agree,
    counted,
    exit_text,
    format_ranks,
    name_ranks,
    them,
    verb,
)
from ddp_notebook.views.step_rows import (
    MissingRanks,
    describe_collective,
    is_paused,
    stop_text,
    waits_in_stage,
)

_DEATHS = (Category.RANK_DIED, Category.OOM_ON_ONE_RANK)
"""Their remedy says how to bring the ranks back."""


@dataclass(frozen=True)
class BoardFacts:
    """The facts about the session at one moment.

    `collectives` are those that the ranks issued in the current or last run; `pending` are the
    ranks that are still in it. `sources` is code by file name. `store` says who hosts the store:
    session or rank0. `raised` has the user's lines in the traceback, for the ranks that raised in
    that run. `stops`: at which lines ranks are paused. `members` are the ranks of the run.
    """

    snapshot: Snapshot
    collectives: Collectives = field(default_factory=Collectives)
    pending: Ranks = ()
    diagnosis: Diagnosis | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    store: str = "session"
    raised: Mapping[int, Sequence[Place]] = field(default_factory=dict)
    stops: Mapping[int, LineStopped] = field(default_factory=dict)
    members: Ranks = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the diagnosis; empty without one."""
        return self.diagnosis.findings if self.diagnosis is not None else ()

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What it says besides, which is no mistake."""
        return self.diagnosis.remarks if self.diagnosis is not None else ()


def board(snapshot: Snapshot) -> Board:
    """The board of `snapshot` alone: without collectives and findings."""
    return board_of(BoardFacts(snapshot))


def board_of(facts: BoardFacts) -> Board:
    """The board of all that is known at the time of the snapshot."""
    snapshot, rows = facts.snapshot, board_rows(facts)
    words = {rank: row.word for row in rows for rank in row.ranks}
    deaths = (finding for finding in facts.findings if finding.category in _DEATHS)
    told = {rank for finding in deaths for rank in finding.ranks}
    standing = (*notes(snapshot, told), *(remark.text for remark in facts.remarks))
    return Board(headline(snapshot, words), rows, standing, snapshot)


def stuck_note(board: Board, diagnosis: Diagnosis | None) -> str:
    """Return who has waited long for which ranks, and what to type; empty where all is well.

    Once something was found, there is a note also if it names no rank that waits.
    """
    now_ns, wrong = board.snapshot.taken_ns, diagnosis is not None and diagnosis.wrong
    rows = [row for row in board.rows if Role.WAITING in (row.role, row.word)]
    since_ns = min((row.since_ns for row in rows if row.since_ns), default=now_ns)
    # Ranks that wait for so long are named below the board.
    if not wrong and now_ns - since_ns < 2e9:
        return ""
    if not rows:
        return "No rank can continue. Why: %ddp_why. Free the ranks: %ddp_abort"
    ranks = sorted(rank for row in rows for rank in row.ranks)
    others = sorted({rank for row in rows for rank in row.waits_for})
    seconds = f" ({(now_ns - since_ns) / 1e9:.0f} s)" if since_ns < now_ns else ""
    whom = f" for {name_ranks(others)}" if others else ""
    return (
        f"{verb(ranks, 'is', 'are').capitalize()} waiting{whom}{seconds}. Why: %ddp_why. "
        f"Free {them(ranks)}: %ddp_abort"
    )


def board_rows(facts: BoardFacts) -> tuple[BoardRow, ...]:
    """The ranks in their order; many ranks in the same state share a row."""
    issued = facts.collectives.of
    latest = {rank: issued[rank][-1] for rank in set(facts.pending) if issued.get(rank)}
    missing = MissingRanks(facts.collectives)
    rows = [_row(state, latest.get(state.rank), missing, facts) for state in facts.snapshot.ranks]
    # From this many ranks on, ranks in the same state share a row.
    if len(rows) < 8:
        return tuple(rows)
    groups: dict[object, list[BoardRow]] = {}
    sides = [side for finding in facts.findings for side in finding.sides]
    for row in rows:
        own = next((side for side in sides if row.ranks[0] in side.ranks), None)
        if row.role is Role.REFUSED and own is not None:
            # What it brought: its error names the rank, which no other rank's does.
            row = replace(row, text=f"{own.call} {own.tensor}".strip())
        sameness = (
            *(row.role, row.word, row.status, row.stage, row.entering, row.text, row.waits_for),
            *(_kind_of_device(row.device), row.host, row.silent),
        )
        groups.setdefault(sameness, []).append(row)
    return tuple(map(_together, groups.values()))


def _together(rows: Sequence[BoardRow]) -> BoardRow:
    """One row for all; its times are those of the first rank, and of the one silent for longest."""
    if len(rows) == 1:
        return rows[0]
    return replace(
        rows[0],
        ranks=tuple(rank for row in rows for rank in row.ranks),
        device=_kind_of_device(rows[0].device),
        pid=0,
        age_s=max(row.age_s for row in rows),
        since_ns=min((row.since_ns for row in rows if row.since_ns), default=0),
        heard_ns=min((row.heard_ns for row in rows if row.heard_ns), default=0),
    )


def _kind_of_device(device: str) -> str:
    return device.partition(":")[0].partition(" ")[0]


def _row(
    state: RankState, record: Collective | None, missing: MissingRanks, facts: BoardFacts
) -> BoardRow:
    """The row of one rank. `record` is the latest collective of a rank that is in a run."""
    activity = _activity(state, record, missing, facts)
    age_s = max(0.0, (facts.snapshot.taken_ns - state.heard_ns) / 1e9) if state.heard_ns else 0.0
    ended = bool(facts.snapshot.ended)
    quiet = ended or state.status in (Status.DEAD, Status.STARTING)
    # A live rank sends a message every quarter of a second.
    silent = age_s > 2.0 and not quiet
    role = _role(state, activity, silent, facts.findings)
    slow = any(r.kind == "slow-rank" and state.rank in r.ranks for r in facts.remarks)
    if slow and role in (Role.READY, Role.RUNNING):
        role = Role.LATE
    if ended and role not in (Role.CULPRIT, Role.DEAD, Role.FAILED):
        role = Role.ENDED
    return BoardRow(
        ranks=(state.rank,),
        status=state.status,
        stage=Stage.LAUNCHED if state.no_group else state.stage,
        entering=state.entering,
        text=activity.text or "slower than the others" * (role is Role.LATE),
        device=state.device,
        pid=pid_of(state.pid),
        host=state.host,
        age_s=age_s,
        silent=silent,
        role=role,
        word=Role.ENDED.value if role is Role.ENDED else _word(state, activity, facts),
        waits_for=activity.waits_for,
        since_ns=0 if role is Role.ENDED else activity.since_ns,
        heard_ns=state.heard_ns if silent else 0,
        staged=not facts.snapshot.external,
    )


@dataclass(frozen=True, slots=True)
class _Activity:
    """The activity of a rank, since when, and the ranks that it waits for."""

    text: str
    since_ns: int = 0
    waits_for: Ranks = ()
    waits: bool = False
    paused: bool = False


def _activity(
    state: RankState, record: Collective | None, missing: MissingRanks, facts: BoardFacts
) -> _Activity:
    text = describe(state)
    match state.status:
        case Status.STARTING if facts.snapshot.ended:
            return _Activity("its process was starting")
        case Status.STARTING if (loading := facts.snapshot.loading) is not None:
            return _Activity("starts when torch is loaded", loading.since_ns)
        case Status.SETTING_UP:
            waits_for = waits_in_stage(state, facts.snapshot, facts.store)
            return _Activity(text, state.since_ns, waits_for, waits=bool(waits_for))
        case Status.RUNNING if (stop := facts.stops.get(state.rank)) is not None:
            return _Activity(stop_text(stop), stop.heard_ns, paused=True)
        case Status.RUNNING if record is not None and not record.over:
            text = describe_collective(record, facts.collectives.of[state.rank])
            if is_paused(record):
                return _Activity(text, record.issued_ns, paused=True)
            return _Activity(text, record.issued_ns, missing.of(record), waits=True)
        case Status.READY if state.raised:
            return _Activity(text, state.since_ns)
        case Status.RUNNING | Status.READY:
            return _Activity(text)
        case _:
            return _Activity(text, state.since_ns, paused=state.status is Status.PAUSED)


def _waits(state: RankState, activity: _Activity, findings: Sequence[Finding]) -> bool:
    """True if it waits for others, as far as is known of what it does, or as was found."""
    blocked = state.status in (Status.RUNNING, Status.SETTING_UP)
    # Who waits for a key that no rank sets may be named as the one with the wrong key, and waits.
    among = (
        (*finding.waiting, *(finding.ranks if finding.category is Category.UNSET_KEY else ()))
        for finding in findings
    )
    return activity.waits or (blocked and any(state.rank in ranks for ranks in among))


def _word(state: RankState, activity: _Activity, facts: BoardFacts) -> str:
    """The state of a rank in a word: in a run also whether it is paused, or has finished it.

    That it waits is said where something is wrong: in a healthy run it would change all the time.
    """
    word = state_word(state)
    if word == Status.READY.value and facts.pending and state.rank in facts.members:
        return "finished"
    if state.status is not Status.RUNNING:
        return word
    if activity.paused:
        return Status.PAUSED.value
    wrong = facts.diagnosis is not None and facts.diagnosis.wrong
    return Role.WAITING.value if wrong and _waits(state, activity, facts.findings) else word


def _role(state: RankState, activity: _Activity, silent: bool, findings: Sequence[Finding]) -> Role:
    """The first description that is true of the rank; the worst are tried first."""
    named = next((finding for finding in findings if state.rank in finding.ranks), None)
    roles = (
        (named is not None and not named.passing, Role.CULPRIT),
        (named is not None, Role.PAUSED if activity.paused else Role.LATE),
        (state.status is Status.DEAD and not state.restarting, Role.DEAD),
        (state.status is Status.FAILED, Role.FAILED),
        (silent, Role.SILENT),
        (activity.paused, Role.PAUSED),
        (_waits(state, activity, findings), Role.WAITING),
        (state.status is Status.READY and state.refused, Role.REFUSED),
        (state.status is Status.READY and bool(state.raised), Role.RAISED),
        (state.status is Status.READY and state.no_group, Role.GROUPLESS),
        (state.status is Status.READY, Role.READY),
    )
    return next((role for is_so, role in roles if is_so), Role.RUNNING)


def headline(snapshot: Snapshot, known: Mapping[int, str] = MappingProxyType({})) -> str:
    """The session in one line. `known` has the ranks' states in a word, where more is known."""
    if snapshot.ended:
        return f"Session ended: {snapshot.ended}"
    if not snapshot.ranks:
        return "No ranks. Start them: %ddp_init --world-size 4"
    what = f"{counted(snapshot.world_size, 'rank')}, {snapshot.backend or 'no backend'}"
    if snapshot.loading is not None:
        return f"{what}: torch is being loaded"
    words: dict[str, list[int]] = {}
    for state in sorted(snapshot.ranks, key=lambda state: list(Status).index(state.status)):
        word = known.get(state.rank) or state_word(state)
        words.setdefault(word, []).append(state.rank)
    parts = [
        word if len(ranks) == snapshot.world_size else f"{name_ranks(ranks)} {word}"
        for word, ranks in words.items()
    ]
    where = f" · {snapshot.init_method}" if snapshot.init_method else ""
    return f"{what}{where}: {'; '.join(parts)}"


def loading_text(snapshot: Snapshot) -> str:
    """``Loading torch, once for all ranks: 12 s``; empty when it is loaded."""
    loading = snapshot.loading
    if loading is None:
        return ""
    seconds = max(0, snapshot.taken_ns - loading.since_ns) // 1_000_000_000
    return f"{loading_what(loading)}: {seconds} s"


def loading_what(loading: Loading) -> str:
    """``Loading torch, once for all ranks``, or on other hosts how far each one is."""
    hosts = ", ".join(f"{name} {at}" for name, at in loading.hosts.items())
    return f"Starting hosts ({hosts})" if hosts else "Loading torch, once for all ranks"


def state_word(state: RankState) -> str:
    """The state of a rank in a word."""
    if state.status is Status.READY and state.raised:
        return "refused" if state.refused else "raised"
    if state.status is Status.READY and state.no_group:
        return "no group"
    if state.restarting and state.status in (Status.DEAD, Status.STARTING):
        return "restarting"
    return state.status.value


def describe(state: RankState) -> str:
    """Say in a few words what a rank does, waits for, raised last or died of."""
    match state.status:
        case Status.STARTING:
            return "its new process is starting" if state.restarting else "its process is starting"
        case Status.SETTING_UP:
            return state.doing or state.detail
        case Status.PAUSED:
            return state.detail
        case Status.READY:
            if state.raised:
                return f"its last cell raised {state.raised}"
            return "its code destroyed its process group" if state.no_group else ""
        case Status.RUNNING:
            return state.doing or (f"cell {state.cell}" if state.cell else "the benchmark")
        case Status.FAILED:
            return f"{state.entering.value}: {state.cause}" if state.entering else state.cause
        case Status.DEAD:
            if state.restarting:
                return "its process is being replaced"
            end = "its process is gone" if state.exit_code is None else exit_text(state.exit_code)
            last = state.last_words.strip().splitlines()
            return f"{end} · last words: {last[-1].strip()}" if last else end


def notes(snapshot: Snapshot, told: Collection[int] = ()) -> tuple[str, ...]:
    """Choices that were made for the user, then remedies for what went wrong.

    `told` are dead ranks of which a finding says how they come back.
    """
    lines = list(snapshot.notes)
    for state in snapshot.ranks:
        if state.status is Status.FAILED and state.remedy:
            lines.append(f"Rank {state.rank}: {state.remedy}")
        if state.lost_events:
            lines.append(f"Rank {state.rank}: {state.lost_events} messages were lost.")
    if snapshot.groupless and not snapshot.ended:
        lines.append(no_group(snapshot.groupless))
    for text in dict.fromkeys(text for state in snapshot.ranks for text in state.limits):
        limited = tuple(state.rank for state in snapshot.ranks if text in state.limits)
        lines.append(f"{name_ranks(limited).capitalize()}: {text}")
    gone = snapshot.with_status(Status.DEAD)
    dead = tuple(rank for rank in gone if not snapshot.ranks[rank].restarting)
    running = snapshot.with_status(Status.RUNNING)
    if dead and not snapshot.ended and (running or not set(dead) <= set(told)):
        who, restart = name_ranks(dead), f"%ddp_restart --ranks {format_ranks(dead)}"
        if running:
            all_of = "both" if len(dead) + len(running) == 2 else "all of them"
            lines.append(
                f"{who.capitalize()} can be brought back once {verb(running, 'has', 'have')} left "
                f"the cell: {restart}. If that waits for {who}, interrupt it and restart {all_of}: "
                f"%ddp_restart --ranks {format_ranks((*dead, *running))}"
            )
        else:
            every = len(dead) == len(snapshot.ranks)
            kept = "without their variables" if every else "the others keep their variables"
            lines.append(f"{who.capitalize()} can be brought back, {kept}: {restart}")
    return tuple(dict.fromkeys(lines))


def no_group(ranks: Ranks) -> str:
    """Say that the code of `ranks` destroyed their group, and what makes one."""
    return (
        f"{verb(ranks, 'has', 'have').capitalize()} no process group, because "
        f"{agree(ranks, 'its', 'their')} code destroyed it. Make a new one: %ddp_abort (variables "
        "stay)"
    )
