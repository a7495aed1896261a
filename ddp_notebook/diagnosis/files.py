"""Rules about files: paths that ranks make, delete or miss under each other, a store's file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import in_setup, raised_words, way_to_error
from ddp_notebook.model import (
    Activity,
    Category,
    Finding,
    RankReport,
    Ranks,
    agree,
    at_place,
    by_value,
    name_ranks,
    verb,
)

_RACED = ("FileExistsError", "FileNotFoundError")
_CHANGES = re.compile(
    r"\b(makedirs|mkdir|rename|renames|replace|remove|unlink|rmdir|rmtree|move)\("
)
_DELETES = ("remove", "unlink", "rmtree", "rmdir")


def raced_paths(context: Context) -> Iterator[Finding]:
    """A path that one rank makes, moves or deletes where another has just done the same.

    Only where every rank does it: nothing in the code has some ranks alone come there.
    """
    reports = context.reports
    raced = {r: str(e.error.at[-1]) for r, e in reports.items() if _raced(context, e)}
    for ranks, _ in by_value(raced):
        if len(ranks) == len(reports):
            continue  # none was first
        first = reports[ranks[0]].error
        yield Finding(
            Category.FILESYSTEM,
            tuple(reports),
            f"every rank changes one path there, and {name_ranks(ranks)} came after another had "
            f"done it: {raised_words(first.type, first.text, first.at)}",
            "Let rank 0 alone do it, and the others wait in dist.barrier(); or allow that it is "
            "done (exist_ok=True, ignore_errors=True).",
            context.victims,
            tuple(f"rank {rank}: {way_to_error(reports[rank].error.at)}" for rank in ranks),
        )


def _raced(context: Context, report: RankReport) -> bool:
    if report.activity is not Activity.FAILED or report.error.type not in _RACED:
        return False
    # Why the line is read, though each report has what the rank changed: that is the last of it,
    # and the rank that came first has often written much since; it has no path of a
    # FileExistsError; and a job's logs have errors and lines alone. What every rank does is asked
    # of the code, then.
    changes = _CHANGES.search(report.error.at[-1].text) if report.error.at else None
    return changes is not None and not context.sources.is_for_some(report.error.at, changes[1])


def missed_paths(context: Context) -> Iterator[Finding]:
    """A path that ranks did not find: another rank removed it, made it later, or made it elsewhere.

    https://github.com/huggingface/transformers/issues/20988
    https://github.com/karpathy/nanochat/pull/336
    https://github.com/mosaicml/llm-foundry/pull/1083
    """
    lines = {
        e.rank: str(e.error.at[-1])
        for e in context.case.ranks
        if e.activity is Activity.FAILED and e.error.path and e.error.at
    }
    for ranks, _ in by_value(lines):
        missing = {rank: context.reports[rank] for rank in ranks}
        finding = (
            _removed_before(context, missing)
            or _made_later(context, missing)
            or _made_elsewhere(context, missing)
        )
        if finding is not None:
            yield finding


def _who(context: Context, what: str, path: str) -> Ranks:
    """The ranks that changed a path, or a folder that it is in."""
    return tuple(
        e.rank
        for e in context.case.ranks
        if any(
            c.what == what and f"{path}{os.sep}".startswith(f"{c.path}{os.sep}")
            for c in e.process.changed
        )
    )


def _missed(
    context: Context,
    missing: Mapping[int, RankReport],
    category: Category,
    ranks: Ranks,
    cause: str,
    remedy: str,
) -> Finding:
    """The finding; that ranks failed for want of the path is no mistake of theirs besides."""
    return Finding(
        category,
        ranks,
        cause,
        remedy,
        tuple(sorted({*context.victims, *missing})),
        tuple(f"rank {r}: {way_to_error(e.error.at)}: {e.error.path}" for r, e in missing.items()),
    )


def _removed_before(context: Context, missing: Mapping[int, RankReport]) -> Finding | None:
    first, ranks = next(iter(missing.values())).error, tuple(missing)
    removers = tuple(r for r in _who(context, "removed", first.path) if r not in missing)
    if not removers or first.path_exists:
        return None
    return _missed(
        context,
        missing,
        Category.FILESYSTEM,
        removers,
        f"{verb(removers, 'has', 'have')} removed or renamed {first.path} before "
        f"{name_ranks(ranks)} {agree(ranks, 'was', 'were')} done with it{at_place(first.at[-1])}",
        "Remove it only once every rank is done with it: dist.barrier() on all ranks, before.",
    )


def _made_later(context: Context, missing: Mapping[int, RankReport]) -> Finding | None:
    first, ranks = next(iter(missing.values())).error, tuple(missing)
    if not all(e.error.path_exists for e in missing.values()):
        return None
    made = (*_who(context, "written", first.path), *_who(context, "made", first.path))
    makers = tuple(sorted({rank for rank in made if rank not in missing}))
    who = name_ranks(makers) if makers else "another process"
    return _missed(
        context,
        missing,
        Category.FILESYSTEM,
        ranks,
        f"{verb(ranks, 'needs', 'need')} {first.path}{at_place(first.at[-1])} before {who} had "
        "made it: it is there by now",
        "Have all ranks wait for it: dist.barrier() on every rank, behind the line that makes it.",
    )


def _made_elsewhere(context: Context, missing: Mapping[int, RankReport]) -> Finding | None:
    """Only of a name that was written, or made, under one path alone: else each rank has its own.

    No rule asks how the path came to be: a clock, a temporary folder, a host's name.
    """
    first, ranks = next(iter(missing.values())).error, tuple(missing)
    name = PurePath(first.path).name
    others: dict[str, list[int]] = {}
    for e in context.case.ranks:
        for change in e.process.changed:
            if change.what != "removed" and PurePath(change.path).name == name:
                others.setdefault(change.path, []).append(e.rank)
    if len(others) != 1 or any(e.error.path in others for e in missing.values()):
        return None
    ((path, makers),) = others.items()
    return _missed(
        context,
        missing,
        Category.WRONG_PATH_ON_RANK,
        ranks,
        f"{verb(ranks, 'looks', 'look')} for {name} in {PurePath(first.path).parent}"
        f"{at_place(first.at[-1])}, and {name_ranks(tuple(dict.fromkeys(makers)))} made it in "
        f"{PurePath(path).parent}",
        "Make the path on one rank and give it to the others (dist.broadcast_object_list): a "
        "clock, a temporary folder or a host's name is another on each rank.",
    )


def lost_store_file(context: Context) -> Iterator[Finding]:
    """The file of a ``file://`` store that was deleted while the groups still need it."""
    waiting = [
        e
        for e in context.case.ranks
        if e.file.lost
        and e.activity in (Activity.WAITING, Activity.FAILED)
        and (e.initialized or in_setup(e))
    ]
    if not waiting:
        return
    path = waiting[0].file.path
    files = {place.file for e in waiting for place in e.path}
    culprits, place = context.sources.who_calls(_DELETES, sorted(files), tuple(context.reports))
    ranks: Ranks = tuple(e.rank for e in waiting)
    need = f"while {name_ranks(ranks)} still {agree(ranks, 'needs', 'need')} it as a store"
    cause = f"the file of the rendezvous, {path}, was deleted {need}"
    if culprits:
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
