"""Rules about files: paths that ranks make, delete or miss under each other, a store's file."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import in_setup, raised_words, way_to_error
from ddp_notebook.model import (
    Activity,
    Finding,
    RankReport,
    Ranks,
    by_value,
    name_ranks,
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
    raced: dict[int, str] = {}
    for rank, e in reports.items():
        if e.activity is not Activity.FAILED or e.error.type not in _RACED or not e.error.at:
            continue
        # Why the line is read, though each report has what the rank changed: that is the last of
        # it, and the rank that came first has often written much since; it has no path of a
        # FileExistsError; and a job's logs have errors and lines alone. What every rank does is
        # asked of the code, then.
        changes = _CHANGES.search(e.error.at[-1].text)
        if changes is not None and not context.sources.is_for_some(e.error.at, changes[1]):
            raced[rank] = str(e.error.at[-1])
    for ranks, _ in by_value(raced):
        if len(ranks) == len(reports):
            continue  # none was first
        first = reports[ranks[0]].error
        yield catalogue.finding(
            "filesystem.raced",
            tuple(reports),
            waiting=context.victims,
            evidence=(
                *(f"rank {rank}: {way_to_error(reports[rank].error.at)}" for rank in ranks),
                f"{name_ranks(ranks)}: {raised_words(first.type, first.text, (), 300)}",
            ),
            late=ranks,
            error=first.type,
        )


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
        finding = _why_missing(context, {rank: context.reports[rank] for rank in ranks})
        if finding is not None:
            yield finding


def _why_missing(context: Context, missing: Mapping[int, RankReport]) -> Finding | None:
    ranks, first = tuple(missing), next(iter(missing.values())).error
    # Each rank may miss a file of its own: of several nothing is said that holds for one.
    one_path = len({e.error.path for e in missing.values()}) == 1
    culprits, makers = ranks, _changed_by_others(context, missing, ("written", "made"))
    removers = _changed_by_others(context, missing, ("removed",))
    elsewhere, made_in, wanted = _made_elsewhere(context, missing), "", PurePath(first.path)
    if one_path and removers and not first.path_exists:
        kind, culprits = "filesystem.removed-early", removers
    elif one_path and all(e.error.path_exists for e in missing.values()):
        kind = "filesystem.needed-early"
    elif elsewhere is not None:
        kind, (path, makers) = "wrong-path-on-rank.elsewhere", elsewhere
        made_in = str(path.parent)
    else:
        return None
    return catalogue.finding(
        kind,
        culprits,
        # That ranks failed for want of the path is no mistake of theirs besides.
        waiting=tuple(sorted({*context.victims, *missing})),
        evidence=tuple(
            f"rank {rank}: {way_to_error(e.error.at)}: {e.error.path}"
            for rank, e in missing.items()
        ),
        missing=ranks,
        name=wanted.name,
        folder=wanted.parent,
        makers=makers or ("another process",),
        made_in=made_in,
    )


def _changed_by_others(
    context: Context, missing: Mapping[int, RankReport], what: Collection[str]
) -> Ranks:
    """The other ranks that changed the path that is missing, or a folder that it is in."""
    path = f"{next(iter(missing.values())).error.path}{os.sep}"
    return tuple(
        e.rank
        for e in context.case.ranks
        if e.rank not in missing
        and any(c.what in what and path.startswith(f"{c.path}{os.sep}") for c in e.process.changed)
    )


def _made_elsewhere(
    context: Context, missing: Mapping[int, RankReport]
) -> tuple[PurePath, Ranks] | None:
    """The other path under which a file of that name was made, and by which ranks.

    Only of a name that was written, or made, under one path alone: else each rank has its own. No
    rule asks how the path came to be: a clock, a temporary folder, a host's name.
    """
    name = PurePath(next(iter(missing.values())).error.path).name
    makers: dict[str, list[int]] = {}
    for e in context.case.ranks:
        for change in e.process.changed:
            if change.what != "removed" and PurePath(change.path).name == name:
                makers.setdefault(change.path, []).append(e.rank)
    if len(makers) != 1 or any(e.error.path in makers for e in missing.values()):
        return None
    ((path, ranks),) = makers.items()
    return PurePath(path), tuple(dict.fromkeys(ranks))


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
    ranks = tuple(e.rank for e in waiting)
    lost = catalogue.words("store-gone.file-deleted.lost", ranks=ranks, path=path)
    yield catalogue.finding(
        "store-gone.file-deleted-by" if culprits else "store-gone.file-deleted",
        culprits,
        waiting=context.victims,
        evidence=(lost,),
        name=PurePath(path).name,
        site=place,
        needed_by=ranks,
    )
