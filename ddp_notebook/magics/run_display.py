"""How a notebook shows a cell or script on the ranks: live while it runs, whole when it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ddp_notebook.errors import Stuck
from ddp_notebook.magics.cell_output import NOTHING, Bundle, CellOutput
from ddp_notebook.model import Event, Pulse, Status, name_ranks
from ddp_notebook.session import Session
from ddp_notebook.session.runs.detached import Detached
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.state.board_rows import FOLD_FROM
from ddp_notebook.state.output import split_errors
from ddp_notebook.views.live_region import OUTPUT_INTERVAL_S, OUTPUT_SETTLE_S, LiveRegion
from ddp_notebook.views.notebook import (
    live_bundle,
    mime_bundle,
    show_outputs,
    traceback_bundle,
    withheld_text,
)

_REGION_DELAY_S = 0.06
"""A cell that is over sooner shows its output once, without a live region before it."""
_BOARD_AFTER_S = 3.0
"""A cell that runs for longer shows where its ranks are."""
_MINUTES_FROM_S = 120.0

Begin = Callable[[Callable[[CellRun], None]], CellResult]
"""Starts a run and waits for its end; calls its argument when the run has begun."""


def is_news(events: Sequence[Event]) -> bool:
    """False for signs of life alone: a region is looked at once a second anyway."""
    return not events or any(not isinstance(event, Pulse) for event in events)


class RunDisplay:
    """Shows the runs of one session in one notebook."""

    def __init__(self, session: Session, output: CellOutput) -> None:
        self._session = session
        self._output = output
        self._announced: Detached | None = None
        """The detached run whose end `announce_end` printed last."""

    # -- a run that the cell waits for -------------------------------------------------------

    def show(self, begin: Begin) -> CellResult:
        """Run something and show its output; its result. Raises what went wrong with it."""
        started_s = time.monotonic()
        region: LiveRegion | None = None

        def begun(run: CellRun) -> None:
            nonlocal region, started_s
            started_s = run.began_s
            if self._output.is_live:
                region = self._region(run)

        def nudge(events: Sequence[Event]) -> None:
            if region is None:
                return
            if not region.opened:
                # A short cell is over by then: it has no region, and no thread is started for it.
                if time.monotonic() - started_s > _REGION_DELAY_S:
                    region.open()
            elif is_news(events):
                region.nudge()

        unsubscribe = self._session.record.subscribe(nudge)
        try:
            result = begin(begun)
        finally:
            unsubscribe()
            if region is not None and sys.exc_info()[0] is not None:
                region.close(NOTHING)
        self._show_end(result, region, time.monotonic() - started_s)
        return result

    def _region(self, run: CellRun) -> LiveRegion:
        """Where the cell that runs shows `run` until its end."""
        return LiveRegion(
            self._output.publisher,
            lambda: self._live(run),
            OUTPUT_INTERVAL_S,
            settle_s=OUTPUT_SETTLE_S,
        )

    def _live(self, run: CellRun) -> Bundle:
        board = self._session.status()
        trouble = board.snapshot.with_status(Status.DEAD, Status.FAILED)
        silent = any(row.silent for row in board.rows)
        elapsed_s = time.monotonic() - run.began_s
        long = elapsed_s > _BOARD_AFTER_S and len(board.rows) <= FOLD_FROM
        # Seconds are shown for two minutes: each new text is a message to every open page.
        minutes = elapsed_s >= _MINUTES_FROM_S
        text = f"running {elapsed_s // 60:.0f} min" if minutes else f"running {elapsed_s:.0f} s"
        for word, ranks in run.exits.items() if run.pending else ():
            text += f" · {name_ranks(ranks)} {word}"
        if run.waits_for:
            text += f" · {run.waits_for}"
        return live_bundle(run.live_groups(), board if trouble or silent or long else None, text)

    def _show_end(self, result: CellResult, region: LiveRegion | None, elapsed_s: float) -> None:
        headline = _headline(result)
        if region is not None:
            # The region stands above everything else that this cell shows.
            took = f"finished in {elapsed_s:.1f} s" if elapsed_s >= 1 and not result.pending else ""
            region.close(headline or {"text/plain": took})
        self._publish(result, None if region is not None and region.shown else headline)
        result.raise_for_error()

    def show_result(self, result: CellResult) -> None:
        """Show a run that has ended, its error included."""
        self._publish(result, _headline(result))
        if result.error is not None:
            self._output.say(f"{type(result.error).__name__}: {result.error}")

    def _publish(self, result: CellResult, headline: Bundle | None) -> None:
        if headline is not None:
            self._output.publish(headline)
        show_outputs(self._output.publisher, result.outputs)
        if result.diagnosis is not None and not isinstance(result.error, Stuck):
            self._output.publish(mime_bundle(result.diagnosis))
        if result.steps is not None:
            self._output.publish(mime_bundle(result.steps))
        if result.withheld_bytes:
            self._output.say(withheld_text(result.withheld_bytes))

    def show_news(self, run: CellRun) -> None:
        """Show what the ranks wrote since the notebook showed it last."""
        tracebacks, outputs = split_errors(run.news())
        show_outputs(self._output.publisher, outputs)
        if tracebacks:
            self._output.publish(traceback_bundle(tracebacks))

    # -- a run that is detached --------------------------------------------------------------

    def show_detached(self, begin: Begin) -> None:
        """Start something and return; this cell goes on to show it, and how it ends."""
        runs: list[CellRun] = []
        begin(runs.append)
        run, detached = runs[0], self._session.detached
        assert detached is not None
        self._output.say(
            f"{run.heading} runs on {name_ranks(run.ranks)}, and the notebook is free. "
            "Wait for it: %ddp_wait\n"
            "Look at it: %ddp_where, %ddp_why, %ddp_output. End it: %ddp_abort"
        )
        if not self._output.is_live:
            return
        region = self._region(run)
        region.paint()  # here and now, so that it belongs to this cell; later it is updated

        def nudge(events: Sequence[Event]) -> None:
            if is_news(events):
                region.nudge()

        unsubscribe = self._session.record.subscribe(nudge)
        region.open()

        def ended(result: Future[CellResult]) -> None:
            unsubscribe()
            region.close(_end_bundle(run, result))

        detached.ended.add_done_callback(ended)

    def announce_end(self) -> None:
        """Print once that a detached run has ended, where no region can show it."""
        detached = self._session.detached
        if self._output.is_live or detached is None or detached.reported:
            return
        if detached.ended.done() and detached is not self._announced and not detached.run.pausing:
            self._announced = detached
            self._output.say(f"{_end_sentence(detached.run, detached.ended)} {_SHOW_ALL}")


_SHOW_ALL = "Show all of it: %ddp_wait"


def _headline(result: CellResult) -> Bundle | None:
    """What stands above all else: why the ranks are stuck, or their tracebacks."""
    if isinstance(result.error, Stuck):
        return mime_bundle(result.error.diagnosis)
    return traceback_bundle(result.tracebacks) if result.tracebacks else None


def _end_bundle(run: CellRun, ended: Future[CellResult]) -> Bundle:
    """How a detached run ended, in the place where it was shown while it ran."""
    end = live_bundle(run.live_groups(), None, f"{_end_sentence(run, ended)} {_SHOW_ALL}")
    diagnosis = ended.result().diagnosis if ended.exception() is None else None
    if diagnosis is None or not diagnosis.findings:
        return end
    finding = mime_bundle(diagnosis)
    return {
        "text/plain": f"{finding['text/plain']}\n\n{end['text/plain']}",
        "text/html": f"{finding['text/html']}{end['text/html']}",
    }


def _end_sentence(run: CellRun, ended: Future[CellResult]) -> str:
    error = ended.exception() or ended.result().error
    if error is None:
        return f"{run.heading}, which was detached, has finished."
    return f"{run.heading}, which was detached, did not finish. {str(error).splitlines()[0]}"
