"""Widgets in a notebook: whether there can be one, and a saved run in one."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ddp_notebook.archive.replay import Replay
from ddp_notebook.board import model, still_picture
from ddp_notebook.board.kernel_messages import widget_messages
from ddp_notebook.board.timeline import FREED, Moment, Timeline, died_ns, parted
from ddp_notebook.model import Collectives, Diagnosis, Snapshot, Status
from ddp_notebook.session.interrupts import do_meanwhile
from ddp_notebook.views.board_rows import BoardFacts, board_of
from ddp_notebook.views.notebook import mime_bundle
from ddp_notebook.views.stack_tree import locations
from ddp_notebook.views.step_rows import collectives_at, of_run

if TYPE_CHECKING:
    from ddp_notebook.board.running_line import RunningLine
    from ddp_notebook.board.widget import BoardWidget


def can_show_widgets(shell: Any) -> bool:
    """Return True where a kernel can talk to a page, and the packages for that are loaded."""
    return may_show_widgets(shell) and _are_loaded()


def may_show_widgets(shell: Any) -> bool:
    """Return True where a kernel can talk to a page, and the packages for that are installed."""
    kernel = getattr(shell, "kernel", None)
    # IPython in a terminal has no kernel; a kernel without comms cannot talk to a page.
    if kernel is None or getattr(kernel, "comm_manager", None) is None:
        return False
    return all(importlib.util.find_spec(name) for name in ("anywidget", "ipywidgets"))


def widget_classes() -> tuple[type[BoardWidget], type[RunningLine]]:
    """The classes of the board, and of the line above a running cell's output.

    Imported here and not above: anywidget is optional, and %load_ext would wait half a second. The
    first call takes as long as a board may take to appear.
    """
    from ddp_notebook.board.widget import BoardWidget, RunningLine

    return BoardWidget, RunningLine


@cache
def _are_loaded() -> bool:
    """Return True where widgets can be loaded; warn once where they cannot."""
    try:
        widget_classes()
    except Exception as error:  # noqa: BLE001  # of versions that do not fit each other, any
        warnings.warn(
            f"The board is shown without its widget, which cannot be loaded: {error!r}",
            stacklevel=2,
        )
        return False
    return True


def prepare_widgets(kernel: Any) -> None:
    """Have pages answered while cells run, and load what widgets need in the background."""
    handle = widget_messages(kernel)
    if handle is not None:
        do_meanwhile(handle)
    threading.Thread(target=_are_loaded, name="ddp-widgets", daemon=True).start()


def past_message(
    question: Mapping[str, Any],
    snapshot: Snapshot,
    collectives: Collectives,
    moment: Moment,
    epoch_ns: int,
) -> dict[str, Any]:
    """The board as it was when `snapshot` was the state, for the page that asked."""
    pending = snapshot.with_status(Status.RUNNING)
    board = replace(board_of(BoardFacts(snapshot, collectives, pending)), notes=())
    return {
        "kind": "past",
        "view": str(question.get("view", "")),
        "board": {**model.board_json(board, epoch_ns), "now": question["at"], "frozen": True},
        "findings": list(moment.findings),
        "locations": list(moment.locations),
    }


class ReplayBoard:
    """A saved run in the same widget, with nothing to press."""

    def __init__(self, replay: Replay, diagnosis: Diagnosis | None) -> None:
        saved = replay.saved
        self._replay, self._diagnosis = replay, diagnosis
        self._epoch_ns = saved.began_ns
        self._end_us = (saved.snapshot.taken_ns - self._epoch_ns) // 1000
        self._timeline = Timeline(self._epoch_ns, saved.world_size)
        issued = [record for each in saved.collectives.of.values() for record in each]
        records = of_run(issued, saved.left_ns)
        self._timeline.take(saved.run or 1, records, saved.script, saved.pauses)
        self._timeline.end(died_ns(saved.snapshot))
        self._timeline.end(saved.left_ns, FREED)
        board = board_of(replay.facts(diagnosis))
        named = replace(board, headline=f"{replay.name}: {board.headline}")
        shown = model.board_json(named, self._epoch_ns)
        shown["what"] = " · ".join(filter(None, (replay.name, shown["what"])))
        case = saved.case
        reports, sources = (case.ranks, case.sources) if case is not None else ((), {})
        raised = {report.rank: report.error.at for report in reports if report.error.at}
        paths = raised or {report.rank: report.path for report in reports if report.path}
        at = locations(paths, sources)
        findings, lines = model.findings_json(diagnosis), model.locations_json(at)
        self._still = still_picture.html(named, diagnosis, self._timeline)
        done_ns = (
            max(record.issued_ns, record.done_ns) for record in records if not record.call.freed
        )
        last_ns = max([0, *done_ns, *saved.left_ns.values()])
        self._found = Moment(last_ns, findings, lines)
        """The findings, which hold since ranks last issued a collective, were done with one by
        themselves, or left."""
        self.widget: BoardWidget = widget_classes()[0](
            self._on_message,
            board={
                **shown,
                "began": 0,
                "frozen": True,
                "now": self._end_us,
                "parted": parted(self._timeline, diagnosis),
            },
            findings=findings,
            locations=lines,
        )

    def picture(self) -> dict[str, str]:
        """Return the picture for pages without scripts, and the text."""
        texts = [mime_bundle(self._replay.status())["text/plain"]]
        if self._diagnosis is not None:
            texts.append(mime_bundle(self._diagnosis)["text/plain"])
        return self.widget.picture({"text/plain": "\n\n".join(texts), "text/html": self._still})

    def _on_message(self, content: Mapping[str, Any]) -> None:
        """Answer a page."""
        if content.get("kind") == "hello":
            self.widget.tell_whole(self._timeline.whole(), self._end_us)
        elif content.get("kind") == "at" and isinstance(content.get("at"), int):
            at_ns = self._epoch_ns + 1000 * int(content["at"])
            snapshot = self._replay.at(max(0, content["at"]) / 1e6).snapshot
            known = collectives_at(self._replay.collectives, at_ns)
            moment = self._found if at_ns >= self._found.at_ns else Moment()
            message = past_message(content, snapshot, known, moment, self._epoch_ns)
            self.widget.tell(message, content["at"])
