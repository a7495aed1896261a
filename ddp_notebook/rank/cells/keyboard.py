"""Replaces the keyboard that no rank has: signals for Ctrl-C, answers for debuggers and input."""

from __future__ import annotations

import bdb
import builtins
import functools
import getpass
import os
import pdb
import signal
import sys
import threading
from typing import Any, NoReturn

from ddp_notebook.rank.cells.output import OutputForwarder
from ddp_notebook.rank.component import Component, Run
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.inspect import frames
from ddp_notebook.rank.inspect.stacks import variables_of

_LOOK = "To stop there: breakpoint()"
_IN_A_CHILD = (
    "It is in a process that the rank started, such as a DataLoader's worker. To stop there: "
    "DataLoader(num_workers=0)"
)
_OUTSIDE = "No cell or script runs on this rank"
_ASIDE = "An expression that is evaluated stops nowhere"


class NoKeyboard(EOFError):
    """`input()` or `getpass()` on a rank; an EOFError, as without a terminal."""


class Keyboard(Component):
    """Answers requests for user input in place of a person, and continues if possible."""

    def __init__(self, user_code: frames.UserCode, debugger: Debugger) -> None:
        self._debugger = debugger
        self._pid = os.getpid()
        self._user_code = user_code
        self._told: set[tuple[str, int]] = set()
        """The calls of this run that were answered: one in a loop is answered once."""

    def attach(self) -> None:
        """Replace what asks."""

        def breakpoint_hook(*_: object, **__: object) -> None:
            if os.environ.get("PYTHONBREAKPOINT") != "0":
                self.stop("breakpoint()")

        def set_trace(*_: object, **__: object) -> None:
            self.stop("set_trace()")

        def command_loop(debugger: pdb.Pdb, *_: object, **__: object) -> None:
            self.on_commands(debugger)
            debugger.set_continue()

        def embed(*_: object, **__: object) -> None:
            self.stop("IPython.embed()")

        sys.breakpointhook = breakpoint_hook
        # Every debugger of Python's and IPython's is one of these, and so is torch's.
        bdb.Bdb.set_trace = set_trace  # type: ignore[method-assign]
        pdb.Pdb.cmdloop = command_loop  # type: ignore[method-assign, assignment]
        # Only where it is loaded: a script need not have it.
        for name in ("IPython", "IPython.terminal.embed"):
            if module := sys.modules.get(name):
                module.embed = embed  # type: ignore[attr-defined]
        builtins.input = functools.partial(_refuse, "input")
        getpass.getpass = functools.partial(_refuse, "getpass")

    def run_begins(self, run: Run) -> None:
        """Earlier answers belong to the previous run."""
        self._told.clear()

    def stop(self, why: str) -> None:
        """Stop at the caller's line, as it asked for; or say why it cannot be."""
        in_child = os.getpid() != self._pid
        stopped = self._debugger.on_breakpoint(sys._getframe(1), why)
        if not stopped and (self._debugger.enabled or in_child):
            outside = _ASIDE if self._debugger.is_aside else _OUTSIDE
            instead = _IN_A_CHILD if in_child else outside
            self.say_once(f"{why} did not stop, and the code continued.", f"{instead}.")

    def on_commands(self, debugger: pdb.Pdb) -> None:
        """A debugger has shown a line and was to read commands: it shows the variables there."""
        before = [frame for frame, _ in debugger.stack[: debugger.curindex + 1]]
        users = [frame for frame in before if self._user_code.is_users(frame.f_code.co_filename)]
        for frame in (users or before)[-1:]:
            debugger.message(f"Variables at {self._user_code.describe(frame)}:")
            for local in variables_of(frame, keep=True):
                debugger.message(f"  {local.name} = {local.text}")
        instead = "" if sys.gettrace() is None else f"{_LOOK}."
        self.say_once("A debugger cannot ask for commands on a rank.", instead)

    def say_once(self, what: str, instead: str) -> None:
        """Print a line, once for each line of the user's that leads here."""
        frame, _ = self._user_code.innermost(frames.frames_of(sys._getframe(1)))
        line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._told:
            self._told.add(line)
            where = f" ({self._user_code.describe(frame)})" if frame is not None else ""
            say(f"{what.removesuffix('.')}{where}. {instead}".rstrip())


class LostInterrupts(Component):
    """Python swallows a KeyboardInterrupt in a callback (a `__del__`); it is raised again."""

    def __init__(self, forwarder: OutputForwarder) -> None:
        self._forwarder = forwarder

    def attach(self) -> None:
        """Look at what Python cannot raise."""
        others = sys.unraisablehook

        def interrupt_again(unraisable: Any) -> None:
            if self._forwarder.cell and issubclass(unraisable.exc_type, KeyboardInterrupt):
                # A moment later: raised here at once, it would come up in the same callback, and be
                # swallowed again.
                again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
                again.daemon = True
                again.start()
            else:
                others(unraisable)

        sys.unraisablehook = interrupt_again


def say(text: str) -> None:
    """Tell the user, on stderr."""
    sys.stderr.write(f"{text}\n")


def _refuse(function: str, *_: object, **__: object) -> NoReturn:
    raise NoKeyboard(
        f"a rank has no keyboard, so {function}() cannot ask there. Ask in a cell without %%ddp, "
        f"answer = {function}(), and send it: %ddp_push answer. Give a script arguments instead"
    )
