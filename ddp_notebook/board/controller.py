"""The live board in a notebook: a widget, and below it a picture for where no script runs."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.board import model
from ddp_notebook.board.buttons import Button, Buttons
from ddp_notebook.board.replay_board import can_show_widgets, past_message
from ddp_notebook.board.source import Live
from ddp_notebook.board.timeline import Timeline, died_ns
from ddp_notebook.board.timeline_svg import bars
from ddp_notebook.model import Board, Ranks, Snapshot
from ddp_notebook.session import Session
from ddp_notebook.state.board import board as arranged
from ddp_notebook.state.lanes import as_of, lanes, standings
from ddp_notebook.views.live_region import BOARD_INTERVAL_S, LiveRegion
from ddp_notebook.views.notebook import board_bundle

if TYPE_CHECKING:
    from ddp_notebook.board.widget import BoardWidget

DRAWN = ("board", "findings", "standings", "actions", "measuring", "busy", "said")
"""The parts of the widget's state that change."""

_PICTURE_INTERVAL_S = 1.0
"""Below a widget the picture is for later: it need not be painted as often."""
REST_S = 3.0
"""While a cell runs, its collectives are drawn in the picture when none came for so long."""
_QUIET_S = 1.0
_BEAT_S = 2.0
"""While a page watches, it hears something so often: else it says that the kernel is gone."""
_WATCHED_S = 90.0
"""A page that watches says so every minute. Nobody is told anything when none does: a kernel
that says nothing can be seen to be idle, and ended."""


def open_board(
    session: Session, shell: Any, buttons: Mapping[str, Button]
) -> LiveBoard | StillBoard:
    """A board for `shell`: the widget where there can be one, else the picture alone."""
    if can_show_widgets(shell):
        return LiveBoard(session, shell, buttons)
    return StillBoard(session, shell)


class StillBoard:
    """The board without a script: text and HTML, painted again when something changes."""

    def __init__(self, session: Session, shell: Any) -> None:
        self._region = LiveRegion(
            shell.display_pub,
            lambda: board_bundle(session.status()),
            BOARD_INTERVAL_S,
            settle_s=BOARD_INTERVAL_S,
        )
        self.open = self._region.open
        self.nudge = self._region.nudge

    def keep(self) -> None:
        """Have what is known now in the notebook before the cell that runs ends."""
        if self._region.shown:
            self._region.paint()

    def close(self, final: Board | None = None) -> None:
        """Stop painting; show `final` in its place if it is given."""
        self._region.close(board_bundle(final) if final is not None else None)


