"""Completions of the values of options: rank sets, lists, files, variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_notebook.magics.parser import Completer, Surroundings
from ddp_notebook.model import by_value, format_ranks


def starting_with(word: str, candidates: Iterable[str]) -> list[str]:
    """Return the `candidates` that begin with `word`."""
    return [candidate for candidate in candidates if candidate.startswith(word)]


def one_of(candidates: Iterable[str]) -> Completer:
    """One of a few names."""
    return lambda word, _: starting_with(word, candidates)


def list_of(candidates: Iterable[str]) -> Completer:
    """Several of a few names, separated by commas."""

    def complete(word: str, _: Surroundings) -> Sequence[str]:
        before, comma, last = word.rpartition(",")
        return [f"{before}{comma}{name}" for name in starting_with(last, candidates)]

    return complete


def files(_word: str, _around: Surroundings) -> None:
    """A file, which IPython completes."""


def variables(word: str, around: Surroundings) -> Sequence[str]:
    """A variable of the notebook."""
    return starting_with(word, around.variables)


def rank_sets(word: str, around: Surroundings) -> Sequence[str]:
    """The likely rank sets: all ranks, those in the same state, each rank alone."""
    by_status = by_value({state.rank: state.status for state in around.ranks})
    together = [format_ranks(ranks) for ranks, _ in by_status if len(ranks) > 1]
    alone = [str(state.rank) for state in around.ranks[:16]]
    return starting_with(word, dict.fromkeys(["all", *together, *alone]))
