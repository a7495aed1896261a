"""Errors of ranks, and waits, where no rule says more: the known facts, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives.p2p import unequal_counts
from ddp_notebook.diagnosis.progress import IN_A_TITLE, doing, raised_words, way_to_error
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    CellFinished,
    Finding,
    Ranks,
    RankState,
    Side,
    Status,
    by_value,
    cut,
    name_ranks,
)

UNEXPLAINED_AFTER_S = 10.0
"""Ranks that wait for so long, and for no known reason, are a finding."""


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
    kinds = "exception-on-one-rank.ended", "exception-on-one-rank.without-a-group"
    if len(own) == len(ranks):
        kinds = "exception.on-all-ranks", "exception.without-a-group"
    same: dict[tuple[str, str], list[CellFinished]] = {}
    for end in own:
        way = way_to_error(end.path) if end.path else ""
        same.setdefault((_words(end, 300), way), []).append(end)
    facts = tuple(
        catalogue.words(
            "exception-on-one-rank.ended.lost", ranks=(end.rank,), error=_words(end, 300)
        )
        for end in lost
    )
    findings = []
    for (full, way), alike in same.items():
        who, words = tuple(sorted(end.rank for end in alike)), _words(alike[0])
        known = (way, full if words != full else "")
        findings.append(
            catalogue.finding(
                kinds[bool(torch_errors.NO_GROUP.search(full))],
                who,
                waiting=tuple(end.rank for end in lost),
                evidence=(*(f"{name_ranks(who)}: {fact}" for fact in known if fact), *facts),
                sides=(Side(who, "", "", alike[0].path[-1], alike[0].path, "raised"),)
                if way
                else (),
                error=words,
            ).with_code(sources)
        )
    return tuple(findings)


def _words(end: CellFinished, most: int = IN_A_TITLE) -> str:
    return raised_words(end.ename, end.evalue, end.path, most)


def _lost_store(end: CellFinished) -> bool:
    """True of an error of a store's client whose host is gone."""
    from_store = end.ename in ("DistNetworkError", "DistStoreError")
    return from_store and bool(torch_errors.STORE_WENT_AWAY.search(end.evalue))


def _left(left: Ranks, failed: Sequence[CellFinished]) -> Finding:
    """Ranks that finished while others needed them; of several it is not known which."""
    one = len(left) == 1
    kind = "early-exit.left-first" if one else "undecided.left-first"
    if one and all(map(_lost_store, failed)):
        kind = "store-gone.host-ended"
    return catalogue.finding(
        kind,
        left if one else (),
        waiting=tuple(sorted(end.rank for end in failed)),
        evidence=tuple(f"rank {end.rank}: {_words(end, 300)}" for end in failed),
        left=left,
    )


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
            state.entering.value,
            cut(state.cause.rstrip("."), 300),
            state.remedy,
        )
        for state in states
        if state.status is Status.FAILED and state.entering is not None and state.cause
    }
    return tuple(
        Finding(
            Category(category) if category in set(Category) else Category.EXCEPTION,
            ranks,
            catalogue.words("exception.in-setup.title", ranks=ranks, stage=stage, cause=cause),
            remedy or catalogue.words("exception.in-setup.fix"),
            titled=True,
        )
        for ranks, (category, stage, cause, remedy) in by_value(failed)
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
        catalogue.words("undecided.waiting-for-long.store", ranks=ranks, target=target)
        for ranks, target in by_value(targets)
    )
    return catalogue.finding(
        "undecided.waiting-for-long",
        (),
        waiting=stuck,
        evidence=(*unequal_counts(case.collectives), *stores),
        waited_s=longest_s,
    )


def unsure(case: Case, waited_s: Mapping[int, float], title: str, pending: Ranks) -> str:
    """Why no findings prove nothing: ranks wait, failed, or are in `title`; empty for proof."""
    waiting, silent = case.where(Activity.WAITING), case.where(Activity.SILENT)
    if waiting:
        longest_s = max((waited_s.get(rank, 0.0) for rank in waiting), default=0.0)
        return catalogue.words(
            "remarks.unsure.waiting",
            waiting=waiting,
            silent=silent,
            seconds=f"{longest_s:.1f}" if longest_s else "",
        )
    if silent:
        return catalogue.words("remarks.unsure.silent", silent=silent)
    if pending:
        least_s = min(waited_s.get(rank, 0.0) for rank in pending)
        return catalogue.words(
            "remarks.unsure.running",
            pending=pending,
            title=title,
            seconds=f"{least_s:.0f}" if least_s >= 3 else "",
        )
    return _failed(case)


def _failed(case: Case) -> str:
    """Which ranks of the newest run failed, or were interrupted; empty if none was."""
    newest = max((report.run for report in case.ranks), default=0)
    ended = [e for e in case.ranks if e.activity is Activity.FAILED and e.run == newest]
    stopped = tuple(e.rank for e in ended if e.error.type == "KeyboardInterrupt")
    failed = tuple(e.rank for e in ended if e.rank not in stopped)
    if stopped and not failed:
        return _interrupted(stopped)
    return catalogue.words("remarks.unsure.failed", failed=failed) if failed else ""


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
    return catalogue.finding(
        "straggler.interrupted" if late else "early-exit.interrupted",
        ranks,
        waiting=waiting,
        evidence=(*facts, *(f"rank {report.rank}: {doing(report)}" for report in stay)),
        places=tuple(sorted(places)),
    )


def _interrupted(ranks: Ranks) -> str:
    return catalogue.words("remarks.unsure.interrupted", stopped=ranks)
