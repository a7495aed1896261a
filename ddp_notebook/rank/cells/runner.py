"""Runs cells on this rank, in the engine's own IPython, and reports how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from types import FrameType

from ddp_notebook.model import CellStarted
from ddp_notebook.rank import gpu
from ddp_notebook.rank.calls import Cell
from ddp_notebook.rank.cells.ending import Ending
from ddp_notebook.rank.cells.on_cpu import cuda_on_cpu
from ddp_notebook.rank.cells.shell import RankShell
from ddp_notebook.rank.collectives.observer import Observer
from ddp_notebook.rank.component import Lifecycle, Run
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.inspect import data_workers
from ddp_notebook.rank.inspect.frames import cell_file
from ddp_notebook.rank.inspect.frames import frames_of as frames_of_stack
from ddp_notebook.rank.main_thread import Aborted, MainThread


class CellRunner:
    """Runs what the session sends, one after the other, and reports its begin and end."""

    def __init__(
        self,
        life: Lifecycle,
        shell: RankShell,
        events: EventSender,
        main_thread: MainThread,
        ending: Ending,
        observer: Observer,
    ) -> None:
        self.shell = shell
        self._life = life
        self._events = events
        self._main_thread = main_thread
        self._ending = ending
        self._observer = observer

    def run(self, cell: Cell) -> None:
        """Run a cell without top-level `await`, to its end. An interrupt stops it, and only it."""
        error: BaseException | None = None
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._begin(cell)
            result = self.shell.shell.run_cell(cell.source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            self._ending.stop_at(error)
            if error is None:
                gpu.await_work(self._main_thread.awaits_gpu)
        except (KeyboardInterrupt, Exception) as raised:  # noqa: BLE001
            # An interrupt came while IPython handled an error; or IPython itself failed, which the
            # user's code can bring about. Or `_begin` refused the cell.
            error = raised
        finally:
            # From here on an interrupt would hit the report of the end, and the session would wait
            # for this rank forever. One that comes before the handler is replaced is dropped: the
            # cell is over.
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._end(cell.cell, error)
            signal.signal(signal.SIGINT, previous)

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
            # While the cell's own code runs, the interrupt is raised in it as in any cell. While it
            # awaits, the loop runs: an error raised there would end the engine, so the loop cancels
            # the task itself.
            if asyncio.current_task(loop) is task:
                self._interrupt(number, frame)
                return
            loop.call_soon_threadsafe(task.cancel)

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            self._begin(cell)
            result = await shell.run_cell_async(
                cell.source, store_history=True, transformed_cell=shell.transform_cell(cell.source)
            )
            error = result.error_before_exec or result.error_in_exec
            self._ending.stop_at(error)
            if error is None:
                gpu.await_work(self._main_thread.awaits_gpu)
        except (asyncio.CancelledError, KeyboardInterrupt, Aborted, gpu.StillWorking) as stopped:
            error = stopped
        finally:
            signal.signal(signal.SIGINT, previous)
            shell.events.trigger("post_execute")
            self._end(cell.cell, error)

    def _begin(self, cell: Cell) -> None:
        self.shell.prepare(cell.number, cell_file(cell.number), cell.magic_line, cell.colors)
        self._life.run_begins(Run(cell.cell, cell.paused, cell.ledger))
        if cell.as_gpus:
            cuda_on_cpu.begin(cell.as_gpus)
        # From this thread: to wake the sending one would take longer than a short cell does.
        self._events.emit_now(CellStarted, cell=cell.cell, number=cell.number)
        if self._observer.is_blocked_since_before and gpu.is_working():
            raise gpu.StillWorking(
                "the GPU is still working on a collective of an earlier cell, and this cell would "
                "wait behind it. Free the rank: %ddp_abort"
            )

    def _end(self, cell: int, error: BaseException | None) -> None:
        """It is over: say how."""
        cuda_on_cpu.end()
        self._ending.say(cell, error, self.shell.file_name, self._life.run_ends, in_cell=True)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """SIGINT: raise in the cell's own code, and nowhere else.

        Around it IPython swallows a KeyboardInterrupt; after it there is nothing to stop. Workers
        of a DataLoader that it waits for end with it, as they do where Ctrl-C reaches them.
        """
        data_workers.end(frames_of_stack(frame))
        stop = self.shell.debugger.stopped
        anywhere = self._main_thread.gpu_works or (stop is not None and bool(stop.over))
        while frame is not None:
            if anywhere or frame.f_code.co_filename == self.shell.file_name:
                raise KeyboardInterrupt
            frame = frame.f_back
        self.shell.interrupted_early = True
