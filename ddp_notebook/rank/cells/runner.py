"""Runs a cell on this rank, by the engine's own IPython.

The cell is one module code object, under a file name that is the same on all ranks and
with the notebook's own line numbers; magics, shell escapes, top-level `await` and
tracebacks are IPython's. Everything it prints and displays goes through the relay.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from IPython.core.getipython import get_ipython

from ddp_notebook.model import CellFinished, CellStarted, OutputKind
from ddp_notebook.rank import boot, engine_private, events, state
from ddp_notebook.rank.cells import cell_ast, progress_bars
from ddp_notebook.rank.cells.output import RankStream, Relay, as_text
from ddp_notebook.rank.collectives import observer, pause
from ddp_notebook.rank.inspect import data_workers, frames
from ddp_notebook.rank.setup import rendezvous
from ddp_notebook.rank.training import data_parallel, hooks

_RESULT_NAME = "__ddp_result__"
_BEGIN_NAME = "__ddp_begin__"


@dataclass
class Outcome:
    """How what ran ended: well, unless there is an error."""

    error: BaseException | None = None


class CellRunner:
    """The rank's shell with our ends put to its streams, displays, results and tracebacks."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.voice = events.current()
        self.relay = Relay(self.voice, boot.log_file(), boot.spool_folder())
        self.file_name = ""
        self.magic_line = ""
        self._name_pending = False
        self._interrupted_early = False
        self._replace_streams()
        self._replace_displays()
        self._replace_compiler()
        progress_bars.prefer_text()
        engine_private.keep_quiet(getattr(shell, "kernel", None))
        engine_private.keep_no_tracebacks(shell)
        for name, function in self._helpers():
            shell.user_ns_hidden[name] = None
            shell.user_ns[name] = function
        self.voice.collect = self.relay.collect
        self.voice.pulse = self.pulse
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self.interrupt_again
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_child_alone)

    def _helpers(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        """What a cell's own code calls."""
        return ((_RESULT_NAME, self.show_result), (_BEGIN_NAME, self.raise_early_interrupt))

    # -- what the shell calls ---------------------------------------------------------

    def _replace_streams(self) -> None:
        # The process's own streams are our log file: what C code writes is found there.
        sys.stdout = RankStream(self.relay, OutputKind.STDOUT, sys.stdout, 1)
        sys.stderr = RankStream(self.relay, OutputKind.STDERR, sys.stderr, 2)

    def _replace_displays(self) -> None:
        publisher = self.shell.display_pub
        publish, clear = publisher.publish, publisher.clear_output

        def relay_publish(
            data: Mapping[str, Any],
            metadata: Mapping[str, Any] | None = None,
            *,
            transient: Mapping[str, Any] | None = None,
            update: bool = False,
            **more: Any,
        ) -> None:
            if not self.relay.cell:
                publish(data, metadata, transient=transient, update=update, **more)
                return
            self.relay.show(
                what=OutputKind.DISPLAY,
                data=as_text(data),
                metadata=dict(metadata or {}),
                display_id=(transient or {}).get("display_id", ""),
                update=update,
            )

        def relay_clear(wait: bool = False) -> None:
            if self.relay.cell:
                self.relay.show(what=OutputKind.CLEAR, update=wait)
            else:
                clear(wait)

        publisher.publish = relay_publish
        publisher.clear_output = relay_clear
        self._replace_tracebacks()

    def _replace_tracebacks(self) -> None:
        show, show_text = self.shell.showtraceback, self.shell._showtraceback

        def show_unless_interrupted(*arguments: Any, **more: Any) -> None:
            # Making a traceback is most of the time that an interrupted cell takes to end.
            value = sys.exc_info()[1]
            if not self.relay.cell or value is None or not _is_interrupt(value):
                show(*arguments, **more)

        def relay_traceback(etype: type[BaseException], value: BaseException, stb: Any) -> None:
            if not self.relay.cell:
                show_text(etype, value, stb)
                return
            self.shell._last_traceback = stb
            lines = [stb] if isinstance(stb, str) else stb
            self.relay.show(what=OutputKind.ERROR, text="\n".join(lines))

        self.shell.showtraceback = show_unless_interrupted
        self.shell._showtraceback = relay_traceback

    def _replace_compiler(self) -> None:
        compiler, run_nodes = self.shell.compile, self.shell.run_ast_nodes
        code_name: Callable[..., str] = compiler.get_code_name

        def get_code_name(raw_code: str, transformed: str, number: int) -> str:
            if not self._name_pending:
                return code_name(raw_code, transformed, number)
            self._name_pending = False
            return self.file_name

        async def run_ast_nodes(
            nodelist: list[ast.stmt],
            cell_name: str,
            interactivity: str = "last_expr",
            compiler: Any = compile,
            result: Any = None,
        ) -> bool:
            if cell_name != self.file_name:
                raised: bool = await run_nodes(nodelist, cell_name, interactivity, compiler, result)
                return raised
            return await self._run_as_module(nodelist, compiler, result)

        compiler.get_code_name = get_code_name
        self.shell.run_ast_nodes = run_ast_nodes

    async def _run_as_module(self, nodes: list[ast.stmt], compiler: Any, result: Any) -> bool:
        if not nodes:
            return False
        module = cell_ast.as_module(nodes, _BEGIN_NAME, _RESULT_NAME)
        ast.increment_lineno(module, 1)
        lines = linecache.getlines(self.file_name)
        text = [f"{self.magic_line}\n", *lines]
        linecache.cache[self.file_name] = (sum(map(len, text)), None, text, self.file_name)
        try:
            with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
                code = compiler(module, self.file_name, "exec")
        except (SyntaxError, ValueError, OverflowError) as error:
            result.error_before_exec = error
            self.shell.showsyntaxerror()
            return True
        is_async = bool(code.co_flags & inspect.CO_COROUTINE)
        raised: bool = await self.shell.run_code(code, result, async_=is_async)
        return raised

    def interrupt(self, _: int, frame: FrameType | None) -> None:
        """SIGINT: raise in the cell's own code, and nowhere else.

        Around it IPython swallows a KeyboardInterrupt; after it there is nothing to stop. Workers
        of a DataLoader that it waits for end with it, as they do where Ctrl-C reaches them.
        """
        data_workers.end(frames.frames_of(frame))
        while frame is not None:
            if frame.f_code.co_filename == self.file_name:
                raise KeyboardInterrupt
            frame = frame.f_back
        self._interrupted_early = True

    def raise_early_interrupt(self) -> None:
        """The first thing a cell's code does: an interrupt that came before it stops it here."""
        if self._interrupted_early:
            raise KeyboardInterrupt

    def show_result(self, value: Any) -> None:
        """The value of a cell's last expression."""
        hook = self.shell.displayhook
        if value is None or hook.quiet():
            return
        data, metadata = self.shell.display_formatter.format(value)
        hook.update_user_ns(value)
        hook.fill_exec_result(value)
        if data:
            self.relay.show(what=OutputKind.RESULT, data=as_text(data), metadata=metadata)

    # -- running ------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(
        self, cell: int, number: int, file_name: str, magic_line: str = ""
    ) -> Iterator[Outcome]:
        """Within, a cell or a script runs; an interrupt stops it, and only it."""
        outcome = Outcome()
        previous = signal.signal(signal.SIGINT, self.interrupt)
        try:
            self.begin(cell, number, file_name, magic_line)
            yield outcome
        except KeyboardInterrupt as interrupt:  # it came while IPython handled an error
            outcome.error = interrupt
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.end(cell, outcome.error)
            signal.signal(signal.SIGINT, previous)

    def begin(self, cell: int, number: int, file_name: str, magic_line: str) -> None:
        """A cell starts: cell `cell` of the session, whose prompt is ``In [number]``."""
        self.file_name = file_name
        self.magic_line = magic_line
        self._name_pending = True
        self.shell.execution_count = number
        self._interrupted_early = False
        state.current.give_up.clear()
        for name, function in self._helpers():
            self.shell.user_ns.setdefault(name, function)
        self.relay.begin(cell)
        state.current.running, state.current.error = True, None
        if not state.current.held:  # else the set-up that is stepped through goes on after it
            rendezvous.begin_run()
        observer.observer.begin(cell)
        hooks.begin()
        self.voice.emit_now(CellStarted, cell=cell, number=number)

    def end(self, cell: int, error: BaseException | None) -> None:
        """The cell is over: say how."""
        withheld = self.relay.end()
        observer.observer.settle()
        pause.begin(False)
        state.current.running = False
        if error is not None:
            cause = data_parallel.parallels.cause_of(error)
            state.current.error = state.Failure(type(error).__name__, str(error)[:2000], *cause)
        outcome = "ok"
        if error is not None:
            outcome = "interrupted" if _is_interrupt(error) else "error"
        self.voice.emit_now(
            CellFinished,
            cell=cell,
            outcome=outcome,
            ename=type(error).__name__ if error is not None else "",
            evalue=str(error)[:2000] if error is not None else "",
            line=self._line_of(error),
            withheld_bytes=withheld,
            trained=hooks.happened(),
        )

    def _line_of(self, error: BaseException | None) -> int:
        """The last line of the cell itself that `error` passed through; 0 for none."""
        line, trace = 0, error.__traceback__ if error is not None else None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file_name:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def interrupt_again(self, unraisable: Any) -> None:
        """Python swallowed an exception in a callback; an interrupt is made up for."""
        if self.relay.cell and issubclass(unraisable.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            self._unraisable(unraisable)

    def pulse(self) -> dict[str, Any]:
        """The fields of a sign of life."""
        observer.observer.settle()
        doing = state.current.doing
        if self.relay.cell:
            doing = frames.describe_main_thread() or frames.describe_task(_task)
        return {
            "doing": doing,
            "cell": self.relay.cell,
            "withheld_bytes": self.relay.withheld_bytes,
        }

    def _leave_child_alone(self) -> None:
        """In a forked child: it is a worker of the user's, not a rank."""
        self.relay.cell = 0
        self.relay.forked = True


_runner: CellRunner | None = None
_task: asyncio.Task[None] | None = None


def attach() -> CellRunner:
    """Put our ends to this rank's shell, once."""
    global _runner
    if _runner is None:
        _runner = CellRunner(get_ipython())
    return _runner


def publish(**names: Any) -> None:
    """Give the cells these names; `%who` does not list them."""
    attach().shell.push(names, interactive=False)


def run(cell: int, number: int, magic_line: str, source: str, hold: bool = False) -> None:
    """Run a cell without top-level `await`, to its end; reports through the beacon.

    With `hold` it stops before each collective until it is stepped on.
    """
    runner = attach()
    pause.begin(hold)
    with runner.running(cell, number, frames.cell_file(number), magic_line) as outcome:
        result = runner.shell.run_cell(source, store_history=True)
        outcome.error = _error_of(result)


def start_async(cell: int, number: int, magic_line: str, source: str, hold: bool = False) -> None:
    """Start a cell with top-level `await` in the engine's own loop; returns at once.

    ipykernel 7.4 cannot do it in an ipyparallel engine (it looks for a thread of its own).
    """
    global _task
    pause.begin(hold)
    _task = asyncio.get_running_loop().create_task(_run_async(cell, number, magic_line, source))


async def _run_async(cell: int, number: int, magic_line: str, source: str) -> None:
    runner = attach()
    shell = runner.shell
    error: BaseException | None = None
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        assert task is not None
        if asyncio.current_task(loop) is task:
            runner.interrupt(number, frame)
            return
        loop.call_soon_threadsafe(task.cancel)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        runner.begin(cell, number, frames.cell_file(number), magic_line)
        result = await shell.run_cell_async(
            source, store_history=True, transformed_cell=shell.transform_cell(source)
        )
        error = _error_of(result)
    except (asyncio.CancelledError, KeyboardInterrupt) as stopped:
        error = stopped
    finally:
        signal.signal(signal.SIGINT, previous)
        shell.events.trigger("post_execute")
        runner.end(cell, error)


def awaiting() -> asyncio.Task[None] | None:
    """The last cell with top-level `await`; it may be over."""
    return _task


def _error_of(result: Any) -> BaseException | None:
    """The error in IPython's result of a cell."""
    if result.success:
        return None
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "CancelledError"
