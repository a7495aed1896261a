"""Errors of ranks, and waits, where no rule says more: the known facts, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ddp_notebook.diagnosis.progress import doing, raised_words, way_to_error
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    CellFinished,
    Finding,
    Place,
    Ranks,
    RankState,
    Side,
    Status,
    agree,
    by_value,
    cut,
    name_ranks,
    them,
    verb,
)

UNEXPLAINED_AFTER_S = 10.0
"""Ranks that wait for so long, and for no known reason, are a finding."""
_CORRECT = "Correct the error, and run it again."
_NO_GROUP = (
    "In a cell: %ddp_abort makes the group of %ddp_init again; variables stay. In a script: call "
    "dist.init_process_group before, and dist.destroy_process_group after all else."
)


def raised(
    ends: Iterable[CellFinished],
    ranks: Ranks,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Return what ranks of a run raised: a finding for those that raised the same on one line.

    `ranks` are all that the run was given to, `sources` the user's files and cells.
    """
    # When one rank raises, the others' next collective fails with "connection closed": these are no
    # mistakes of theirs. Only where every error is of that kind, somebody who ended well has left.
    ends = tuple(ends)
    left = tuple(sorted(end.rank for end in ends if end.outcome == "ok"))
    failed = [end for end in ends if end.outcome == "error"]
    own = [
        end for end in failed if not (_lost_store(end) or torch_errors.WENT_AWAY.search(end.evalue))
    ]
    if left and failed and not own:
        return (_left(left, failed),)
    own = own or failed
    lost = [end for end in failed if end not in own]
    category = Category.EXCEPTION_ON_ONE_RANK
    if len(own) == len(ranks):
        category = Category.EXCEPTION
    same: dict[tuple[str, str], list[int]] = {}
    paths: dict[str, tuple[Place, ...]] = {}
    for end in own:
        way = way_to_error(end.path) if end.path else ""
        paths[way] = end.path
        same.setdefault((f"raised {_words(end)}", way), []).append(end.rank)
    facts = tuple(
        f"rank {end.rank} lost its connection to one that had gone: {_words(end)}" for end in lost
    )
    return tuple(
        Finding(
            category,
            tuple(sorted(who)),
            cause,
            _NO_GROUP if torch_errors.NO_GROUP.search(cause) else _CORRECT,
            tuple(end.rank for end in lost),
            (f"{name_ranks(who)}: {way}", *facts) if way else facts,
            sides=(Side(tuple(sorted(who)), "", "", paths[way][-1], paths[way], "raised"),)
            if way
            else (),
        ).with_code(sources)
        for (cause, way), who in same.items()
    )


def _words(end: CellFinished) -> str:
    return raised_words(end.ename, end.evalue, end.path)


def _lost_store(end: CellFinished) -> bool:
    """True of an error of a store's client whose host is gone."""
    from_store = end.ename in ("DistNetworkError", "DistStoreError")
    return from_store and bool(torch_errors.STORE_WENT_AWAY.search(end.evalue))


def _left(left: Ranks, failed: Sequence[CellFinished]) -> Finding:
    """Ranks that finished while others needed them; of several it is not known which."""
    victims = tuple(sorted(end.rank for end in failed))
    one = len(left) == 1
    who = f"{name_ranks(left)} {'has' if one else 'have'} finished"
    lost = "; ".join(f"{name_ranks((end.rank,))}: {_words(end)}" for end in failed)
    category, culprits = (Category.EARLY_EXIT, left) if one else (Category.UNDECIDED, ())
    cause = f"{who}, and the connection of {name_ranks(victims)} to a rank that had gone was closed"
    remedy = (
        "Let every rank do the same number of steps, and finish before one leaves: "
        "dist.barrier() before destroy_process_group()."
    )
    if one and all(map(_lost_store, failed)):
        category = Category.STORE_GONE
        cause = f"{who}, and with it the store that {name_ranks(victims)} still needed"
        remedy = (
            "Let the rank that hosts the store wait for the others before it ends: count them in "
            "the store (store.add), or dist.barrier()."
        )
    return Finding(category, culprits, cause, remedy, victims, (lost,))


def raised_in(case: Case, finished: Ranks = ()) -> tuple[Finding, ...]:
    """Findings for what ranks raised, from a case alone; `finished` are ranks that ended well."""
    failed = (
        e
        for e in case.ranks
        # What ends a process by SystemExit writes no traceback, and so no line.
        if e.activity is Activity.FAILED and (e.error.at or e.error.type == "SystemExit")
    )
    ends = [
        CellFinished(
            rank=e.rank,
            cell=0,
            outcome="error",
            ename=e.error.type,
            evalue=e.error.text,
            path=e.error.at,
        )
        for e in failed
        if e.error.type != "KeyboardInterrupt"
    ]
    ends += [CellFinished(rank=rank, cell=0, outcome="ok") for rank in finished]
    return raised(ends, tuple(e.rank for e in case.ranks), case.sources)


