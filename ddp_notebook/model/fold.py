"""State is a fold over events: the only way a snapshot changes; and where ranks are paused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from ddp_notebook.model import (
    CellFinished,
    CellStarted,
    Event,
    EventsLost,
    Limited,
    LineLeft,
    LineStopped,
    Moment,
    Place,
    Pulse,
    RankExited,
    RankSpawned,
    RankState,
    Snapshot,
    Stage,
    StageFailed,
    StageFinished,
    StagePaused,
    StageStarted,
    Status,
)

MISMATCH = "Mismatch"
"""The error of a rank whose collective was refused."""


def fold(snapshot: Snapshot, events: Iterable[Event]) -> Snapshot:
    """The state after `events`. Events of different ranks may come in any interleaving."""
    ranks = list(snapshot.ranks)
    for event in events:
        if 0 <= event.rank < len(ranks):  # SESSION is none of them
            ranks[event.rank] = fold_rank(ranks[event.rank], event)
    return replace(snapshot, ranks=tuple(ranks))


def state_at(start: Snapshot, moments: Iterable[Moment], at_ns: int) -> Snapshot:
    """The state as it was at `at_ns`: `start` and the later events until then."""
    snapshot = start
    for moment in moments:
        if moment.at_ns > at_ns:
            continue
        if moment.state is not None:
            snapshot = moment.state
        elif moment.event is not None:
            heard_ns = min(max(moment.at_ns, moment.until_ns), at_ns)
            snapshot = fold(snapshot, (structs.replace(moment.event, heard_ns=heard_ns),))
    return replace(snapshot, taken_ns=at_ns)


def set_up_anew(state: RankState) -> RankState:
    """A rank that is launched and has passed no further stage; a dead one stays dead."""
    if state.status is Status.DEAD:
        return state
    return replace(
        state,
        status=Status.SETTING_UP,
        stage=Stage.LAUNCHED,
        entering=None,
        detail="",
        doing="",
        cause="",
        remedy="",
        raised="",
        refused=False,
        no_group=False,
    )


def without_group(state: RankState) -> RankState:
    """A rank whose process group was aborted: it takes cells and can be set up again."""
    if state.status is Status.DEAD or state.stage is not Stage.VERIFIED:
        return state
    return replace(
        state,
        status=state.status if state.status is Status.RUNNING else Status.FAILED,
        stage=Stage.LAUNCHED,
        entering=None,
        cause="its process group was given up",
        remedy="%ddp_init sets it up again",
    )


def fold_rank(state: RankState, event: Event) -> RankState:
    """The state of one rank after one of its events."""
    if isinstance(event, RankSpawned):
        if event.pid == state.pid and state.status is not Status.DEAD:  # it spoke first itself
            return replace(state, device=event.device or state.device)
        # A new process: nothing of the old one holds.
        return RankState(
            rank=state.rank,
            pid=event.pid,
            device=event.device,
            heard_ns=event.heard_ns,
            since_ns=event.heard_ns,
            restarting=state.restarting,
        )
    if isinstance(event, RankExited):
        if event.pid != state.pid:
            return state  # the predecessor of a rank that was restarted
        return replace(
            state,
            status=Status.DEAD,
            exit_code=event.exit_code,
            last_words=event.last_words,
            peak_bytes=event.peak_bytes,
            oom_kills=event.oom_kills,
            heard_ns=max(state.heard_ns, event.heard_ns),
            since_ns=event.heard_ns,
        )
    if isinstance(event, Limited):
        return replace(state, limits=tuple(dict.fromkeys((*state.limits, event.text))))
    if isinstance(event, EventsLost):
        return replace(state, lost_events=state.lost_events + event.count)
    if state.status is Status.DEAD:
        return state  # a last message overtaken by the news of its death
    heard_ns = max(state.heard_ns, event.heard_ns)
    return replace(_living(state, event), heard_ns=heard_ns)


def _after_cell(state: RankState, event: CellFinished) -> RankState:
    """Return a live rank after a cell; an interrupt is not an error of the cell."""
    failed = event.outcome == "error"
    refused = failed and event.ename == MISMATCH
    text, _, more = event.evalue.strip().partition("\n")
    if refused:  # our own words: what to type stands in the last of their lines
        text = " ".join(event.evalue.split())
    elif more:
        text += " …"
    status = Status.FAILED if state.cause else Status.PAUSED
    return replace(
        state,
        status=Status.READY if state.stage is Stage.VERIFIED else status,
        doing="",
        raised=": ".join(filter(None, (event.ename, text))) if failed and event.ename else "",
        refused=refused,
        no_group=event.no_group,
        since_ns=event.heard_ns,
    )


def _living(state: RankState, event: Event) -> RankState:
    """A live rank after an event of a cell; those of setup are `_in_setup`'s."""
    match event:
        case CellStarted():
            cell = event.number or event.cell
            return replace(
                state,
                status=Status.RUNNING,
                cell=cell,
                doing="",
                raised="",
                refused=False,
                since_ns=event.heard_ns,
            )
        case CellFinished():
            return _after_cell(state, event)
        case Pulse():
            moved = state.status is Status.RUNNING and event.doing != state.doing
            since_ns = event.heard_ns if moved else state.since_ns
            return replace(state, doing=event.doing, since_ns=since_ns)
        case StageStarted() | StagePaused() | StageFinished() | StageFailed():
            anew = replace(state, doing="", no_group=False, since_ns=event.heard_ns)
            return _in_setup(anew, event)
        case _:
            return state


