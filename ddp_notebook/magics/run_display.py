"""How a notebook shows a cell or script on the ranks: live while it runs, whole when it ended.

While it runs, the output of the ranks stands under its cell, and above it, after a second, a line
on their activity: a widget where the front end can show one, else text.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.board.buttons import Button
from ddp_notebook.board.replay_board import can_show_widgets, widget_classes
from ddp_notebook.errors import CellFailed, DDPError, Stuck
from ddp_notebook.magics.cell_output import NOTHING, Bundle, CellOutput
from ddp_notebook.model import Event, Pulse, StepTable, name_ranks
from ddp_notebook.session import Session
from ddp_notebook.session.runs.endings import CellResult, exits
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.views.findings import divided
from ddp_notebook.views.live_region import (
    BOARD_INTERVAL_S,
    OUTPUT_INTERVAL_S,
    OUTPUT_SETTLE_S,
    LiveRegion,
)
from ddp_notebook.views.notebook import (
    live_bundle,
    mime_bundle,
    show_outputs,
    traceback_bundle,
    victims_bundle,
    withheld_text,
)
from ddp_notebook.views.output import whole
from ddp_notebook.views.output_log import split_errors

if TYPE_CHECKING:
    from ddp_notebook.board.running_line import RunningLine

Begin = Callable[[Callable[[CellRun], None]], CellResult]
"""Starts a run and waits for its end; calls its argument when the run has begun."""


def is_news(events: Sequence[Event]) -> bool:
    """False if all events are signs of life: a region is checked once a second anyway."""
    return not events or any(not isinstance(event, Pulse) for event in events)


class RunDisplay:
    """Shows the runs of one session in one notebook."""

    def __init__(self, session: Session, output: CellOutput, lines: Lines) -> None:
        self._session = session
        self._output = output
        self._lines = lines
        self._opening = threading.Lock()
        self._announced: Future[CellResult] | None = None
        """The end of a detached run that `announce_end` printed last."""

    # -- a run that the cell waits for -------------------------------------------------------

    def show(self, begin: Begin, *, to_the_end: bool = True) -> CellResult:
        """Run something and show its output; returns its result, or raises its error.

        If the run pauses, the cell continues to show where it is and how it ends, unless
        `to_the_end` is false.
        """
        started_s = time.monotonic()
        runs: list[CellRun] = []
        live: LiveRun | None = None
        over = False
        # A short cell has no region; nothing is created for it.
        # The context is the one of this cell. The region may be opened on the thread that receives
        # events, and there ipykernel would not know for which cell it sends.
        publisher, context = self._output.publisher, copy_context()

        def begun(run: CellRun) -> None:
            nonlocal started_s
            started_s = run.began_s
            runs.append(run)

        def nudge(events: Sequence[Event]) -> None:
            nonlocal live
            if live is not None and is_news(events):
                live.region.nudge()
            if live is not None or not runs or not self._output.is_live:
                return
            # A shorter cell shows its output once, without a live region before it.
            if time.monotonic() - started_s > 0.06:
                with self._opening:
                    if live is None and not over:
                        live = LiveRun(publisher, self._lines, runs[0], context=context)
                        live.region.open()

        # The record calls `nudge` on the thread that receives events, so a region may be opened
        # there while this thread ends the run: `_opening` decides who comes first.
        unsubscribe = self._session.record.subscribe(nudge)
        try:
            result = begin(begun)
        finally:
            unsubscribe()
            with self._opening:
                over = True
            if live is not None and sys.exc_info()[0] is not None:
                live.end(None, "")
        # Paused ranks will move when another cell says so, and what they do then belongs to this
        # cell.
        if self._output.is_live and result.steps is not None and to_the_end:
            if live is not None:
                live.end(None, "")
            run, ended = runs[0], runs[0].ended

            def look() -> Bundle:
                if region.closed:
                    return _end_bundle(run, ended)
                return live_bundle(run.events.live_groups(), "", _timeless(run.step_table()))

            region = self._standing(look, ended.done)
            self._follow(region)
            ended.add_done_callback(lambda _: region.nudge())
        else:
            elapsed_s = time.monotonic() - started_s
            headlines, error, how = _headlines(result), result.error, ""
            # Nothing is said of a run that was over at once, or is in progress.
            if elapsed_s >= 1 and (error is not None or not result.pending):
                how = f"finished in {elapsed_s:.1f} s"
                if error is not None:
                    how = f"did not finish; it ran for {elapsed_s:.1f} s"
                if isinstance(error, Stuck):
                    how = f"stopped after {elapsed_s:.1f} s: no rank can continue"
            if live is not None:
                # The region is above everything else that this cell shows.
                live.end(headlines[0] if headlines else None, how)
                headlines = headlines[1:] if live.region.shown else headlines
            self._publish(result, headlines)
        result.raise_for_error()
        return result

    def show_result(self, result: CellResult) -> None:
        """Show a run that has ended, its error included."""
        self._publish(result, _headlines(result))
        if result.error is not None:
            self._output.say("\n".join(result.error._render_traceback_()))

    def _publish(self, result: CellResult, headlines: Sequence[Bundle]) -> None:
        for headline in headlines:
            self._output.publish(headline)
        if isinstance(result.error, Stuck | CellFailed):
            result.error.shown = True
        show_outputs(self._output.publisher, result.outputs, fold=self._output.folds)
        if result.diagnosis is not None and result.error is None:
            self._output.publish(mime_bundle(result.diagnosis))
        if result.steps is not None:
            self._output.publish(mime_bundle(result.steps))
        if result.ledger is not None and result.error is not None:  # else it is the cell's value
            self._output.publish(mime_bundle(result.ledger))
        if result.withheld_bytes:
            self._output.say(withheld_text(result.withheld_bytes))

    def show_news(self, run: CellRun) -> None:
        """Show the ranks' output since the notebook showed it last."""
        tracebacks, outputs = split_errors(run.events.news())
        show_outputs(self._output.publisher, outputs, fold=self._output.folds)
        if tracebacks:
            self._output.publish(traceback_bundle(tracebacks))

    # -- a run that goes on when its cell has ended -------------------------------------------

    def show_detached(self, begin: Begin) -> None:
        """Start something and return; this cell continues to show it, and how it ends."""
        runs: list[CellRun] = []
        begin(runs.append)
        run, ended = runs[0], runs[0].ended
        self._output.say(
            f"{run.heading} is running on {name_ranks(run.ranks)} in the background. "
            "Wait for it: %ddp_wait\n"
            "Inspect it: %ddp_where, %ddp_why, %ddp_output. Stop it: %ddp_abort"
        )
        if self._output.is_live:
            live = LiveRun(
                self._output.publisher,
                self._lines,
                run,
                over=ended.done,
                final=lambda: _end_bundle(run, ended, _SHOW_ALL),
                line_after_s=0,  # a front end takes nothing new for a cell that has ended
            )
            self._follow(live.region)
            ended.add_done_callback(lambda _: live.region.nudge())

    def follow_set_up(self, table: StepTable) -> None:
        """Continue to show a setup that pauses before each stage, until it is complete."""
        session, processes, last = self._session, self._session.pool.processes, table

        # A restart or a shutdown replaces the processes: this table is about the old ones then.
        def gone() -> bool:
            return session.pool.processes is not processes or bool(session.record.snapshot.ended)

        def look() -> Bundle:
            nonlocal last
            with contextlib.suppress(DDPError):  # it went meanwhile
                last = last if gone() else session.stepping.table()
            # Once it is over a table would be read as the present state, under a board that
            # shows another one.
            if region.closed:
                title = last.title if session.record.snapshot.ready else _ENDED_EARLY
                last = replace(last, title=title, rows=(), about="", link="", details=())
                last = replace(last, next_call="")
            return mime_bundle(_timeless(last))

        region = self._standing(look, lambda: gone() or session.record.snapshot.ready)
        self._follow(region)

    def _standing(self, look: Callable[[], Bundle], over: Callable[[], bool]) -> LiveRegion:
        return LiveRegion(
            self._output.publisher, look, BOARD_INTERVAL_S, settle_s=BOARD_INTERVAL_S, over=over
        )

    def _follow(self, region: LiveRegion) -> None:
        """Draw `region` at once, so that it belongs to this cell, and continue to update it."""
        region.draw()

        def changed(events: Sequence[Event]) -> None:
            if region.closed:
                unsubscribe()
            elif is_news(events):
                region.nudge()

        unsubscribe = self._session.record.subscribe(changed)
        region.open()

    def announce_end(self) -> None:
        """Print once that a detached run has ended, where no region can show it."""
        run = self._session.runs.detached
        if self._output.is_live or run is None or run.reported or not run.detached_by_user:
            return
        if run.ended.done() and run.ended is not self._announced:
            self._announced = run.ended
            self._output.say(f"{_end_sentence(run, run.ended)} {_SHOW_ALL}")


