"""Runs cells on this rank, by the engine's own IPython, and says how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ddp_notebook.model import CellFinished, CellStarted, Frame
from ddp_notebook.rank.calls import Cell, Script
from ddp_notebook.rank.cells import raised
from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.cells.shell import RankShell, is_interrupt
from ddp_notebook.rank.component import Component, Lifecycle, Run
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.inspect import data_workers
from ddp_notebook.rank.inspect.frames import UserCode, cell_file
from ddp_notebook.rank.inspect.frames import frames_of as frames_of_stack
from ddp_notebook.rank.main_thread import Failure, MainThread
from ddp_notebook.rank.training.data_parallel import DataParallelTracking
from ddp_notebook.rank.training.hooks import TrainingHooks


@dataclass
class Outcome:
    """How what ran ended: well, unless there is an error."""

    error: BaseException | None = None


class CellRunner:
    """Runs what the session sends, one after the other, and reports its begin and end."""

    def __init__(
        self,
        life: Lifecycle,
        shell: RankShell,
        forwarder: OutputForwarder,
        events: EventSender,
        main_thread: MainThread,
        hooks: TrainingHooks,
        data_parallel: DataParallelTracking,
        user_code: UserCode,
    ) -> None:
        self.shell = shell
        self._life = life
        self._forwarder = forwarder
        self._events = events
        self._main_thread = main_thread
        self._hooks = hooks
        self._data_parallel = data_parallel
        self._user_code = user_code

    def run(self, cell: Cell) -> None:
        """Run a cell without top-level `await`, to its end."""
        with self.running(cell, cell_file(cell.number), cell.magic_line) as outcome:
            result = self.shell.shell.run_cell(cell.source, store_history=True)
            outcome.error = _error_of(result)
            self.stop_at(outcome.error)

    def start(self, cell: Cell) -> None:
        """Start a cell with top-level `await` in the engine's own loop; returns at once.

        ipykernel 7.4 cannot do it in an ipyparallel engine (it looks for a thread of its own).
        """
        loop = asyncio.get_running_loop()
        self._main_thread.task = loop.create_task(self._run_async(cell))

    async def _run_async(self, cell: Cell) -> None:
        shell = self.shell.shell
        error: BaseException | None = None
        task, loop = asyncio.current_task(), asyncio.get_running_loop()

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            assert task is not None
            if asyncio.current_task(loop) is task:
                self._interrupt(number, frame)
                return
            loop.call_soon_threadsafe(task.cancel)

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            self._begin(cell, cell_file(cell.number), cell.magic_line)
            result = await shell.run_cell_async(
                cell.source, store_history=True, transformed_cell=shell.transform_cell(cell.source)
            )
            error = _error_of(result)
            self.stop_at(error)
        except (asyncio.CancelledError, KeyboardInterrupt) as stopped:
            error = stopped
        finally:
            signal.signal(signal.SIGINT, previous)
            shell.events.trigger("post_execute")
            self._end(cell.cell, error)

    def stop_at(self, error: BaseException | None) -> None:
        """What runs is about to end with `error`: the debugger may stop here before."""
        if error is not None and not is_interrupt(error):
            self._keep(error)
            self.shell.debugger.raised(error)

    @contextlib.contextmanager
    def running(
        self, run: Cell | Script, file_name: str, magic_line: str = ""
    ) -> Iterator[Outcome]:
        """Within, a cell or a script runs; an interrupt stops it, and only it."""
        outcome = Outcome()
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._begin(run, file_name, magic_line)
            yield outcome
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001
            # An interrupt came while IPython handled an error; or IPython itself failed, which the
            # user's code can bring about.
            outcome.error = error
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._end(run.cell, outcome.error)
            signal.signal(signal.SIGINT, previous)

    def _begin(self, run: Cell | Script, file_name: str, magic_line: str) -> None:
        self.shell.prepare(run.number, file_name, magic_line)
        self._life.run_begins(Run(run.cell, run.paused))
        # From this thread: to wake the sending one would take longer than a short cell does.
        self._events.emit_now(CellStarted, cell=run.cell, number=run.number)

    def _end(self, cell: int, error: BaseException | None) -> None:
        """It is over: say how. Where that cannot be said any more, the process ends."""
        try:
            self._life.run_ends()
            how = self._how(error)
        except Exception as broken:  # noqa: BLE001  # the user's code replaced what that needs
            how = {"outcome": "error", "ename": type(broken).__name__, "evalue": str(broken)}
        try:
            self._events.emit_now(CellFinished, cell=cell, **how)
        except Exception:  # noqa: BLE001  # silent, the session would wait for this rank for ever
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)

    def _how(self, error: BaseException | None) -> dict[str, Any]:
        """How it ended, as fields of `CellFinished`."""
        outcome, name, text = "ok", "", ""
        frames: tuple[Frame, ...] = ()
        if error is not None:
            outcome = "interrupted" if is_interrupt(error) else "error"
            failure = self._keep(error)
            name, text, frames = failure.type, failure.text, failure.frames
        return {
            "outcome": outcome,
            "ename": name,
            "evalue": text,
            "line": self._line_of(error),
            "path": tuple(map(raised.place_of, frames)),
            "withheld_bytes": self._forwarder.withheld_bytes,
            "trained": self._hooks.trained(),
        }

    def _keep(self, error: BaseException) -> Failure:
        """How what runs failed, for whoever asks before something runs again."""
        failure = Failure(
            type(error).__name__,
            raised.message_of(error),
            *self._data_parallel.cause_of(error),
            frames=raised.frames_of(error, self._user_code),
            trace=error.__traceback__,
        )
        self._main_thread.error = failure
        return failure

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """SIGINT: raise in the cell's own code, and nowhere else.

        Around it IPython swallows a KeyboardInterrupt; after it there is nothing to stop. Workers
        of a DataLoader that it waits for end with it, as they do where Ctrl-C reaches them.
        """
        data_workers.end(frames_of_stack(frame))
        stop = self.shell.debugger.stopped
        at_error = stop is not None and bool(stop.over)
        while frame is not None:
            if at_error or frame.f_code.co_filename == self.shell.file_name:
                raise KeyboardInterrupt
            frame = frame.f_back
        self.shell.interrupted_early = True

    def _line_of(self, error: BaseException | None) -> int:
        """The last line of the cell itself that `error` passed through; 0 for none."""
        line, trace = 0, error.__traceback__ if error is not None else None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.shell.file_name:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line


class LostInterrupts(Component):
    """Python swallows a KeyboardInterrupt in a callback (a `__del__`); it is raised once more."""

    def __init__(self, forwarder: OutputForwarder) -> None:
        self._forwarder = forwarder

    def attach(self) -> None:
        """Look at what Python cannot raise."""
        others = sys.unraisablehook

        def interrupt_again(unraisable: Any) -> None:
            if self._forwarder.cell and issubclass(unraisable.exc_type, KeyboardInterrupt):
                again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
                again.daemon = True
                again.start()
            else:
                others(unraisable)

        sys.unraisablehook = interrupt_again


def _error_of(result: Any) -> BaseException | None:
    """The error in IPython's result of a cell."""
    if result.success:
        return None
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error
