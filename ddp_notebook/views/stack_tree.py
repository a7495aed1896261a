"""The stacks of all ranks as one tree, which branches where they differ; the code around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ddp_notebook.model import (
    Activity,
    Branch,
    Frame,
    Local,
    Place,
    RankStack,
    StackLocation,
    StackTree,
    by_value,
)
from ddp_notebook.views.board_rows import BoardFacts


def merge(stacks: Iterable[RankStack], world_size: int) -> StackTree:
    """Return one tree of `stacks`, at most one for each rank.

    Ranks at the same line of the same call share a branch; consecutive frames of the same ranks are
    one branch; where ranks diverge, the branch with the lowest rank comes first. Ranks whose code
    raised come before all others, with the lines of their traceback: they share no branch.
    """
    in_order = sorted(stacks, key=lambda stack: (not _raised(stack), stack.rank))
    return StackTree(_branches(in_order, 0), world_size)


def _branches(stacks: Sequence[RankStack], depth: int) -> tuple[Branch, ...]:
    """The branches of ranks that share `depth` frames."""
    groups: dict[object, list[RankStack]] = {}
    for stack in stacks:
        groups.setdefault(_next(stack, depth), []).append(stack)
    branches = []
    for group in groups.values():
        first, end = group[0], depth
        while end < len(first.frames) and len({_next(stack, end) for stack in group}) == 1:
            end += 1
        frames = tuple(_frame(group, level) for level in range(depth, end))
        ranks = tuple(stack.rank for stack in group)
        if len({_next(stack, end) for stack in group}) == 1:
            branches.append(Branch(ranks, frames, first.doing))
        else:
            branches.append(Branch(ranks, frames, children=_branches(group, end)))
    return tuple(branches)


def _raised(stack: RankStack) -> bool:
    return stack.doing.activity is Activity.FAILED


def _next(stack: RankStack, depth: int) -> object:
    """Return the key of a rank's branch: its frame at `depth`; beyond the last one, its state."""
    if depth < len(stack.frames):
        return _raised(stack), replace(stack.frames[depth], locals=())
    return stack.doing


def _frame(stacks: Sequence[RankStack], depth: int) -> Frame:
    """The frame that these ranks share, with the local variables of each."""
    shared = stacks[0].frames[depth]
    values: dict[str, dict[str, list[int]]] = {}
    for stack in stacks:
        for local in stack.frames[depth].locals:
            values.setdefault(local.name, {}).setdefault(local.text, []).append(stack.rank)
    merged = (
        Local(name, text, tuple(dict.fromkeys(ranks)))
        for name, texts in values.items()
        for text, ranks in texts.items()
    )
    return replace(shared, locals=tuple(merged))


def pending_locations(facts: BoardFacts) -> tuple[StackLocation, ...]:
    """Where culprits raised; if none did, where ranks are in an unfinished collective."""
    culprits = {rank for finding in facts.findings for rank in finding.ranks}
    if raised := {rank: path for rank, path in facts.raised.items() if path and rank in culprits}:
        return locations(raised, facts.sources)
    paths: dict[int, Sequence[Place]] = {}
    for rank in facts.pending:
        issued = facts.collectives.of.get(rank)
        if issued and issued[-1].path and not issued[-1].over:
            paths[rank] = issued[-1].path
    return locations(paths, facts.sources)


def locations(
    paths: Mapping[int, Sequence[Place]], sources: Mapping[str, str]
) -> tuple[StackLocation, ...]:
    """Where ranks with known calls are, the innermost last; locations with the most ranks first."""
    calls = {rank: tuple(path) for rank, path in paths.items()}
    made = [
        StackLocation(
            ranks,
            str(path[-1]),
            tuple(map(str, path[:-1][-4:])),
            code_around(path[-1], sources),
            path[-1].line,
        )
        for ranks, path in by_value(calls)
    ]
    # Locations with the most ranks come first.
    return tuple(sorted(made, key=lambda location: -len(location.ranks))[:12])


def lines_around(source: str, line: int, near: int) -> tuple[tuple[int, str], ...]:
    """The line and `near` before and after it, numbered; none where there is no such line."""
    lines = source.splitlines()
    if not 0 < line <= len(lines):
        return ()
    first, last = max(1, line - near), min(len(lines), line + near)
    return tuple((number, lines[number - 1]) for number in range(first, last + 1))


def code_around(place: Place, sources: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    """The line and those around it, numbered, if known."""
    own = ((place.line, place.text),) if place.text else ()
    return lines_around(sources.get(place.file, ""), place.line, 2) or own