class LiveBoard:
    """A board that changes by itself, from `open` to `close`.

    Painted on a thread of its own, at most ten times a second; what a page asks for is answered
    there too. After `close` it stays as it is, and still answers a page that comes anew.
    """

    def __init__(self, session: Session, shell: Any, buttons: Mapping[str, Button]) -> None:
        from ddp_notebook.board.widget import BoardWidget

        self._session = session
        self._publisher = shell.display_pub
        self._live = Live(session)
        self._buttons = Buttons(session, buttons, self._pressed, self._live.found)
        self._timeline: Timeline | None = None
        self._epoch_ns = time.monotonic_ns()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._asked: dict[str, Mapping[str, Any]] = {}
        self._closed = False
        self._watched_until_s = 0.0
        self._told_s = 0.0
        self._kept: object = None
        self._kept_key: object = None
        self._moved_s = 0.0
        self._rows: list[Ranks] = []
        self._bars, self._bars_of = "", (0, 0.0, self._rows)
        empty = model.board_json("The ranks are starting.", (), Snapshot(), (), self._epoch_ns)
        self._widget: BoardWidget = BoardWidget(self._heard, board=empty)
        self._picture = LiveRegion(
            self._publisher, self._still, _PICTURE_INTERVAL_S, settle_s=BOARD_INTERVAL_S
        )

    def open(self, delay_s: float = 0.0) -> None:
        """Show it in the cell that runs, and begin painting after `delay_s`."""
        self._publisher.publish(data=self._widget.bundle(), metadata={})
        self._picture.open(delay_s)
        # The thread speaks for this cell: what pages answer comes to the main thread then.
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._paint_loop, delay_s), name="ddp-painter", daemon=True
        ).start()

    def nudge(self) -> None:
        """Something may have changed (any thread; quick)."""
        self._wake.set()
        self._picture.nudge()

    def keep(self) -> None:
        """Say all of it for the cell that runs, unless a page watches, which has it already.

        A program that runs a notebook and saves it, as nbclient does, takes in only what it is
        told for the cell that runs; what the painter says is said for the board's own.
        """
        if time.monotonic() < self._watched_until_s:
            return
        key = self._live.key()
        if key == self._kept_key:
            return  # the cells of a loop: a painting each would be a tenth of their time
        self._kept_key = key
        self._paint()
        if self._picture.shown:
            self._draw_bars(at_rest=True)
            self._picture.paint()
        with self._lock:
            state = self._widget.get_state(DRAWN)
            if state != self._kept:
                self._kept = state
                self._widget.send_state(DRAWN)

    def close(self, final: Board | None = None) -> None:
        """Stop painting: what is shown then stays. Of `final` the picture is made."""
        self._paint()
        self._closed = True
        self._wake.set()
        self._kept_key = None
        with self._lock:
            self._widget.actions, self._widget.measuring = [], {}
            self._widget.board = {**self._widget.board, "frozen": True, "closed": True}
        self.keep()
        self._draw_bars(at_rest=True)
        bundle = board_bundle(final if final is not None else self._session.status())
        self._picture.close(self._widget.picture(bundle, self._bars))

    # -- painting ----------------------------------------------------------------------

    def _still(self) -> dict[str, str]:
        run = self._session.current
        over = run is None or run.done
        self._draw_bars(over or time.monotonic() - self._moved_s > REST_S)
        return self._widget.picture(board_bundle(self._session.status()), self._bars)

    def _draw_bars(self, at_rest: bool) -> None:
        """Draw the last collectives for the picture. While they go on, those of before stay in
        it: it is for later, and need not be sent with each of them.
        """
        with self._lock:
            timeline, of = self._timeline, (self._live.run, self._moved_s, self._rows)
            if timeline is not None and at_rest and of != self._bars_of:
                self._bars, self._bars_of = bars(timeline, self._rows), of
            elif of[0] != self._bars_of[0]:
                self._bars = ""

    def _paint_loop(self, delay_s: float) -> None:
        time.sleep(delay_s)
        while not self._closed:
            self._wake.clear()
            self._paint()
            time.sleep(BOARD_INTERVAL_S)
            run = self._session.current
            if not self._closed and (run is None or run.done):
                self._wake.wait(_QUIET_S)

    def _paint(self) -> None:
        """Bring the widget up to date; what did not change is not sent."""
        with self._lock:
            if self._closed:
                return
            picture, news = self._live.look()
            board = arranged(picture.snapshot)
            drawn = lanes(picture)
            widget, session = self._widget, self._session
            in_run = session.current is not None and not session.current.done
            size = picture.snapshot.world_size
            if self._timeline is None:
                self._timeline = Timeline(self._epoch_ns, size)
            self._timeline.take(self._live.run, news)
            self._timeline.end(died_ns(picture.snapshot))
            self._rows = [lane.ranks for lane in drawn]
            if news:
                self._moved_s = time.monotonic()
            with widget.hold_sync():
                widget.paint(
                    {
                        **model.board_json(
                            board.headline, board.notes, picture.snapshot, drawn, self._epoch_ns
                        ),
                        "began": 0,
                        "frozen": False,
                    },
                    self._now_us(),
                )
                widget.findings = model.findings_json(picture.diagnosis)
                widget.standings = model.standings_json(standings(picture))
                measuring = session.measuring
                widget.measuring = (
                    model.measuring_json(measuring.what, measuring.done) if measuring else {}
                )
                in_run = in_run and bool(picture.pending)
                widget.actions = model.actions_json(
                    model.actions(drawn, session.running, in_run, measuring is not None)
                )
                self._show_buttons()
            message = self._timeline.news()
            now_s = time.monotonic()
            if message is None and self._told_s + _BEAT_S < now_s < self._watched_until_s:
                message = {"kind": "beat"}
            if message is not None:
                self._told_s = now_s
                widget.tell(message, self._now_us())
            self._answer()

    def _pressed(self) -> None:
        """A button was pressed, or has answered: that is shown at once, the rest in its turn."""
        with self._lock:
            self._kept_key = None
            if not self._closed:
                self._show_buttons()
        self.nudge()

    def _show_buttons(self) -> None:
        self._widget.busy = list(self._buttons.busy)
        self._widget.said = [model.said_json(each) for each in self._buttons.said]

    def _now_us(self) -> int:
        return (time.monotonic_ns() - self._epoch_ns) // 1000

    # -- what pages say ----------------------------------------------------------------

    def _heard(self, content: Mapping[str, Any]) -> None:
        """A page said something; any thread, and nothing here takes long."""
        kind = content.get("kind")
        self._watched_until_s = time.monotonic() + _WATCHED_S
        if kind == "do" and not self._closed:
            self._buttons.press(str(content.get("magic", "")))
        elif kind == "hello" or (kind == "at" and isinstance(content.get("at"), int)):
            self._asked[str(kind)] = content
            if self._closed:
                self._answer()
            else:
                self._wake.set()

    def _answer(self) -> None:
        if self._asked.pop("hello", None) is not None and self._timeline is not None:
            self._widget.tell(self._timeline.whole(), self._now_us())
        past = self._asked.pop("at", None)
        if past is not None:
            at_ns = self._epoch_ns + 1000 * int(past["at"])
            picture, _ = self._live.look()
            known = as_of(picture.collectives, at_ns)
            self._widget.tell(
                past_message(past, self._live.past(at_ns), known, self._epoch_ns), past["at"]
            )
