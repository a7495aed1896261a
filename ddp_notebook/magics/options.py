"""Options that several verbs have."""

from __future__ import annotations

from ddp_notebook.magics.completers import rank_sets
from ddp_notebook.magics.parser import Option

JSON = Option("--json", action="store_true", help="print it as JSON, to keep or to send")


def ranks(purpose: str, default: str = "all") -> Option:
    """The option that names a rank set."""
    help = f"{purpose}, such as 0,2-3 (default: {default})"
    return Option("--ranks", default=None, help=help, completer=rank_sets)


RUN_OPTIONS = (
    Option(
        "--step",
        choices=("collective",),
        default=None,
        help="pause before each collective; %ddp_step continues",
    ),
    Option(
        "--wait",
        choices=("progress", "forever"),
        default="progress",
        help="progress: until every rank has finished or none can make progress; forever: until "
        "every rank has finished",
    ),
    Option(
        "--detach",
        action="store_true",
        help="return at once and leave the notebook free; %ddp_wait waits for the end",
    ),
)
"""Of whatever runs on the ranks: how it is stepped through and waited for."""