_SHOW_ALL = "Show all of it: %ddp_wait"
_ENDED_EARLY = "This setup, step by step, was ended before it was complete."


def _headlines(result: CellResult) -> list[Bundle]:
    """Return what is shown first: the finding, then the errors of its culprits, of other ranks."""
    if isinstance(result.error, Stuck):
        return [mime_bundle(result.error.diagnosis)]
    # The cause comes first: the tracebacks of ranks that lost a connection to the culprit are long,
    # and lead astray.
    diagnosis = result.diagnosis if result.error is not None else None
    if diagnosis is None or not diagnosis.findings:
        return [traceback_bundle(result.tracebacks)] if result.tracebacks else []
    of_culprits, others = divided(diagnosis, result.tracebacks)
    return [
        mime_bundle(replace(diagnosis, tracebacks=())),
        *([traceback_bundle(of_culprits)] if of_culprits else []),
        *([victims_bundle(others)] if others else []),
    ]


def _timeless(table: StepTable) -> StepTable:
    """`table` without durations: it may be read much later."""
    return replace(table, rows=tuple(replace(row, since_s=float("nan")) for row in table.rows))


def _end_bundle(run: CellRun, ended: Future[CellResult], more: str = "") -> Bundle:
    """How a run ended after its cell, shown in the place of its live display."""
    tracebacks, outputs = split_errors(run.events.live_groups())
    diagnosis = ended.result().diagnosis if ended.exception() is None else None
    bundles = [whole((*tracebacks, *outputs))] if tracebacks or outputs else []
    sentence = _end_sentence(run, ended)
    if diagnosis is not None and diagnosis.findings:
        bundles.insert(0, mime_bundle(diagnosis))
        sentence = f"{run.heading} did not finish." if _failed(ended) else sentence
    sentence = f"{sentence} {more}".rstrip()
    bundles.append(live_bundle((), sentence))
    return {
        kind: separator.join(bundle[kind] for bundle in bundles)
        for kind, separator in (("text/plain", "\n\n"), ("text/html", ""))
    }


