"""A wait for the end of a run on a thread of its own, while the notebook is free."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from ddp_notebook.session.runs.controller import RunController, RunState
from ddp_notebook.session.runs.run import CellResult, CellRun


class Detached:
    """A run whose end a thread of its own waits for."""

    def __init__(self, controller: RunController) -> None:
        self.controller = controller
        self.ended: Future[CellResult] = Future()
        """How it ended; also with ranks in it, when these make no progress by themselves."""
        self.reported = False
        """The user has seen how it ended."""
        self._stop = threading.Event()
        controller.watch()
        threading.Thread(target=self._work, name="ddp-detached", daemon=True).start()

    @property
    def run(self) -> CellRun:
        """The run."""
        return self.controller.run

    @property
    def left_with_ranks(self) -> bool:
        """True when it ended with ranks in it: they may have made progress since, or been freed."""
        if not self.ended.done() or self.ended.exception() is not None:
            return False
        states = (RunState.STUCK, RunState.INTERRUPTED)
        return self.controller.state in states and bool(self.ended.result().pending)

    def stop(self) -> None:
        """Interrupt it, as an interrupt of the notebook does with a cell that it waits for."""
        self._stop.set()

    def _work(self) -> None:
        try:
            result = self.controller.see_through(self._stop.is_set)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.ended.set_exception(error)
        else:
            self.ended.set_result(result)
