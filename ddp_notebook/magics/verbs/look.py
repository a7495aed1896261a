"""`%ddp_where`: which line each rank is at.

`DDPMagics` inherits the verb.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.model import Ranks, StackTree

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session


def where_parser() -> Parser:
    """The parser of `%ddp_where`."""
    from ddp_notebook.magics.parsing import Parser, with_ranks

    parser = Parser(
        "%ddp_where",
        "%ddp_where --locals",
        "Show which line each rank is at: the Python stacks of all ranks as one tree, at any "
        "time. Such as: %ddp_where, or %ddp_where --ranks 0,2 --locals",
    )
    add = with_ranks(parser).add_argument
    add("--locals", action="store_true", help="with the variables, as short texts")
    add("--json", action="store_true", help="print it as JSON, to keep or to send")
    return parser


class WhereVerb:
    """The verb, for the class of all verbs to inherit."""

    session: Session

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...
        def _say(self, text: str) -> None: ...
        def _ranks(self, args: argparse.Namespace) -> Ranks | None: ...

    @line_magic
    def ddp_where(self, line: str) -> StackTree | None:
        """Which line each rank is at: %ddp_where [--ranks 0,2] [--locals] [--json]"""
        return self._verb("ddp_where", line, self._where)

    def _where(self, args: argparse.Namespace) -> StackTree | None:
        self.session.require("%ddp_where")
        tree = self.session.where(self._ranks(args), args.locals)
        if args.json:
            self._say(json.dumps(tree.to_json(), indent=2))
            return None
        return tree