def failed_in_set_up(states: Iterable[RankState], case: Case) -> tuple[Finding, ...]:
    """Findings for failed stages of setup; ranks that failed in the same way share one."""
    certain = {report.rank: report.error.category for report in case.ranks}
    failed = {
        state.rank: (
            certain.get(state.rank, ""),
            cut(f"{state.entering.value}: {state.cause.rstrip('.')}", 300),
            state.remedy or "Correct the error, then: %ddp_init",
        )
        for state in states
        if state.status is Status.FAILED and state.entering is not None and state.cause
    }
    return tuple(
        Finding(
            Category(category) if category in set(Category) else Category.EXCEPTION,
            ranks,
            cause,
            remedy,
        )
        for ranks, (category, cause, remedy) in by_value(failed)
    )


def unexplained(case: Case, waited_s: Mapping[int, float]) -> Finding | None:
    """Ranks that have waited for long without a known cause, and what is known of them.

    None where a rank has something to do that may free them. `waited_s` says for how long each
    has waited, as far as that is known.
    """
    stuck = case.where(Activity.WAITING, Activity.SILENT)
    longest_s = max((waited_s.get(rank, 0.0) for rank in stuck), default=0.0)
    working = case.where(Activity.BUSY, Activity.HELD)
    moving = any(report.process.runnable for report in case.ranks if report.rank in stuck)
    if longest_s < UNEXPLAINED_AFTER_S or working or moving:
        return None
    probes = {e.rank: e.network.probe for e in case.ranks if e.inside == "store"}
    targets = {rank: probe.target for rank, probe in probes.items() if probe.state == "open"}
    stores = (
        f"{target} accepts the connection of {name_ranks(ranks)}; whether a store answers there is "
        "not known"
        for ranks, target in by_value(targets)
    )
    return Finding(
        Category.UNDECIDED,
        (),
        f"{verb(stuck, 'has', 'have')} waited for {longest_s:.0f} s, and the cause is not known",
        "See the line of each rank: %ddp_where. Or free them: %ddp_abort",
        stuck,
        (*(f"rank {e.rank} {doing(e)}" for e in case.ranks), *stores),
        commands=("%ddp_where", "%ddp_abort"),
    )


def unsure(case: Case, waited_s: Mapping[int, float], title: str, pending: Ranks) -> str:
    """Why no findings prove nothing: ranks wait, failed, or are in `title`; empty for proof."""
    waiting, silent = case.where(Activity.WAITING), case.where(Activity.SILENT)
    if waiting or silent:
        longest_s = max((waited_s.get(rank, 0.0) for rank in waiting), default=0.0)
        long = f" for {longest_s:.1f} s" if longest_s else ""
        waits = f"{verb(waiting, 'waits', 'wait')}{long}" if waiting else ""
        no_answer = verb(silent, "does not answer", "do not answer") if silent else ""
        return f"No problem found so far: {'; '.join(filter(None, (waits, no_answer)))}."
    if pending:
        least_s = min(waited_s.get(rank, 0.0) for rank in pending)
        long = f", on the same line for {least_s:.0f} s" if least_s >= 3 else ""
        return f"No problem found so far: {verb(pending, 'is', 'are')} still in {title}{long}."
    return _failed(case)


def _failed(case: Case) -> str:
    """Which ranks of the newest run failed, or were interrupted; empty if none was."""
    newest = max((report.run for report in case.ranks), default=0)
    ended = [e for e in case.ranks if e.activity is Activity.FAILED and e.run == newest]
    stopped = tuple(e.rank for e in ended if e.error.type == "KeyboardInterrupt")
    failed = tuple(e.rank for e in ended if e.rank not in stopped)
    if stopped and not failed:
        return _interrupted(stopped)
    return (
        f"{name_ranks(failed).capitalize()} failed, and the cause is not known." if failed else ""
    )


def interrupted(ends: Iterable[CellFinished]) -> str:
    """That a run was interrupted, so that no findings prove little; empty where it was not."""
    ranks = tuple(sorted(end.rank for end in ends if end.outcome == "interrupted"))
    return _interrupted(ranks) if ranks else ""


def left_by_interrupted(ends: Iterable[CellFinished], case: Case) -> Finding | None:
    """Ranks that stay in a run of which others were interrupted; None where one is at work.

    The others wait in collectives, which no interrupt ends: so who was interrupted was late.
    """
    paths = {end.rank: end.path for end in ends if end.outcome == "interrupted"}
    stopped = {rank: way_to_error(path) if path else "" for rank, path in paths.items()}
    stay = [report for report in case.ranks if report.activity is Activity.WAITING]
    if not stopped or not stay or case.where(Activity.BUSY, Activity.HELD):
        return None
    ranks, waiting = tuple(sorted(stopped)), tuple(report.rank for report in stay)
    facts = (f"rank {rank}: {stopped[rank]}" for rank in ranks if stopped[rank])
    places = {str(path[-1]) if path else "" for path in paths.values()}
    late = "" not in places
    was = "interrupted"
    if late:
        they = agree(ranks, "it was", "they were")
        was = f"still at {', '.join(sorted(places))} when {they} interrupted"
    return Finding(
        Category.STRAGGLER if late else Category.EARLY_EXIT,
        ranks,
        f"{verb(ranks, 'was', 'were')} {was}, and {verb(waiting, 'waits', 'wait')} since",
        f"Free {them(waiting)}: %ddp_abort",
        waiting,
        (*facts, *(f"rank {report.rank} {doing(report)}" for report in stay)),
        commands=("%ddp_abort",),
    )


def _interrupted(ranks: Ranks) -> str:
    return f"No problem was found before {verb(ranks, 'was', 'were')} interrupted."
