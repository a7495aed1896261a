"""Runs a training script on this rank, as `python script.py` would under torchrun.

It is `__main__`, with its own arguments, its own environment and its own folder first on the
path, none of which outlives it; its output, tracebacks and interrupts take the same ways as a
cell's. Afterwards cells see its variables under `main`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ddp_notebook.rank import control, state, torch_private
from ddp_notebook.rank.cells import runner as cells
from ddp_notebook.rank.cells import script_state
from ddp_notebook.rank.collectives import observer, pause
from ddp_notebook.rank.inspect import data_workers, frames, host
from ddp_notebook.rank.setup import rendezvous, sockets, subgroups
from ddp_notebook.rank.training import hooks


def run(
    cell: int,
    number: int,
    path: str,
    folder: str,
    arguments: Sequence[str],
    environments: Mapping[str, Mapping[str, str]],
    hosts: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    hold: bool = False,
) -> None:
    """Run the script at `path` to its end; reports through the beacon as a cell does.

    `folder` is the notebook's: relative paths mean there what they mean to torchrun.
    `environments` has for each rank what its environment must have; an empty value unsets.
    `hosts` has for a rank the host that its main thread is on meanwhile (see `place`). With `hold`
    it stops before each collective until it is stepped on.
    """
    runner = cells.attach()
    pause.begin(hold)
    control.attach(getattr(runner.shell, "kernel", None))
    rendezvous.watch()
    observer.attach()
    hooks.attach()
    data_workers.attach()
    frames.is_a_script(path)
    with runner.running(cell, number, path) as outcome, _as_main(path, arguments) as module:
        subgroups.before_all_are_forgotten()
        torch_private.forget_groups()
        sockets.setup_begins()
        rank = str(state.current.rank)
        _set_environment(environments[rank])
        runner.shell.user_ns["main"] = module
        try:
            os.chdir(folder)
            source = Path(path).read_bytes()
            with host.on(hosts.get(rank, {})):
                exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102
        except SystemExit as stop:
            outcome.error = _failed(stop)
        except BaseException as error:  # noqa: BLE001  # shown, and told to the session
            # The first frame is this one; the user's begins after it.
            trace = error.__traceback__
            outcome.error = error.with_traceback(trace.tb_next if trace is not None else None)
            runner.shell.showtraceback((type(error), error, error.__traceback__))


def _failed(stop: SystemExit) -> SystemExit | None:
    """`sys.exit()`, `sys.exit(0)` end a script well; anything else does not."""
    return None if stop.code in (None, 0) else stop


@contextlib.contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """A fresh `__main__`, with the script's arguments and folder, for the time it runs."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    folder = Path(path).parent
    main, argv = sys.modules["__main__"], list(sys.argv)
    with script_state.process(folder):
        sys.modules["__main__"] = module
        sys.argv[:] = [path, *arguments]
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
