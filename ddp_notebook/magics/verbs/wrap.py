"""`%ddp_wrap`: a model becomes a DistributedDataParallel, one visible stage at a time.

`DDPMagics` inherits the verb.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.model import StepTable
from ddp_notebook.session.tools.ddp_construction import WrapOptions

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session


def wrap_parser() -> Parser:
    """The parser of `%ddp_wrap`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    parser = Parser(
        "%ddp_wrap",
        "%ddp_wrap model",
        "Take a model on the ranks through DDP's construction, stage by stage; of one that is "
        "wrapped, show the buckets.",
    )
    add = parser.add_argument
    add("name", nargs="?", default="", help="the variable of the ranks that holds the model")
    add("--step", action="store_true", help="stop before each stage; %%ddp_step goes on")
    add("--buckets", action="store_true", help="the buckets after a step, and why these")
    add("--bucket-cap-mb", type=float, default=None, help="MiB (default 25, the first 1)")
    add(
        "--find-unused-parameters",
        action="store_true",
        help="for models of which a step does not use every parameter",
    )
    add("--as", dest="target", default="", help="the variable for the result (default: the same)")
    return parser


class WrapVerb:
    """The verb, for the class of all verbs to inherit."""

    session: Session

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

    @line_magic
    def ddp_wrap(self, line: str) -> StepTable | None:
        """Wrap a model of the ranks with DDP, stage by stage: %ddp_wrap model [--step]"""
        return self._verb("ddp_wrap", line, self._wrap)

    def _wrap(self, args: argparse.Namespace) -> StepTable:
        options = WrapOptions(
            step=args.step,
            buckets=args.buckets,
            bucket_cap_mb=args.bucket_cap_mb,
            find_unused_parameters=args.find_unused_parameters,
            target=args.target,
        )
        return self.session.wrap(args.name, options).table
