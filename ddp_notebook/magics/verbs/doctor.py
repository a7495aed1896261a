"""`%ddp_doctor`: can DDP work here?

`DDPMagics` inherits the verb. What the checks need is imported when the verb is used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.errors import DDPError
from ddp_notebook.model.doctor import DoctorReport
from ddp_notebook.session.options import BACKENDS

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session

_WORLD_SIZE = 4
"""As of %ddp_init."""


def doctor_parser() -> Parser:
    """The parser of `%ddp_doctor`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    parser = Parser(
        "%ddp_doctor",
        "%ddp_doctor --world-size 4",
        "Look whether DDP can work here, before anything starts, and say what to do if not.",
    )
    add = parser.add_argument
    add("-n", "--world-size", type=int, help="number of ranks (default 4, or those that run)")
    add("--backend", choices=BACKENDS, default="auto", help="the one you mean to use (auto)")
    add("--master-port", type=int, default=0, help="a port to look at (default: MASTER_PORT)")
    add("--json", action="store_true", help="print it as JSON, to keep or to send")
    return parser


class DoctorVerb:
    """The verb, for the class of all verbs to inherit."""

    session: Session

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...
        def _say(self, text: str) -> None: ...

    @line_magic
    def ddp_doctor(self, line: str) -> DoctorReport | None:
        """Look whether DDP can work here: %ddp_doctor [-n 4] [--master-port 29500]"""
        return self._verb("ddp_doctor", line, self._doctor)

    def _doctor(self, args: argparse.Namespace) -> DoctorReport | None:
        from ddp_notebook.doctor import examine

        running = self.session.running
        ranks_now = self.session.record.snapshot.world_size if running else _WORLD_SIZE
        report = examine(
            ranks_now if args.world_size is None else args.world_size,
            backend=args.backend,
            master_port=args.master_port,
            rank_facts=self._rank_facts() if running else None,
        )
        if args.json:
            self._say(json.dumps(report.to_json(), indent=2))
            return None
        return report

    def _rank_facts(self) -> Mapping[int, Mapping[str, Any]] | None:
        """What the ranks say of themselves; None when they cannot be asked now."""
        ask = getattr(self.session, "rank_facts", None)
        try:
            return ask() if ask is not None else None
        except DDPError:  # a fresh Python is asked instead
            return None
