"""The engine's own IPython, with our streams, displays, tracebacks and compiler.

A cell is compiled as one module code object, under a file name that is the same on all ranks and
with the notebook's own line numbers; magics, shell escapes, top-level `await` and tracebacks are
IPython's.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from IPython.core.error import UsageError

from ddp_notebook import syntax
from ddp_notebook.model import OutputKind
from ddp_notebook.rank import engine_private
from ddp_notebook.rank.cells import cell_ast, progress_bars
from ddp_notebook.rank.cells.output import OutputForwarder, RankStream, as_text
from ddp_notebook.rank.cells.raised import is_interrupt, shown, without_ours
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.inspect.frames import UserCode

_RESULT_NAME = "__ddp_result__"
_BEGIN_NAME = "__ddp_begin__"
_NAMES_TB = "use %tb to see"
_WITH_WINDOWS = ("gtk", "osx", "qt", "tk", "wx")


class RankShell(Component):
    """IPython's shell on this rank. While a run goes on, what it shows goes to the forwarder."""

    def __init__(
        self, shell: Any, forwarder: OutputForwarder, user_code: UserCode, debugger: Debugger
    ) -> None:
        self.shell = shell
        self.debugger = debugger
        self.forwarder = forwarder
        self._user_code = user_code
        self.file_name = ""
        """The number of the cell or script that runs, or ran last."""
        self.magic_line = ""
        self.interrupted_early = False
        """An interrupt came before the cell's own code began."""
        self._name_pending = False
        self._bare: deque[str] = deque()
        """The newest cells that define no function: nothing of these can run once they are over."""
        self._blank = 0
        """Empty lines that the cell begins with, and that IPython leaves out."""
        self._notice = ""
        """The line that says what the traceback being shown leaves out."""

    def attach(self) -> None:
        """Replace what the shell writes to, once."""
        # The process's own streams are our log file: what C code writes is found there.
        sys.stdout = RankStream(self.forwarder, OutputKind.STDOUT, sys.stdout, 1)
        sys.stderr = RankStream(self.forwarder, OutputKind.STDERR, sys.stderr, 2)
        self._replace_displays()
        self._replace_tracebacks()
        self._replace_compiler()
        enable: Callable[..., Any] = self.shell.enable_gui

        def enable_gui(gui: str | None = None) -> Any:
            # A window's event loop would run in place of the engine's, and the rank hear no more.
            if (gui or "").startswith(_WITH_WINDOWS):
                raise UsageError(f"A rank has no display for {gui!r}. Type: %matplotlib inline")
            return enable(gui)

        self.shell.enable_gui = enable_gui
        progress_bars.prefer_text()
        engine_private.have_no_prompt()
        engine_private.keep_no_tracebacks(self.shell)
        engine_private.keep_no_output(self.shell)
        for name, function in self._helpers():
            self.shell.user_ns_hidden[name] = None
            self.shell.user_ns[name] = function

    def prepare(self, number: int, file_name: str, magic_line: str, colors: str = "") -> None:
        """Something is about to run under this name, as ``In [number]``, with these `colors`."""
        if colors and colors != self.shell.colors:
            self.shell.colors = colors
        self.file_name = file_name
        self.magic_line = magic_line
        self._name_pending = True
        self.shell.execution_count = number
        self.interrupted_early = False
        engine_private.forget_inputs(self.shell)
        for name, function in self._helpers():  # the user may have deleted everything
            self.shell.user_ns.setdefault(name, function)

    def publish(self, names: Mapping[str, Any]) -> None:
        """Give the cells these names; `%who` does not list them."""
        self.shell.push(dict(names), interactive=False)

    def _helpers(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        """Called by a cell's own code."""
        return ((_RESULT_NAME, self.show_result), (_BEGIN_NAME, self.raise_early_interrupt))

    def raise_early_interrupt(self) -> None:
        """The first thing a cell's code does: an interrupt that came before it stops it here."""
        if self.interrupted_early:
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
            self.forwarder.show(what=OutputKind.RESULT, data=as_text(data), metadata=metadata)

    def _replace_displays(self) -> None:
        publisher = self.shell.display_pub
        publish, clear = publisher.publish, publisher.clear_output

        def forward(
            data: Mapping[str, Any],
            metadata: Mapping[str, Any] | None = None,
            *,
            transient: Mapping[str, Any] | None = None,
            update: bool = False,
            **more: Any,
        ) -> None:
            if not self.forwarder.cell:
                publish(data, metadata, transient=transient, update=update, **more)
                return
            self.forwarder.show(
                what=OutputKind.DISPLAY,
                data=as_text(data),
                metadata=dict(metadata or {}),
                display_id=(transient or {}).get("display_id", ""),
                update=update,
            )

        def forward_clear(wait: bool = False) -> None:
            if self.forwarder.cell:
                self.forwarder.show(what=OutputKind.CLEAR, update=wait)
            else:
                clear(wait)

        publisher.publish = forward
        publisher.clear_output = forward_clear

    def _replace_tracebacks(self) -> None:
        show, show_text = self.shell.showtraceback, self.shell._showtraceback

        def show_unless_interrupted(error: Any = None, *arguments: Any, **more: Any) -> None:
            # Making a traceback is most of the time that an interrupted cell takes to end.
            value = sys.exc_info()[1]
            if not self.forwarder.cell or value is None or not is_interrupt(value):
                kind, value, trace = error or sys.exc_info()
                trace, self._notice = without_ours(trace, self._user_code)
                show((kind, value, trace), *arguments, **more)

        def forward_traceback(etype: type[BaseException], value: BaseException, stb: Any) -> None:
            if not self.forwarder.cell:
                show_text(etype, value, stb)
                return
            self.shell._last_traceback = stb
            lines = [stb] if isinstance(stb, str) else list(stb)
            lines[-1:-1] = self._notice.splitlines()
            if isinstance(value, SystemExit):  # IPython names %tb, which has nothing here
                lines = [line for line in lines if _NAMES_TB not in line]
            self.forwarder.show(what=OutputKind.ERROR, text=shown("\n".join(lines)))

        self.shell.showtraceback = show_unless_interrupted
        self.shell._showtraceback = forward_traceback

    def _replace_compiler(self) -> None:
        compiler, run_nodes = self.shell.compile, self.shell.run_ast_nodes
        code_name: Callable[..., str] = compiler.get_code_name

        def get_code_name(raw_code: str, transformed: str, number: int) -> str:
            # Only the first code of a run is the cell. What that runs by `get_ipython().run_cell`
            # comes here too, and keeps IPython's names.
            if not self._name_pending:
                return code_name(raw_code, transformed, number)
            self._name_pending = False
            lines = raw_code.splitlines()
            self._blank = next((n for n, line in enumerate(lines) if line.strip()), 0)
            return self.file_name

        async def run_ast_nodes(
            nodelist: list[ast.stmt],
            cell_name: str,
            interactivity: str = "last_expr",
            compiler: Any = compile,
            result: Any = None,
        ) -> bool:
            raised: bool
            if cell_name != self.file_name:
                raised = await run_nodes(nodelist, cell_name, interactivity, compiler, result)
                return raised
            if not nodelist:
                return False
            module = cell_ast.as_module(nodelist, _RESULT_NAME)
            ast.increment_lineno(module, 1 + self._blank)
            lines = linecache.getlines(self.file_name)
            text = [f"{self.magic_line}\n", *["\n"] * self._blank, *lines]
            # Without a time (None) `linecache.checkcache` never drops the entry, though no such
            # file is there. The magic's own line comes first: lines are then numbered as in the
            # notebook.
            linecache.cache[self.file_name] = (sum(map(len, text)), None, text, self.file_name)
            self.debugger.begins(module, self.file_name)
            cell_ast.begin_with(module, _BEGIN_NAME)
            try:
                with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
                    code = compiler(module, self.file_name, "exec")
            except (SyntaxError, ValueError, OverflowError) as error:
                result.error_before_exec = error
                self.shell.showsyntaxerror()
                return True
            if not any(isinstance(value, CodeType) for value in code.co_consts):
                self._bare.append(self.file_name)
            while len(self._bare) > engine_private.INPUTS:
                linecache.cache.pop(self._bare.popleft(), None)
            is_async = bool(code.co_flags & inspect.CO_COROUTINE)
            raised = await self.shell.run_code(code, result, async_=is_async)
            return raised

        to_tree = compiler.ast_parse
        compiler.ast_parse = lambda *about, **named: syntax.alone(lambda: to_tree(*about, **named))
        compiler.get_code_name = get_code_name
        self.shell.run_ast_nodes = run_ast_nodes
