"""The lines of the user's code in which ranks are, each with the code around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_notebook.model import Place, Ranks, StackLocation, by_value
from ddp_notebook.state.board_rows import BoardFacts

_AROUND = 2
"""Lines of code shown before and after each."""
_MOST_LOCATIONS = 12
"""Locations with the most ranks come first."""
_MOST_CALLERS = 4


def pending_locations(facts: BoardFacts) -> tuple[StackLocation, ...]:
    """Where culprits raised; if none did, where ranks are in an unfinished collective."""
    findings = facts.diagnosis.findings if facts.diagnosis is not None else ()
    culprits = {rank for finding in findings for rank in finding.ranks}
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
    made = [_location(ranks, path, sources) for ranks, path in by_value(calls)]
    return tuple(sorted(made, key=lambda location: -len(location.ranks))[:_MOST_LOCATIONS])


def _location(ranks: Ranks, path: Sequence[Place], sources: Mapping[str, str]) -> StackLocation:
    site = path[-1]
    callers = tuple(map(str, path[:-1][-_MOST_CALLERS:]))
    return StackLocation(ranks, str(site), callers, code_around(site, sources), site.line)


def code_around(place: Place, sources: Mapping[str, str]) -> tuple[tuple[int, str], ...]:
    """The line and those around it, numbered, if known."""
    source = sources.get(place.file, "").splitlines()
    if 0 < place.line <= len(source):
        first, last = max(1, place.line - _AROUND), min(len(source), place.line + _AROUND)
        return tuple((number, source[number - 1]) for number in range(first, last + 1))
    return ((place.line, place.text),) if place.text else ()
