"""Runs a training script on this rank, as `python script.py` would under torchrun.

It is `__main__`, with its own arguments, its own environment and its own folder first on the
path, none of which outlives it; its output, tracebacks and interrupts take the same ways as a
cell's. Afterwards cells see its variables under `main`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType

from ddp_notebook.rank.boot import EngineProcess
from ddp_notebook.rank.calls import Script
from ddp_notebook.rank.cells import script_state
from ddp_notebook.rank.cells.runner import CellRunner
from ddp_notebook.rank.component import Lifecycle
from ddp_notebook.rank.debugger.debugger import Debugger
from ddp_notebook.rank.inspect import host
from ddp_notebook.rank.inspect.frames import UserCode


class ScriptRunner:
    """Runs scripts, in the way that `runner` runs cells."""

    def __init__(
        self,
        engine: EngineProcess,
        life: Lifecycle,
        runner: CellRunner,
        user_code: UserCode,
        debugger: Debugger,
    ) -> None:
        self._engine = engine
        self._life = life
        self._runner = runner
        self._user_code = user_code
        self._debugger = debugger

    def _compiled(self, source: bytes, path: str) -> CodeType:
        tree = self._debugger.compiled(ast.parse(source, path), path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        self._debugger.was_compiled(code)
        return code

    def run(self, script: Script) -> None:
        """Run a script to its end; reports as a cell does."""
        runner, path, rank = self._runner, script.path, self._engine.process.rank
        shell = runner.shell.shell
        self._user_code.add_script(path)
        main = _as_main(script, self._engine.modules)
        with runner.running(script, path) as outcome, main as module:
            # A script makes its own process group, as a new process does.
            self._life.setup_begins()
            _set_environment(script.environments[rank])
            shell.user_ns["main"] = module
            try:
                os.chdir(script.folder)
                source = Path(path).read_bytes()
                with host.on(script.hosts.get(rank, {})):
                    exec(self._compiled(source, path), vars(module))  # noqa: S102
            except SystemExit as stop:
                outcome.error = _failed(stop)
            except BaseException as error:  # noqa: BLE001  # shown, and told to the session
                # The first frame is this one; the user's begins after it.
                trace = error.__traceback__
                outcome.error = error.with_traceback(trace.tb_next if trace is not None else None)
                shell.showtraceback((type(error), error, error.__traceback__))
                runner.stop_at(outcome.error)


def _failed(stop: SystemExit) -> SystemExit | None:
    """`sys.exit()`, `sys.exit(0)` end a script well; anything else does not."""
    return None if stop.code in (None, 0) else stop


@contextlib.contextmanager
def _as_main(script: Script, loaded_before: frozenset[str]) -> Iterator[types.ModuleType]:
    """A fresh `__main__`, with the script's arguments and folder, for the time it runs."""
    module = types.ModuleType("__main__")
    module.__file__ = script.path
    module.__dict__["__builtins__"] = __builtins__
    folder = Path(script.path).parent
    if script.package is not None:
        module.__package__ = script.package
        folder = Path(script.folder)
    main, argv = sys.modules["__main__"], list(sys.argv)
    with script_state.process(folder, loaded_before):
        sys.modules["__main__"] = module
        sys.argv[:] = [script.path, *script.arguments]
        sys.path.insert(0, str(folder))
        try:
            yield module
        finally:
            sys.modules["__main__"], sys.argv[:] = main, argv


def _set_environment(values: Mapping[str, str]) -> None:
    """Set variables for the script; an empty value unsets."""
    for name, value in values.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
