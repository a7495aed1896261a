"""Rules for torch.distributed.rpc: ranks that wait for calls that no rank will make any more."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.model import (
    Activity,
    Category,
    Finding,
    Lacks,
    RankReport,
    Ranks,
    name_ranks,
    verb,
)


def never_called(context: Context) -> Iterator[Finding]:
    """Ranks that wait for a remote call, or that ended, while all others are in rpc.shutdown().

    A worker in it makes no call of its own; a call that it runs for another rank makes it busy,
    unless that waits itself. Then nothing comes of it while no other rank makes a call.
    """
    of: dict[Lacks | None, list[RankReport]] = {}
    for e in context.case.ranks:
        of.setdefault(_lacks(e), []).append(e)
    shut, waits, rest = (of.get(key, []) for key in (Lacks.SHUTDOWN, Lacks.REMOTE_CALL, None))
    runs, asks = of.get(Lacks.OWN_CALLS, []), of.get(Lacks.ANSWER, [])
    if runs and not rest:
        yield _runs_for_ever(context, runs)
    elif runs or asks:
        return  # what some rank runs for another may call others
    elif waits and not rest:
        yield _waits_for_ever(context, waits, _ranks(shut))
    elif shut and rest and not waits and all(context.finished(e.rank) for e in rest):
        yield _left(context, _ranks(rest), _ranks(shut))


def _lacks(e: RankReport) -> Lacks | None:
    known = e.blocked is not None and e.activity is Activity.BUSY
    lacks = e.blocked.lacks if known and e.blocked is not None else None
    return lacks if lacks in _OF_RPC else None


_OF_RPC = (Lacks.SHUTDOWN, Lacks.REMOTE_CALL, Lacks.ANSWER, Lacks.OWN_CALLS)


def _ranks(reports: list[RankReport]) -> Ranks:
    return tuple(e.rank for e in reports)


def _waits_for_ever(context: Context, waits: list[RankReport], shut: Ranks) -> Finding:
    ranks = _ranks(waits)
    at = f" at {waits[0].path[-1]}" if waits[0].path else ""
    others = f": {verb(shut, 'is', 'are')} in rpc.shutdown()" if shut else ""
    return Finding(
        Category.LOCAL_DEADLOCK,
        ranks,
        f"{verb(ranks, 'waits', 'wait')}{at} for a lock or an event that only a remote call can "
        f"end, and no rank makes one any more{others}",
        "Have every worker told to stop (rpc_sync) before rpc.shutdown(), or wait with a timeout. "
        "rpc.shutdown() itself serves calls until all workers are in it.",
        shut,
        tuple(f"rank {e.rank} {doing(e)}" for e in context.case.ranks),
    )


def _runs_for_ever(context: Context, runs: list[RankReport]) -> Finding:
    ranks = _ranks(runs)
    calls = [line for e in runs for line in (e.blocked.threads if e.blocked else ())]
    where = f" ({calls[0]})" if calls else ""
    return Finding(
        Category.LOCAL_DEADLOCK,
        ranks,
        f"{verb(ranks, 'runs', 'run')} a call for another rank that waits for a lock or an event"
        f"{where}, and no rank makes a call any more that could end it: all wait for answers or "
        "are in rpc.shutdown()",
        "Let a function that is called by RPC not wait for what a later call brings: have it "
        "return at once, or use @rpc.functions.async_execution and a Future that the later call "
        "completes. A caller that waits in rpc_sync makes no other call meanwhile: rpc_async does.",
        tuple(e.rank for e in context.case.ranks if e.rank not in ranks),
        tuple(f"rank {e.rank} {doing(e)}" for e in context.case.ranks),
    )


def _left(context: Context, ranks: Ranks, shut: Ranks) -> Finding:
    return Finding(
        Category.EARLY_EXIT,
        ranks,
        f"{verb(ranks, 'has', 'have')} ended without rpc.shutdown(), in which "
        f"{name_ranks(shut)} wait{'s' if len(shut) == 1 else ''} for all workers",
        "Call rpc.shutdown() on every worker, also where it ends early.",
        shut,
        tuple(f"rank {e.rank} {doing(e)}" for e in context.case.ranks),
    )
