"""Options that several verbs have, and the completions of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_notebook.magics.parser import Completer, Option, Surroundings
from ddp_notebook.model import by_value, format_ranks

JSON = Option("--json", "print it as JSON, to keep or to send")


def ranks(purpose: str, default: str = "all") -> Option:
    """The option that names a rank set."""
    help = f"{purpose}, such as 0,2-3 (default: {default})"
    return Option("--ranks RANKS", help, default=None, completer=rank_sets)


def settings(example: str) -> Option:
    """The option that changes environment variables of some ranks."""
    help = (
        f"change an environment variable on some ranks, such as {example}; without a value it is "
        "unset; may be repeated"
    )
    return Option("--set RANKS:NAME=VALUE", help, default=[], action="append")


RUN_OPTIONS = (
    Option(
        "--step WHAT",
        "collective: pause before each collective; %ddp_step continues. A number, with --ledger: "
        "the training step to show, counted from 1 by each optimizer (default: the last)",
        default=None,
        completer=lambda word, _: starting_with(word, ("collective",)),
    ),
    Option(
        "--ledger",
        "show one training step, parameter by parameter: each rank's own gradient, the one its "
        "optimizer used and where that comes from, and what the step changed; steps get slower",
    ),
    Option("--json", "with --ledger: print that as JSON, to keep or to send"),
    Option(
        "--wait",
        "progress: until every rank has finished or none can make progress; forever: until every "
        "rank has finished",
        choices=("progress", "forever"),
    ),
    Option(
        "--cpu",
        "what asks for CUDA gets the CPU: cuda devices, nccl (gloo), counts of GPUs; streams exist "
        "in name only and nothing is compiled",
    ),
    Option("--detach", "return at once, with the notebook free; %ddp_wait waits for the end"),
)
"""Of whatever runs on the ranks: how it is stepped through and waited for."""


# -- what Tab offers for their values ----------------------------------------------------


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
