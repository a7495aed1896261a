"""A cell or a script on the ranks as the notebook shows it: live, then whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddp_notebook.errors import Stuck
from ddp_notebook.model import Event, Pulse, Status, name_ranks
from ddp_notebook.session import Session
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.state.board_rows import FOLD_FROM
from ddp_notebook.state.output import split_errors
from ddp_notebook.views import findings
from ddp_notebook.views.live_region import OUTPUT_INTERVAL_S, OUTPUT_SETTLE_S, LiveRegion
from ddp_notebook.views.notebook import (
    live_bundle,
    show_outputs,
    traceback_bundle,
    withheld_text,
)

_REGION_DELAY_S = 0.06
"""A cell that is over sooner shows its output once, without a live region before it."""

Begin = Callable[[Callable[[CellRun], None]], CellResult]
"""Starts something on the ranks and waits for its end; calls its argument when it has begun."""


def is_news(events: Sequence[Event]) -> bool:
    """False for signs of life alone: a region is looked at once a second anyway."""
    return not events or any(not isinstance(event, Pulse) for event in events)


class RunningCells:
    """Mixed into the magics."""

    shell: Any
    session: Session

    @property
    def _has_front_end(self) -> bool:
        return getattr(self.shell, "kernel", None) is not None

    def _show_run(self, begin: Begin) -> CellResult:
        """Run something and show its output; how it ended. Raises what went wrong with it."""
        started = time.monotonic()
        region: LiveRegion | None = None

        def begun(run: CellRun) -> None:
            nonlocal region, started
            started = run.began_s
            if self._has_front_end:
                region = self._region(run)

        def nudge(events: Sequence[Event]) -> None:
            if region is None:
                return
            if not region.opened:
                # A cell that is over by then has no region, and no thread was started for it.
                if time.monotonic() - started > _REGION_DELAY_S:
                    region.open()
            elif is_news(events):
                region.nudge()

        unsubscribe = self.session.record.subscribe(nudge)
        try:
            result = begin(begun)
        finally:
            unsubscribe()
            if region is not None and sys.exc_info()[0] is not None:
                region.close({"text/plain": ""})
        self._show_result(result, region, time.monotonic() - started)
        return result

    def _region(self, run: CellRun) -> LiveRegion:
        """Where this cell shows a run while it goes on."""
        return LiveRegion(
            self.shell.display_pub,
            lambda: self._live(run),
            OUTPUT_INTERVAL_S,
            settle_s=OUTPUT_SETTLE_S,
        )

    def _show_result(self, result: CellResult, region: LiveRegion | None, elapsed_s: float) -> None:
        first = self._first(result)
        if region is not None:
            # The region stands above everything else this cell shows.
            took = f"finished in {elapsed_s:.1f} s" if elapsed_s >= 1 and not result.pending else ""
            region.close(first or {"text/plain": took})
        self._publish(result, None if region is not None and region.shown else first)
        result.raise_for_error()

    def _first(self, result: CellResult) -> dict[str, str] | None:
        """What stands above all else: why the ranks are stuck, or their tracebacks."""
        if isinstance(result.error, Stuck):
            return findings.bundle(result.error.diagnosis)
        return traceback_bundle(result.tracebacks) if result.tracebacks else None

    def _publish(self, result: CellResult, first: dict[str, str] | None) -> None:
        publisher = self.shell.display_pub
        if first is not None:
            publisher.publish(data=first, metadata={})
        show_outputs(publisher, result.outputs)
        if result.diagnosis is not None and not isinstance(result.error, Stuck):
            publisher.publish(data=findings.bundle(result.diagnosis), metadata={})
        if result.steps is not None:
            publisher.publish(data=findings.bundle(result.steps), metadata={})
        if result.withheld_bytes:
            print(withheld_text(result.withheld_bytes))  # noqa: T201  # the cell's output

    def _show_news(self, run: CellRun) -> None:
        """What the ranks wrote since their cell came back to the notebook."""
        tracebacks, outputs = split_errors(run.news())
        show_outputs(self.shell.display_pub, outputs)
        if tracebacks:
            self.shell.display_pub.publish(data=traceback_bundle(tracebacks), metadata={})

    def _live(self, run: CellRun) -> dict[str, str]:
        board = self.session.status()
        trouble = board.snapshot.with_status(Status.DEAD, Status.FAILED)
        silent = any(row.silent for row in board.rows)
        elapsed_s = time.monotonic() - run.began_s
        # Where the ranks are is shown as soon as one is in trouble, or one may wonder.
        show_board = bool(trouble) or silent or (elapsed_s > 3 and len(board.rows) <= FOLD_FROM)
        done = [r for r in run.ranks if r not in run.pending]
        # Who leaves it running for hours needs no second hand, nor a message each second.
        took = f"{elapsed_s:.0f} s" if elapsed_s < 120 else f"{elapsed_s // 60:.0f} min"
        text = f"running {took}"
        if done and run.pending:
            text += f" · {name_ranks(done)} finished"
        if run.awaited:
            text += f" · {run.awaited}"
        return live_bundle(run.live_groups(), board if show_board else None, text)