def _in_setup(
    state: RankState, event: StageStarted | StagePaused | StageFinished | StageFailed
) -> RankState:
    match event:
        case StageStarted(stage=stage):
            detail = event.waiting_for and f"waiting for {event.waiting_for}"
            status = Status.SETTING_UP
            return replace(state, status=status, entering=stage, detail=detail, cause="", remedy="")
        case StagePaused():
            detail, status = f"before stage {event.stage.value}", Status.PAUSED
            return replace(state, status=status, entering=None, detail=detail, cause="", remedy="")
        case StageFailed(cause=cause, remedy=remedy):
            status, stage = Status.FAILED, event.stage
            return replace(
                state, status=status, entering=stage, detail="", cause=cause, remedy=remedy
            )
        case StageFinished():
            return replace(
                state,
                status=Status.READY if event.stage is Stage.VERIFIED else Status.SETTING_UP,
                stage=event.stage,
                entering=None,
                detail=event.detail,
                host=event.host or state.host,
                device=event.device or state.device,
                pid=event.pid or state.pid,
            )


MOST_PAUSES = 2_000
"""How many are kept of a run, the newest ones."""


@dataclass(frozen=True, slots=True)
class LinePause:
    """A rank was paused before a line. Times are the session's monotonic clock.

    `stop` counts a rank's stops; `why` is empty after a step; `ended_ns` is 0 while it is paused.
    """

    rank: int
    stop: int
    place: Place
    why: str
    began_ns: int
    ended_ns: int = 0


class LineStops:
    """Folds the events of one run. Not for several threads at once."""

    def __init__(self) -> None:
        self.now: dict[int, LineStopped] = {}
        """Ranks that are paused at a line, and where."""
        self._pauses: dict[tuple[int, int], LinePause] = {}
        self._left: dict[int, int] = {}
        """By rank, the last stop that it left: a rank may leave a stop before its event arrives."""

    @property
    def pauses(self) -> tuple[LinePause, ...]:
        """The pauses so far, each rank's in their order."""
        return tuple(self._pauses.values())

    def take(self, event: Event, at_ns: int) -> None:
        """An event of the run, which arrived at `at_ns`."""
        match event:
            case LineStopped() if event.stop > self._left.get(event.rank, 0):
                known = self.now.get(event.rank)
                if known is not None and known.stop != event.stop:
                    self._leave(event.rank, at_ns)
                self.now[event.rank] = event
                index = event.line - event.first
                text = event.source[index].strip() if 0 <= index < len(event.source) else ""
                function = {"<module>": ""}.get(event.function, event.function)
                place = Place(event.file, event.line, function, text)
                pause = LinePause(event.rank, event.stop, place, event.why, at_ns)
                self._pauses.setdefault((event.rank, event.stop), pause)
                if len(self._pauses) > MOST_PAUSES:
                    del self._pauses[next(iter(self._pauses))]
            case LineLeft():
                self._left[event.rank] = max(event.stop, self._left.get(event.rank, 0))
                known = self.now.get(event.rank)
                if known is not None and known.stop <= event.stop:
                    self._leave(event.rank, at_ns)
            case CellFinished() | RankExited() if event.rank in self.now:
                self._leave(event.rank, at_ns)

    def _leave(self, rank: int, at_ns: int) -> None:
        key = (rank, self.now.pop(rank).stop)
        pause = self._pauses.get(key)
        if pause is not None:
            self._pauses[key] = replace(pause, ended_ns=max(at_ns, pause.began_ns))