def _failed(ended: Future[CellResult]) -> BaseException | None:
    """Return its error; None if every rank finished it."""
    return ended.exception() or ended.result().error


def _end_sentence(run: CellRun, ended: Future[CellResult]) -> str:
    error = _failed(ended)
    if error is None:
        return f"{run.heading} has finished."
    return f"{run.heading} did not finish. {str(error).splitlines()[0]}"


# -- a run under its cell, and the line above it -----------------------------------------


Show = Callable[[Bundle], None]


class Lines:
    """Makes the lines of one notebook. `shell` is IPython's.

    The last line of an ended run stays, for a page that is loaded later; earlier ones are closed.
    """

    def __init__(self, shell: Any, session: Session, buttons: Mapping[str, Button]) -> None:
        self._shell = shell
        self._session = session
        self._buttons = buttons
        self._made: list[RunningLine] = []

    def make(self, text: str, began_s: float) -> RunningLine | None:
        """A line for a run that began at `began_s`; None without widgets."""
        if not can_show_widgets(self._shell):
            return None
        for line in [line for line in self._made if line.over]:
            self._made.remove(line)
            line.close()
        _, line_class = widget_classes()
        line = line_class(self._session, self._buttons, text, began_s)
        self._made.append(line)
        return line


class LiveRun:
    """One run, from `open` to `end`, or until `over`: then `final` gives what stays on show."""

    def __init__(
        self,
        publisher: Any,
        lines: Lines,
        run: CellRun,
        over: Callable[[], bool] = lambda: False,
        final: Callable[[], Bundle] = lambda: NOTHING,
        line_after_s: float = 1.0,  # a shorter run has no line
        context: Context | None = None,
    ) -> None:
        self._run = run
        self._lines = lines
        self._final = final
        self._line_after_s = line_after_s
        self._line: RunningLine | None = None
        self._has_line: bool | None = None
        """None until the run has lasted long enough for a line."""
        self._words = ""
        """The words in place of the line where a page has no such widget."""
        self._show_line: Show = lambda _: None
        self.region = LiveRegion(
            publisher,
            self._look,
            OUTPUT_INTERVAL_S,
            settle_s=OUTPUT_SETTLE_S,
            over=over,
            context=context,
        )

    def end(self, shown: Bundle | None, how: str) -> None:
        """Replace the run's display by `shown`, and the line by `how` it ended.

        With nothing to show the display says how it ended, where no line of its own does.
        """
        self.region.close(shown or {"text/plain": how if self._line is None else ""})
        self._end_line(how)

    def _look(self) -> Bundle:
        run = self._run
        if self.region.closed:
            self._end_line("")
            return self._final()
        # The widget is made only for a run that lasts: making one takes longer than a short cell.
        if self._has_line is None and time.monotonic() - run.began_s >= self._line_after_s:
            self._line = self._lines.make(_standing(run, f"{run.heading} is running"), run.began_s)
            self._has_line = self._line is not None
            if self._line is not None:
                began = f"{run.heading} has been running since {_since(run)}."
                self._words = self._line.words(f"{began} Saved while it was running.")
                # The line takes the place of the region, and the output continues below it: front
                # ends cannot insert an output above one that exists.
                bundle = self._line.bundle(f"{began} Show stacks: %ddp_where")
                self._show_line = self.region.give_up_place(bundle)
        if self._line is not None:
            self._line.look(_standing(run, f"{run.heading} is running"))
            bundle = live_bundle(run.events.live_groups(), "")
            return {**bundle, "text/html": self._words + bundle["text/html"]}
        stop = " · stop it: interrupt the kernel (I, I)" if self._has_line is False else ""
        return live_bundle(
            run.events.live_groups(), _standing(run, f"running since {_since(run)}") + stop
        )

    def _end_line(self, how: str) -> None:
        if self._line is not None:
            self._show_line({"text/plain": how})
            # Only a page that was loaded in mid-run still has the line, and has no output.
            self._line.end(f"{how} · output of a rank: %ddp_output --ranks 0 · problems: %ddp_why")


def _since(run: CellRun) -> str:
    """When it began, as a time of day: still true when it is read later."""
    began_s = time.time() - (time.monotonic() - run.began_s)
    return time.strftime("%H:%M:%S", time.localtime(began_s))


def _standing(run: CellRun, runs: str) -> str:
    """A run in words: what `runs`, which ranks left it and how, which ranks wait for which."""
    pending = run.pending
    words = [f"{runs} on {name_ranks(pending)}" if pending else runs]
    words += [f"{name_ranks(ranks)} {word}" for word, ranks in exits(run.events).items() if pending]
    return " · ".join([*words, run.waits_for] if run.waits_for else words)
