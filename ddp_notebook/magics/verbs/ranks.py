"""The magics of set-up: step through it, ask why, give it up, run a script."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Board, Diagnosis, Ranks, Stage, StepTable
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.session import Session
from ddp_notebook.session.options import STORES, parse_settings
from ddp_notebook.session.runs.collective_steps import END
from ddp_notebook.state.collective_table import OPERATIONS
from ddp_notebook.views.notebook import mime_bundle

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.magics.run_display import Begin
    from ddp_notebook.session.runs.run import CellRun


def step_parser() -> Parser:
    """The parser of `%ddp_step`."""
    from ddp_notebook.magics.parsing import Parser, with_ranks

    description = (
        "Move paused ranks through the next stage of set-up or of a wrap, or the next collective."
    )
    parser = with_ranks(Parser("%ddp_step", "%ddp_step --ranks 1", description))
    stages = [stage.value for stage in Stage][1:]
    goals = list(dict.fromkeys([*stages, *WrapStage, *OPERATIONS, END]))
    help_ = "go on through this stage, or to this collective, or to the end"
    parser.add_argument("--to", choices=goals, default=None, metavar="NAME", help=help_)
    return parser


def why_parser() -> Parser:
    """The parser of `%ddp_why`."""
    from ddp_notebook.magics.parsing import Parser

    parser = Parser("%ddp_why", "%ddp_why", "Say what is wrong, whose doing it is, what to do.")
    parser.add_argument("--json", action="store_true", help="print it as JSON, to keep or to send")
    return parser


def abort_parser() -> Parser:
    """The parser of `%ddp_abort`."""
    from ddp_notebook.magics.parsing import Parser, with_ranks

    description = "Free ranks that are blocked in set-up, a cell or a script (all by default)."
    return with_ranks(Parser("%ddp_abort", "%ddp_abort", description))


def run_parser() -> Parser:
    """The parser of `%ddp_run`: options come before the script, its arguments after it."""
    from ddp_notebook.magics.parsing import Parser, add_run_options, with_ranks

    description = (
        "Run a torchrun-style script on the ranks, unchanged. Options come before the script, its "
        "own arguments after it: %ddp_run --detach train.py --epochs 2, and later %ddp_wait. "
        "Collective by collective: %ddp_run --step collective train.py, then %ddp_step"
    )
    parser = with_ranks(Parser("%ddp_run", "%ddp_run train.py --epochs 2", description))
    add = parser.add_argument
    add("--store", choices=STORES, default="session", help="who hosts the store (session)")
    add("--set", action="append", default=[], help="RANKS:NAME=value, for single ranks")
    help_ = "start so many ranks first, if there are none"
    add("-n", "--world-size", type=int, default=None, metavar="N", help=help_)
    add_run_options(parser)
    add("script", help="the script")
    # argparse asks for what may be empty, and would say so when the script is missing.
    add("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


class SetupVerbMagics:
    """Mixed into the magics."""

    shell: Any
    session: Session
    _verb: Callable[..., Any]
    _ranks: Callable[[argparse.Namespace], Ranks | None]
    _say: Callable[[str], None]
    _require_ranks: Callable[[str], None]
    _prompt_number: Callable[[], int]
    _show: Callable[[argparse.Namespace], Callable[[Begin], Any]]
    _show_news: Callable[[CellRun], None]
    _init: Callable[[argparse.Namespace], Any]

    @line_magic
    def ddp_step(self, line: str) -> StepTable | None:
        """Move ranks on: %ddp_step [--ranks 1] [--to process-group, all_reduce or end]"""
        return self._verb("ddp_step", line, self._step)

    def _step(self, args: argparse.Namespace) -> StepTable:
        self._require_ranks("%ddp_step")
        run = self.session.current
        table = self.session.step(self._ranks(args), args.to)
        if run is not None and run.held:
            self._show_news(run)
        return table

    @line_magic
    def ddp_why(self, line: str) -> Diagnosis | None:
        """What is wrong, whose doing it is, what to do: %ddp_why [--json]"""
        return self._verb("ddp_why", line, self._why)

    def _why(self, args: argparse.Namespace) -> Diagnosis | None:
        diagnosis = self.session.why()
        if args.json:
            self._say(json.dumps(diagnosis.to_json(), indent=2))
            return None
        return diagnosis

    @line_magic
    def ddp_abort(self, line: str) -> Board | None:
        """Free ranks that are blocked: %ddp_abort [--ranks 1]"""
        return self._verb("ddp_abort", line, self._abort)

    def _abort(self, args: argparse.Namespace) -> Board:
        self._require_ranks("%ddp_abort")
        return self.session.abort(self._ranks(args))

    @line_magic
    def ddp_run(self, line: str) -> None:
        """Run a script on the ranks, as torchrun would: %ddp_run train.py --epochs 2"""
        self._verb("ddp_run", line, self._run_script)

    def _run_script(self, args: argparse.Namespace) -> None:
        if args.world_size is not None:
            self._have_ranks(args.world_size)
        self._require_ranks("%ddp_run")
        ranks = self._ranks(args)
        settings = parse_settings(args.set, self.session.record.snapshot.world_size)
        self._show(args)(
            lambda begun: self.session.run_script(
                args.script,
                args.arguments,
                ranks,
                store=args.store,
                settings=settings,
                wait=args.wait,
                hold=args.step is not None,
                detach=args.detach,
                number=self._prompt_number(),
                started=begun,
            )
        )

    def _have_ranks(self, world_size: int) -> None:
        """Start `world_size` ranks, or see that there are so many. Raises UsageMistake."""
        there = self.session.record.snapshot.world_size
        if not there:
            self._verb("ddp_init", f"--world-size {world_size}", self._init)
        elif there != world_size:
            raise UsageMistake(
                f"{there} ranks are running, not {world_size}. Run it on them (leave --world-size "
                f"out, or say --ranks), or %ddp_shutdown first."
            )

    def _show_diagnosis(self, diagnosis: Diagnosis | None) -> None:
        """What is wrong, above the error that ends the cell."""
        if diagnosis is not None and diagnosis.findings:
            self.shell.display_pub.publish(data=mime_bundle(diagnosis), metadata={})
