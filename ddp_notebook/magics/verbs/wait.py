"""`%ddp_wait`, and what the notebook shows of a run that nobody waits for.

`DDPMagics` inherits the verb.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.run_display import Begin, is_news
from ddp_notebook.model import Event, name_ranks
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.views import findings
from ddp_notebook.views.notebook import Displays, live_bundle

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session
    from ddp_notebook.session.runs.detached import Detached
    from ddp_notebook.views.live_region import LiveRegion


def wait_parser() -> Parser:
    """The parser of `%ddp_wait`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    description = (
        "Wait for the cell or the script that was detached, or that ranks are still in, and show "
        "it. An interrupt stops the ranks, as it does with a cell. Now and then only a look: "
        "%ddp_wait --timeout 0"
    )
    parser = Parser("%ddp_wait", "%ddp_wait --timeout 60", description)
    help_ = "give control back after so many seconds; the ranks go on (default: at the end)"
    parser.add_argument("--timeout", type=float, default=None, metavar="S", help=help_)
    return parser


class DetachedVerb:
    """The verb, for the class of all verbs to inherit."""

    shell: Any
    session: Session
    displays: Displays
    _announced: Detached | None = None
    """The detached run whose end was told last."""

    if TYPE_CHECKING:
        _has_front_end: bool

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

        def _say(self, text: str) -> None: ...

        def _show_run(self, begin: Begin) -> CellResult: ...

        def _region(self, run: CellRun) -> LiveRegion: ...

        def _first(self, result: CellResult) -> dict[str, str] | None: ...

        def _publish(self, result: CellResult, first: dict[str, str] | None) -> None: ...

    @line_magic
    def ddp_wait(self, line: str) -> CellResult | None:
        """Wait for what was detached: %ddp_wait [--timeout 60]"""
        return self._verb("ddp_wait", line, self._wait)

    def _wait(self, args: argparse.Namespace) -> CellResult:
        if args.timeout is not None and not args.timeout >= 0:
            raise UsageMistake("--timeout is in seconds, 0 or more: %ddp_wait --timeout 60")
        runs: list[CellRun] = []

        def wait(begun: Callable[[CellRun], None]) -> CellResult:
            def started(run: CellRun) -> None:
                runs.append(run)
                begun(run)

            return self.session.wait(args.timeout, started)

        result = self._show_run(wait)
        if result.pending and result.steps is None:
            self._say(
                f"{runs[0].heading} still runs on {name_ranks(result.pending)}. "
                "Wait on: %ddp_wait. Where it is: %ddp_where. End it: %ddp_abort"
            )
        self.displays.shown_already()
        return result

    # -- what is shown -----------------------------------------------------------------

    def _show(self, args: argparse.Namespace) -> Callable[[Begin], object]:
        """What shows a run with these options."""
        return self._show_detached if args.detach else self._show_run

    def _show_detached(self, begin: Begin) -> None:
        """Start something and go on; what becomes of it is shown here, also later."""
        runs: list[CellRun] = []
        begin(runs.append)
        run, detached = runs[0], self.session.detached
        assert detached is not None
        self._say(
            f"{run.heading} runs on {name_ranks(run.ranks)}, and the notebook is free. "
            "Wait for it: %ddp_wait\n"
            "Look at it: %ddp_where, %ddp_why, %ddp_output. End it: %ddp_abort"
        )
        if not self._has_front_end:
            return
        region = self._region(run)
        region.paint()  # here and now, so that it belongs to this cell; later it is updated

        def nudge(events: Sequence[Event]) -> None:
            if is_news(events):
                region.nudge()

        unsubscribe = self.session.record.subscribe(nudge)
        region.open()

        def ended(how: Future[CellResult]) -> None:
            unsubscribe()
            region.close(_ending(run, how))

        detached.ended.add_done_callback(ended)

    def _tell_of_detached(self, verb: str) -> None:
        """Where no region of the cell that started it could say so: how a detached run ended."""
        detached = self.session.detached
        if self._has_front_end or detached is None or detached.told or verb == "ddp_wait":
            return
        if detached.ended.done() and detached is not self._announced and not detached.run.held:
            self._announced = detached
            self._say(f"{_in_short(detached.run, detached.ended)} All of it: %ddp_wait")

    def _show_cell_results(self) -> None:
        """Tell IPython how to show what `%ddp_wait` gives."""

        def show(result: CellResult) -> None:
            if self.displays.are_needed:
                self._publish(result, self._first(result))
                if result.error is not None:
                    self._say(f"{type(result.error).__name__}: {result.error}")

        self.shell.display_formatter.ipython_display_formatter.for_type(CellResult, show)


def _ending(run: CellRun, how: Future[CellResult]) -> dict[str, str]:
    """How a detached run ended, in the place where it was shown while it ran."""
    bundle = live_bundle(run.live_groups(), None, f"{_in_short(run, how)} All of it: %ddp_wait")
    diagnosis = how.result().diagnosis if how.exception() is None else None
    if diagnosis is None or not diagnosis.findings:
        return bundle
    found = findings.bundle(diagnosis)
    return {
        "text/plain": f"{found['text/plain']}\n\n{bundle['text/plain']}",
        "text/html": f"{found['text/html']}{bundle['text/html']}",
    }


def _in_short(run: CellRun, how: Future[CellResult]) -> str:
    """How a detached run ended, in a line."""
    error = how.exception() or how.result().error
    if error is None:
        return f"{run.heading}, which was detached, has finished."
    return f"{run.heading}, which was detached, did not finish. {str(error).splitlines()[0]}"
