"""Ranks at different lines of one function: the test in the code that parted them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ddp_notebook.diagnosis.source_code.conditions import Test, tests_around
from ddp_notebook.model import LineStopped, Ranks
from ddp_notebook.state.line_table import places_of

Place = tuple[str, int]
"""A file, and a line of it."""


class Passed:
    """The lines at which ranks were paused since all were at one.

    Who has been where most ranks are now is no more than ahead: no test parted it from them.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, set[Place]] = {}

    def add(self, stops: Mapping[int, LineStopped]) -> None:
        """Ranks are paused there now."""
        if len(places_of(stops)) == 1:
            self._by_rank.clear()
        for rank, stop in stops.items():
            self._by_rank.setdefault(rank, set()).add((stop.file, stop.line))

    def by(self, ranks: Ranks, place: Place) -> bool:
        """True if all of `ranks` have been at `place`."""
        return all(place in self._by_rank.get(rank, ()) for rank in ranks)


def partings(
    stops: Mapping[int, LineStopped], passed: Passed, source_of: Callable[[str], str]
) -> dict[Place, str]:
    """Why some ranks are not where most ranks are, by their line. `source_of` reads a file."""
    (most, ranks), *others = places_of(stops).items()
    function = stops[ranks[0]].function
    found = {}
    for place, of in others:
        if passed.by(of, most):
            found[place] = "ahead"
        elif passed.by(ranks, place):
            found[place] = "behind"
        elif place[0] == most[0] and stops[of[0]].function == function:
            found[place] = parting(source_of(place[0]), most[1], place[1])
    return found


def parting(source: str, most: int, other: int) -> str:
    """Why ranks at line `other` are not at line `most`, in words; empty when nothing tells.

    ``other branch: `if rank == 1` ``. It is said from the lines alone.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    lines = source.splitlines()
    theirs, own = (list(tests_around(tree, line, "")) for line in (most, other))
    for test in own:
        if not _is_in(test, theirs):
            inside = "inside" if most <= test.line else "other branch:"
            return f"{inside} `{_shown(test, lines)}`"
    for test in theirs:
        if not _is_in(test, own) and other > test.line:
            return f"outside `{_shown(test, lines)}`"
    return ""


def _is_in(test: Test, tests: list[Test]) -> bool:
    return any(
        (condition.line, condition.wanted) == (test.line, test.wanted) for condition in tests
    )


def _shown(test: Test, lines: list[str]) -> str:
    if test.shown:
        return test.shown
    text = lines[test.line - 1].strip() if 0 < test.line <= len(lines) else ""
    return text.removesuffix(":") or f"line {test.line}"
