"""`%ddp_fault`: the lab of what goes wrong in set-up.

`DDPMagics` inherits the verb.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Board, Diagnosis

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session


def fault_parser() -> Parser:
    """The parser of `%ddp_fault`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    parser = Parser(
        "%ddp_fault",
        "%ddp_fault duplicate-rank",
        "Inject a fault into set-up and see what is found; without a name, the list.",
    )
    add = parser.add_argument
    add("name", nargs="?", default="", help="the fault")
    add("--repair", action="store_true", help="apply the remedy of the last one")
    add("--show", action="store_true", help="show what it changes, and do nothing")
    return parser


class FaultVerb:
    """The verb, for the class of all verbs to inherit."""

    session: Session

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

        def _say(self, text: str) -> None: ...

    @line_magic
    def ddp_fault(self, line: str) -> Diagnosis | Board | None:
        """The fault lab: %ddp_fault, %ddp_fault duplicate-rank, %ddp_fault --repair"""
        return self._verb("ddp_fault", line, self._fault)

    def _fault(self, args: argparse.Namespace) -> Diagnosis | Board | None:
        from ddp_notebook.session.tools import fault_lab

        if args.repair:
            return self._repair(args)
        if not args.name:
            self._say(fault_lab.listing())
            return None
        fault = fault_lab.find(args.name)
        if args.show:
            self._say(fault_lab.story(fault, whole=True))
            return None
        self.session.require("%ddp_fault")
        self._say(fault_lab.story(fault))
        result = self.session.fault(fault.name)
        if result.diagnosis is None:
            self._say("Set-up came to its end all the same: nothing was found.")
        elif fault.passes:
            self._say("Set-up came to its end. This was seen while the others waited:")
        else:
            self._say("This is what is found. To apply the remedy: %ddp_fault --repair")
        return result.diagnosis

    def _repair(self, args: argparse.Namespace) -> Board:
        if args.name:
            raise UsageMistake("--repair is about the last fault: %ddp_fault --repair")
        result = self.session.repair()
        if result.error:
            raise UsageMistake(f"The repair did not work: {result.error}")
        self._say(f"Repaired: {result.fault.title}. Set-up came to its end.")
        return self.session.status()
