"""The live board in a notebook: a widget, and a picture for pages without scripts."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_notebook.board import model, still_picture
from ddp_notebook.board.buttons import Button, Buttons
from ddp_notebook.board.life import Life
from ddp_notebook.board.replay_board import can_show_widgets, past_message, widget_classes
from ddp_notebook.board.source import BoardSource
from ddp_notebook.board.tab_contents import TabFeed
from ddp_notebook.board.timeline import FREED, Memory, Moment, Past, Timeline, died_ns, parted
from ddp_notebook.errors import DDPError
from ddp_notebook.launch.process_ids import host_of
from ddp_notebook.model import Board, Diagnosis, Snapshot
from ddp_notebook.session import Session
from ddp_notebook.views.board_rows import BoardFacts, board_of
from ddp_notebook.views.live_region import BOARD_INTERVAL_S, LiveRegion
from ddp_notebook.views.notebook import mime_bundle
from ddp_notebook.views.stack_tree import pending_locations
from ddp_notebook.views.step_rows import collectives_at

if TYPE_CHECKING:
    from ddp_notebook.board.widget import BoardWidget
    from ddp_notebook.jobs.target import Target

_CAPTION = (
    '<div style="margin-top: 6px; font-size: 0.88em; opacity: 0.8">As it was when this cell ended. '
    "Now: <code>%ddp_status</code></div>"
)


def _still(board: Board, html: str = "") -> dict[str, str]:
    """A board as text, and as HTML without scripts; `html` is that, where there is more to it."""
    return {**mime_bundle(board), "text/html": html or still_picture.html(board)}


def open_board(
    session: Session, shell: Any, buttons: Mapping[str, Button], memory: Memory | None = None
) -> LiveBoard | StillBoard:
    """A board for `shell`: the widget where there can be one, else the picture alone.

    `memory` is that of the board before it.
    """
    if can_show_widgets(shell):
        return LiveBoard(session, shell, buttons, memory)
    return StillBoard(session, shell)


class StillBoard:
    """The board without a script: text and HTML, drawn again until its cell has ended."""

    def __init__(self, session: Session, shell: Any) -> None:
        self._region = LiveRegion(
            shell.display_pub,
            lambda: _still(session.status()),
            BOARD_INTERVAL_S,
            settle_s=BOARD_INTERVAL_S,
        )
        self.nudge = self._region.nudge
        self.memory: Memory | None = None
        self._session = session
        self._kept = False

    def open(self, delay_s: float, show: object, *, in_panel: bool = False) -> None:
        """Show it in the cell that runs, and begin drawing after `delay_s`."""
        self._region.open(delay_s)

    def cell_begins(self) -> None:
        """A cell of the notebook begins to run."""

    def show_job(self, job: Target | None) -> None:
        """It shows the session's own ranks: `%ddp_board` shows an attached job."""

    def cell_ended(self) -> None:
        """The cell has ended. If it was the board's own, the notebook keeps what is known now."""
        self.close(self._session.status())

    def close(self, final: Board | None = None) -> None:
        """Stop drawing, once; show `final` in its place if it is given."""
        if self._kept:
            return
        self._kept = True
        if not self._region.shown:
            self._region.draw()
        bundle = _still(final) if final is not None else None
        self._region.close(bundle and {**bundle, "text/html": bundle["text/html"] + _CAPTION})

    def let_go(self) -> None:
        """It is only a picture."""


