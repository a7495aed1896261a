"""Options that several verbs have."""

from __future__ import annotations

from ddp_notebook.magics.completers import rank_sets
from ddp_notebook.magics.parser import Option

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
        "--step",
        "pause before each collective; %ddp_step continues",
        default=None,
        choices=("collective",),
    ),
    Option(
        "--wait",
        "progress: until every rank has finished or none can make progress; forever: until every "
        "rank has finished",
        choices=("progress", "forever"),
    ),
    Option("--detach", "return at once, with the notebook free; %ddp_wait waits for the end"),
)
"""Of whatever runs on the ranks: how it is stepped through and waited for."""
