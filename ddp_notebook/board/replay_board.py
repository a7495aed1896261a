"""Widgets in a notebook: whether there can be one, and a saved run in one."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.board import model
from ddp_notebook.board.kernel_messages import widget_messages
from ddp_notebook.board.timeline import Timeline, died_ns
from ddp_notebook.board.timeline_svg import bars
from ddp_notebook.model import Collectives, Diagnosis, Snapshot, Status
from ddp_notebook.session.interrupts import do_meanwhile
from ddp_notebook.state.board import board as arranged
from ddp_notebook.state.lanes import Picture, as_of, lanes, standing_at

if TYPE_CHECKING:
    from ddp_notebook.archive.replay import Replay
    from ddp_notebook.board.widget import BoardWidget


def can_show_widgets(shell: Any) -> bool:
    """Whether there is a kernel that can talk to a page, and what is needed for that."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None or getattr(kernel, "comm_manager", None) is None:
        return False
    return all(importlib.util.find_spec(name) for name in ("anywidget", "ipywidgets"))


def prepare_widgets(kernel: Any) -> None:
    """Have pages answered while cells run, and import what widgets need, in the background: that
    takes longer than a board may."""
    handle = widget_messages(kernel)
    if handle is not None:
        do_meanwhile(handle)

    def work() -> None:
        import ddp_notebook.board.widget  # noqa: F401

    threading.Thread(target=work, name="ddp-widgets", daemon=True).start()


def past_message(
    asked: Mapping[str, Any], snapshot: Snapshot, collectives: Collectives, epoch_ns: int
) -> dict[str, Any]:
    """The lanes as they were when `snapshot` was the state, for the page that asked."""
    pending = snapshot.with_status(Status.RUNNING)
    drawn = lanes(Picture(snapshot, collectives, pending))
    board = arranged(snapshot)
    shown = model.board_json(board.headline, (), snapshot, drawn, epoch_ns)
    return {
        "kind": "past",
        "view": str(asked.get("view", "")),
        "board": {**shown, "now": asked["at"], "frozen": True},
    }


class ReplayBoard:
    """A saved run in the same widget, with nothing to press."""

    def __init__(self, replay: Replay, diagnosis: Diagnosis | None) -> None:
        from ddp_notebook.board.widget import BoardWidget

        saved = replay.saved
        self._replay = replay
        self._epoch_ns = saved.began_ns
        self._end_us = (saved.snapshot.taken_ns - self._epoch_ns) // 1000
        self._timeline = Timeline(self._epoch_ns, saved.world_size)
        records = [each for issued in saved.collectives.of.values() for each in issued]
        self._timeline.take(saved.run or 1, records)
        self._timeline.end(died_ns(saved.snapshot))
        pending = saved.snapshot.with_status(Status.RUNNING)
        sources = saved.case.sources if saved.case is not None else {}
        picture = Picture(saved.snapshot, saved.collectives, pending, diagnosis, sources)
        shown, drawn = arranged(saved.snapshot), lanes(picture)
        self.bars = bars(self._timeline, [lane.ranks for lane in drawn])
        """The last collectives, for where the script does not run."""
        board = model.board_json(
            f"{replay.name}: {shown.headline}",
            shown.notes,
            saved.snapshot,
            drawn,
            self._epoch_ns,
        )
        evidence = saved.case.ranks if saved.case is not None else ()
        paths = {each.rank: each.path for each in evidence if each.path}
        self.widget: BoardWidget = BoardWidget(
            self._heard,
            board={**board, "began": 0, "frozen": True, "now": self._end_us},
            findings=model.findings_json(diagnosis),
            standings=model.standings_json(standing_at(paths, sources)),
        )

    def _heard(self, content: Mapping[str, Any]) -> None:
        if content.get("kind") == "hello":
            self.widget.tell(self._timeline.whole(), self._end_us)
        elif content.get("kind") == "at" and isinstance(content.get("at"), int):
            at_ns = self._epoch_ns + 1000 * int(content["at"])
            snapshot = self._replay.at(max(0, content["at"]) / 1e6).snapshot
            known = as_of(self._replay.collectives, at_ns)
            self.widget.tell(past_message(content, snapshot, known, self._epoch_ns), content["at"])