class LiveBoard:
    """A board that changes by itself, from `open` to `close`.

    Drawn on a thread of its own, at most ten times a second; questions of pages are answered
    there too. After `close` it stays as it is, and answers a page that is opened later, until it is
    let go.
    """

    def __init__(
        self,
        session: Session,
        shell: Any,
        buttons: Mapping[str, Button],
        memory: Memory | None = None,
    ) -> None:
        self._session = session
        self._publisher = shell.display_pub
        self._source = BoardSource(session)
        self._buttons = Buttons(session, buttons, self._pressed, self._source.diagnosed)
        self.memory = memory
        """Its own once it has drawn."""
        self._job: Target | None = None
        """The attached job that is shown instead of these ranks."""
        self._seen: tuple[Board, Diagnosis | None] = Board("", (), (), Snapshot()), None
        """That job, as it was when it was looked at last."""
        self._opened_ns = time.monotonic_ns()
        self._last_slices: Mapping[str, Any] = {}
        """All that the timeline shows, once it is closed."""
        # Pages are told what a tab shows; nothing of it is saved in the notebook.
        self._tabs = TabFeed(
            session, lambda v: self._widget.tell({"kind": "state", "values": v}, self._now_us())
        )
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._questions: dict[str, Mapping[str, Any]] = {}
        self._closed = False
        self._closed_us = 0
        """When it was closed: what it shows does not become older after that."""
        self.cell_runs = True
        """A cell of the notebook runs: every page gets signs of life, watched or not."""
        self._watched_until_s = 0.0
        self._sent_s = 0.0
        self._life = Life()
        self._kept = False
        self._found: Diagnosis | None = None
        self._shown: Board | None = None
        """The board that the widget shows."""
        starting = Board("The ranks are starting.", (), (), Snapshot())
        empty = model.board_json(starting, self._epoch_ns)
        no_rank = [asdict(action) for action in model.actions((), running=False, in_run=False)]
        board_class, _ = widget_classes()
        self._widget: BoardWidget = board_class(self._on_message, board=empty, actions=no_rank)
        self._picture = LiveRegion(
            self._publisher,
            self._still,
            1.0,  # below a widget it is for later, and need not be drawn as often
            settle_s=BOARD_INTERVAL_S,
        )

    def open(
        self, delay_s: float, show: Callable[[Mapping[str, Any]], None], *, in_panel: bool = False
    ) -> None:
        """Begin drawing after `delay_s`. `show` displays the widget, the cell has its picture.

        `in_panel`: it is displayed in a panel and in the cell, which hides it beside that panel.
        """
        self._widget.in_panel = in_panel
        show(self._widget.bundle())
        self._picture.open(delay_s)
        # ipykernel sends a message for the cell in whose context it is sent: with this cell's
        # context, the answers of pages go to the main thread, where they are read.
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._draw_loop, delay_s), name="ddp-drawing", daemon=True
        ).start()

    def nudge(self) -> None:
        """Something may have changed (any thread; quick)."""
        self._wake.set()
        self._picture.nudge()

    def show_job(self, job: Target | None) -> None:
        """Show an attached job, or these ranks again; each call, and Why?, takes another look."""
        self._job = job
        if job is None:
            self.nudge()
            return
        self._seen = Board(f"{job.name}: being looked at", (), (), Snapshot()), None

        def look() -> None:
            try:
                seen: tuple[Board, Diagnosis | None] = job.shown()
            except DDPError as error:
                seen = Board(f"{job.name}: {error}", (), (), Snapshot()), None
            if self._job is job:
                self._seen = seen
                self.nudge()

        threading.Thread(target=look, name="ddp-job", daemon=True).start()

    def cell_begins(self) -> None:
        """A cell of the notebook begins to run: no message of a page arrives until it ends."""
        self.cell_runs = True

    def cell_ended(self) -> None:
        """The cell has ended. If it was the board's own, the notebook keeps what is known now."""
        self.cell_runs = False
        if not self._kept:
            self._draw()
            self._keep()

    def close(self, final: Board | None = None) -> None:
        """Stop drawing: what is shown then stays, or else `final`."""
        self._draw(closing=True)
        with self._lock:
            self._closed = True
            widget, now_us = self._widget, self._now_us()
            self._closed_us = now_us
            self._last_slices = self.memory.timeline.whole() if self.memory is not None else {}
            last = {**widget.board, **widget.drawn.get("board", {})}
            if final is not None:
                last |= model.board_json(final, self._epoch_ns)
            shown = {**last, "loading": None, "checking": False, "frozen": True, "closed": True}
            widget.draw(now_us, board=shown, actions=[], benchmark={}, stops={})
        self._wake.set()
        self._keep(final)

    def _keep(self, final: Board | None = None) -> None:
        """Have what is shown, or `final`, in the notebook, once: later cells do not change it."""
        if self._kept:
            return
        self._kept = True
        picture = self._still(final, _CAPTION)
        if not self._picture.shown:
            self._picture.draw()
        self._picture.close(picture)
        with self._lock:
            self._widget.keep()

    def let_go(self) -> None:
        """Answer no page any more: once closed, it is seen as the picture that its cell has."""
        self._widget.close()

    # -- drawing ----------------------------------------------------------------------

    @property
    def _in_run(self) -> bool:
        """True while ranks are in a cell or a script."""
        run = self._session.runs.current
        return run is not None and not run.done

    def _still(self, final: Board | None = None, below: str = "") -> dict[str, str]:
        """The picture of what the widget shows, or of `final`."""
        with self._lock:
            board = final or self._shown or self._session.status()
            timeline = self.memory.timeline if self.memory is not None else None
            html = still_picture.html(board, self._found, timeline)
            bundle = _still(board, html)
        return self._widget.picture(bundle, below)

    def _draw_loop(self, delay_s: float) -> None:
        time.sleep(delay_s)
        while not self._closed:
            self._wake.clear()
            self._draw()
            # A pause after each drawing, however many events wake it: ten ranks that print do not
            # redraw the board a hundred times a second.
            time.sleep(BOARD_INTERVAL_S)
            if not self._closed and not self._in_run:
                self._wake.wait(1.0)

    def _draw(self, *, closing: bool = False) -> None:
        """Bring the widget up to date; what did not change is not sent."""
        with self._lock:
            if self._closed:
                return
            source = self._source
            # One look is what all of this drawing is made of: findings, rows and slices of
            # different moments would contradict each other.
            facts, news = source.look()
            no_ranks = not facts.snapshot.ranks or facts.snapshot.ended
            if self._shown is None and not closing and no_ranks:
                return  # %ddp_init has not cleared the record yet
            of, memory = (self._session.record.began_ns, facts.snapshot.world_size), self.memory
            if memory is None or memory.of != of:  # a new session gets a new one
                epoch_ns = self._epoch_ns if memory is not None else min(of[0], self._opened_ns)
                timeline = Timeline(epoch_ns, of[1])
                timeline.generation += memory.timeline.generation if memory is not None else 0
                self.memory = memory = Memory(of, epoch_ns, timeline, Past())
            memory.timeline.take(source.run, news, source.title, source.pauses)
            memory.past.keep(source.run, time.monotonic_ns(), facts.collectives)
            memory.timeline.end(died_ns(facts.snapshot))
            memory.timeline.end(source.left_ns, FREED)
            self._show(facts, memory)
            self._send_slices(memory.timeline, facts.snapshot)
            self._answer()
        # Not under the lock, for which a button that is pressed waits: this may read what ranks
        # wrote.
        self._tabs.turn(self._source.key())

    @property
    def _epoch_ns(self) -> int:
        """From when on times are counted."""
        return self.memory.epoch_ns if self.memory is not None else self._opened_ns

    def _show(self, facts: BoardFacts, memory: Memory) -> None:
        """Set what the widget shows: the session's ranks, or an attached job."""
        job, session = self._job, self._session
        board, found = self._seen if job is not None else (board_of(facts), facts.diagnosis)
        self._found, self._shown = found, board
        benchmark = session.benchmarks.current if job is None else None
        in_run = self._in_run and bool(facts.pending)
        # What did not change is compared by value and not sent, so nothing here may hold an age or
        # a time of day.
        shown = {**model.board_json(board, self._epoch_ns), "began": 0, "frozen": False}
        if job is not None:
            shown["what"] = " · ".join(filter(None, (job.name, shown["what"])))
            shown |= {"aside": job.name, "run": "attached", "checking": False, "run_us": 0}
            actions: tuple[model.Action, ...] = (model.Action("why", "Look again", "%ddp_why"),)
        else:
            began_us = self._source.began_us(self._epoch_ns) if in_run else 0
            shown |= {"aside": "", "run": self._source.title, "run_us": began_us}
            shown["checking"] = self._source.checking
            shown["parted"] = parted(memory.timeline, found)
            actions = model.actions(
                board.rows, session.running, in_run, benchmark is not None, bool(facts.stops)
            )
        locations = pending_locations(facts) if job is None else ()
        self._widget.draw(
            self._now_us(),
            board=shown,
            findings=model.findings_json(found),
            locations=model.locations_json(locations),
            benchmark=model.benchmark_json(benchmark.what, benchmark.done) if benchmark else {},
            actions=[asdict(action) for action in actions],
        )
        drawn = self._widget.drawn
        memory.past.note(Moment(time.monotonic_ns(), drawn["findings"], drawn["locations"]))
        self._show_buttons()

    def _send_slices(self, timeline: Timeline, snapshot: Snapshot) -> None:
        """Send what is new in the timeline, and what the ranks use to whoever watches.

        A page that got nothing for long gets a sign of life.
        """
        message = timeline.news()
        now_s = time.monotonic()
        watched = self.cell_runs or now_s < self._watched_until_s
        # Nobody watches: nothing is sampled.
        # Those of other hosts cannot be seen from here.
        here = [each for each in snapshot.ranks if watched and each.pid and not host_of(each.pid)]
        pids = {each.pid: each.rank for each in here}
        life = self._life.sample(pids, timeline, self._source.gpu_held)
        # A page that watches gets a message this often; without one it reports that the kernel is
        # gone.
        if life:
            message = {**(message or {"kind": "beat"}), "life": life}
        elif message is None and watched and self._sent_s + 2.0 < now_s:
            message = {"kind": "beat"}
        if message is not None:
            self._sent_s = now_s
            self._widget.tell(message, self._now_us())

    def _pressed(self) -> None:
        """A button was pressed, or has answered: that is shown at once, the rest in its turn."""
        with self._lock:
            if not self._closed:
                self._show_buttons()
        self.nudge()

    def _show_buttons(self) -> None:
        begun = self._session.findings.begun
        answers = [model.answer_json(answer, begun) for answer in self._buttons.answers]
        busy, stops = list(self._buttons.busy), self._source.stops() if self._job is None else {}
        self._widget.draw(self._now_us(), busy=busy, answers=answers, stops=stops)

    def _now_us(self) -> int:
        return self._closed_us or (time.monotonic_ns() - self._epoch_ns) // 1000

    # -- messages of pages ---------------------------------------------------------------

    def _on_message(self, content: Mapping[str, Any]) -> None:
        """A page sent a message; any thread, and nothing here takes long."""
        kind = content.get("kind")
        # A page that watches reports every minute, and no page can while a cell runs. Otherwise no
        # message is sent at all: only then can Jupyter see that the kernel is idle, or that it has
        # ended.
        self._watched_until_s = time.monotonic() + 90.0
        self._tabs.message(content, str(content.get("view", ""))[:64])
        if kind == "do" and not self._closed:
            self._widget.tell({"kind": "took"}, self._now_us())
            job, magic = self._job, str(content.get("magic", ""))
            # An attached job can be looked at again, and nothing else.
            self._buttons.press(magic) if job is None else self.show_job(job)
        elif kind == "close":
            self._buttons.close(content.get("number"))
        elif kind == "watch":
            self._wake.set()
        elif kind == "here" and self._closed:
            # Nothing is drawn any more: a page that has missed the end would wait for it.
            self._widget.tell({"kind": "beat"}, self._now_us())
        elif kind == "hello" or (kind == "at" and isinstance(content.get("at"), int)):
            # A page that is scrubbed sends many of these: only the latest of a kind is answered.
            self._questions[str(kind)] = content
            if self._closed:
                self._answer()
            else:
                self._wake.set()

    def _answer(self) -> None:
        """Answer the latest question of each kind."""
        memory = self.memory
        if memory is None:
            return
        if self._questions.pop("hello", None) is not None:
            slices = self._last_slices or memory.timeline.whole()
            self._widget.tell_whole(slices, self._now_us())
        past = self._questions.pop("at", None)
        if past is not None:
            at_ns = self._epoch_ns + 1000 * int(past["at"])
            known = collectives_at(memory.past.collectives_at(at_ns), at_ns)
            then, moment = self._source.past(at_ns), memory.past.found_at(at_ns)
            message = past_message(past, then, known, moment, self._epoch_ns)
            self._widget.tell(message, past["at"])
