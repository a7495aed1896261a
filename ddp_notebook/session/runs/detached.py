"""Waits for the end of a run on its own thread, while the notebook stays usable."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ddp_notebook.session.runs.controller import RunController, RunState
from ddp_notebook.session.runs.run import CellResult, CellRun


class Detached:
    """A run with its own waiting thread."""

    def __init__(self, controller: RunController, *, by_user: bool = False) -> None:
        self.controller = controller
        self.by_user = by_user
        """The user asked for it; otherwise it paused, or had been left."""
        self.ended: Future[CellResult] = Future()
        """The result; also with ranks still in the run if they cannot make progress."""
        self.reported = False
        """The result was shown to the user."""
        self._stop = threading.Event()
        controller.watch()
        threading.Thread(target=self._work, name="ddp-detached", daemon=True).start()

    @property
    def run(self) -> CellRun:
        """The run."""
        return self.controller.run

    @property
    def left_with_ranks(self) -> bool:
        """True if it ended with ranks in it, which may have made progress or been freed since."""
        if not self.ended.done() or self.ended.exception() is not None:
            return False
        states = (RunState.STUCK, RunState.INTERRUPTED)
        return self.controller.state in states and bool(self.ended.result().pending)

    def stop(self) -> None:
        """Interrupt the run, as interrupting the notebook does for a cell in the foreground."""
        self._stop.set()

    def _work(self) -> None:
        try:
            result = self.controller.see_through(self._stop.is_set)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.ended.set_exception(error)
        else:
            self.ended.set_result(result)
