"""Rules about files: paths that ranks make or delete under each other, a store's file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import in_setup, raised_words, way_to_error
from ddp_notebook.model import Activity, Category, Finding, RankReport, Ranks, agree, name_ranks

_RACED = ("FileExistsError", "FileNotFoundError")
_CHANGES = re.compile(
    r"\b(makedirs|mkdir|rename|renames|replace|remove|unlink|rmdir|rmtree|move)\("
)
_DELETES = ("remove", "unlink", "rmtree", "rmdir")


def raced_paths(context: Context) -> Iterator[Finding]:
    """A path that one rank makes, moves or deletes where another has just done the same.

    Only where every rank does it: nothing in the code has some ranks alone come there.
    """
    same: dict[str, list[RankReport]] = {}
    for report in context.case.ranks:
        if _raced(context, report):
            same.setdefault(str(report.error.at[-1]), []).append(report)
    everyone = tuple(e.rank for e in context.case.ranks)
    for failed in same.values():
        first, ranks = failed[0], tuple(e.rank for e in failed)
        if len(ranks) == len(everyone):
            continue  # none was first
        said = raised_words(first.error.type, first.error.text, first.error.at)
        yield Finding(
            Category.FILESYSTEM,
            everyone,
            f"every rank changes one path there, and {name_ranks(ranks)} came after another had "
            f"done it: {said}",
            "Let rank 0 alone do it, and the others wait in dist.barrier(); or allow that it is "
            "done (exist_ok=True, ignore_errors=True).",
            context.victims,
            tuple(f"{name_ranks((e.rank,))}: {way_to_error(e.error.at)}" for e in failed),
        )


def _raced(context: Context, report: RankReport) -> bool:
    if report.activity is not Activity.FAILED or report.error.type not in _RACED:
        return False
    changes = _CHANGES.search(report.error.at[-1].text) if report.error.at else None
    return changes is not None and not context.sources.is_for_some(report.error.at, changes[1])


def lost_store_file(context: Context) -> Iterator[Finding]:
    """The file of a ``file://`` store that was deleted while the groups still need it."""
    waiting = tuple(e for e in context.case.ranks if _needs_lost_file(e))
    if not waiting:
        return
    path = waiting[0].file.path
    everyone = tuple(e.rank for e in context.case.ranks)
    files = {place.file for e in waiting for place in e.path}
    culprits, place = context.sources.who_calls(_DELETES, sorted(files), everyone)
    ranks: Ranks = tuple(e.rank for e in waiting)
    need = f"while {name_ranks(ranks)} still {agree(ranks, 'needs', 'need')} it as a store"
    cause = f"the file of the rendezvous, {path}, was deleted {need}"
    if culprits and place:
        cause = (
            f"{name_ranks(culprits)} deleted the file of the rendezvous, {path}, at {place}, {need}"
        )
    yield Finding(
        Category.STORE_GONE,
        culprits,
        cause,
        "Delete it before any rank is started, or when all ranks have left: after "
        "dist.destroy_process_group() on every rank.",
        context.victims,
        (f"nothing that {name_ranks(ranks)} wrote is in {path} any more",),
    )


def _needs_lost_file(report: RankReport) -> bool:
    waits = report.activity in (Activity.WAITING, Activity.FAILED)
    return waits and (report.initialized or in_setup(report)) and report.file.lost
