"""Rules about files: paths that ranks write, make or delete under each other, a store's file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import in_setup, raised_words, way_to_error
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    RankReport,
    Ranks,
    SaveFacts,
    agree,
    name_ranks,
)

_RACED = ("FileExistsError", "FileNotFoundError")
_CHANGES = re.compile(
    r"\b(makedirs|mkdir|rename|renames|replace|remove|unlink|rmdir|rmtree|move)\("
)
_QUOTED = re.compile(r"'([^']+)'")
_OWN_NAMES = (
    *("uuid4", "uuid1", "mkdtemp", "mktemp", "getpid", "token_hex", "strftime", "isoformat"),
    *("now", "time", "time_ns", "randint", "random", "choices"),
)
"""Functions that answer differently on each rank, of which names of files are made."""
_DELETES = ("remove", "unlink", "rmtree", "rmdir")


def raced_paths(context: Context) -> Iterator[Finding]:
    """A path that one rank makes, moves or deletes where another has just done the same.

    Only where every rank does it: nothing in the code has some ranks alone come there.
    """
    same: dict[str, list[RankReport]] = {}
    for report in context.case.ranks:
        if _raced(context, report):
            same.setdefault(str(report.error_at[-1]), []).append(report)
    everyone = tuple(e.rank for e in context.case.ranks)
    for failed in same.values():
        first, ranks = failed[0], tuple(e.rank for e in failed)
        if len(ranks) == len(everyone):
            continue  # none was first
        said = raised_words(first.error_type, first.error_text, first.error_at, 200)
        yield Finding(
            Category.FILESYSTEM,
            everyone,
            f"every rank changes one path there, and {name_ranks(ranks)} came after another had "
            f"done it: {said}",
            "Let rank 0 alone do it, and the others wait in dist.barrier(); or allow that it is "
            "done (exist_ok=True, ignore_errors=True).",
            context.victims,
            tuple(f"{name_ranks((e.rank,))}: {way_to_error(e.error_at)}" for e in failed),
        )


def read_too_early(context: Context) -> Iterator[Finding]:
    """Ranks that did not find a file which is there by now: another rank was still to write it."""
    same: dict[tuple[str, str], list[RankReport]] = {}
    for report in filter(_lacks_a_file, context.case.ranks):
        if report.error_misses:
            key = str(report.error_at[-1]), report.error_misses
            same.setdefault(key, []).append(report)
    for (place, path), failed in same.items():
        ranks = tuple(e.rank for e in failed)
        if len(ranks) == len(context.case.ranks):
            continue  # who wrote it is none of them
        yield Finding(
            Category.FILESYSTEM,
            ranks,
            f"{name_ranks(ranks)} did not find {path} at {place}, and it is there by now: it was "
            "read before another rank had written it",
            "Let all ranks meet between the writing and the reading: dist.barrier().",
            context.victims,
            tuple(f"{name_ranks((e.rank,))}: {way_to_error(e.error_at)}" for e in failed),
        )


def other_paths(context: Context) -> Iterator[Finding]:
    """Ranks look for a file on one line, each under another name that it has made up."""
    same: dict[str, list[RankReport]] = {}
    for report in filter(_lacks_a_file, context.case.ranks):
        same.setdefault(str(report.error_at[-1]), []).append(report)
    everyone = tuple(e.rank for e in context.case.ranks)
    for failed in same.values():
        paths = {e.rank: "".join(_QUOTED.findall(e.error_text)[-1:]) for e in failed}
        maker = _maker(context, failed[0])
        if len(failed) < len(everyone) and maker and _made_up(paths):
            yield Finding(
                Category.FILESYSTEM,
                everyone,
                f"{name_ranks(paths)} look for a file each under another name, and find none, at "
                f"{failed[0].error_at[-1]}: every rank makes up the path itself ({maker})",
                "Let rank 0 choose the path, and send it to the others: "
                "dist.broadcast_object_list([path], src=0).",
                context.victims,
                tuple(f"rank {rank}: {path}" for rank, path in paths.items()),
            )


def _lacks_a_file(report: RankReport) -> bool:
    failed = report.activity is Activity.FAILED and bool(report.error_at)
    return failed and report.error_type == "FileNotFoundError"


def _made_up(paths: Mapping[int, str]) -> bool:
    """Another path on each of several ranks, and not only by the number of the rank."""
    plain = {re.sub(rf"(?<!\d)0*{rank}(?!\d)", "", path) for rank, path in paths.items()}
    return 1 < len(paths) == len(plain) and "" not in plain


def _maker(context: Context, report: RankReport) -> str:
    """A function in the code that leads there of which each rank may make a name of its own."""
    record = Collective(report.rank, 0, "", path=report.error_at)
    return next((w for w in _OWN_NAMES if context.sources.mentions(record, f"{w}(")), "")


def _raced(context: Context, report: RankReport) -> bool:
    if report.activity is not Activity.FAILED or report.error_type not in _RACED:
        return False
    changes = _CHANGES.search(report.error_at[-1].text) if report.error_at else None
    return changes is not None and not context.sources.is_for_some(report.error_at, changes[1])


def saved_by_several(context: Context) -> Iterator[Finding]:
    """One file that several ranks write with torch.save, with nothing between that orders them.

    No collective: both had called as many then, and all ranks have called as many in all.
    """
    counts = {facts.collectives for facts in context.facts.values()}
    if 0 in counts or len(counts) > 1:
        return
    writers: dict[tuple[str, str], dict[int, SaveFacts]] = {}
    for rank, facts in sorted(context.facts.items()):
        for save in (save for save in facts.saves if save.shards is None):
            writers.setdefault((facts.host, save.path), {})[rank] = save
    for (_, path), of in writers.items():
        racing = _at_one_moment(of)
        if racing:
            yield _race(path, racing)


def _at_one_moment(of: Mapping[int, SaveFacts]) -> dict[int, SaveFacts]:
    """Those of whose moments one is another rank's, too."""
    moments = Counter(moment for save in of.values() for moment in {*save.moments})
    together = {moment for moment, count in moments.items() if count > 1}
    return {rank: save for rank, save in of.items() if together.intersection(save.moments)}


def _race(path: str, of: Mapping[int, SaveFacts]) -> Finding:
    ranks = tuple(of)
    at = of[ranks[0]].place
    return Finding(
        Category.FILESYSTEM,
        ranks,
        f"{name_ranks(ranks)} write one file with torch.save at the same time"
        f"{f' ({at})' if at else ''}: who is last decides what is in it, and it may be damaged",
        "Save on one rank alone (if dist.get_rank() == 0: torch.save(...)), and let the others "
        "wait in dist.barrier() before they read it; or give each rank a path of its own.",
        evidence=(
            path,
            *(f"rank {rank}: written {len(save.moments)} times" for rank, save in of.items()),
            "no collective between their writes",
        ),
    )


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
