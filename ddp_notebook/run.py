"""`python -m ddp_notebook.run train.py`: runs a script as a prepared rank, without torch's hook.

With TORCH_DEVICE_BACKEND_AUTOLOAD=0, or an installation that has no entry points, DDP_NOTEBOOK=1
does nothing. This does the same, for the script as Python would run it: also by `torchrun -m
ddp_notebook.run train.py`. Processes that the script itself starts have the variable alone.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from ddp_notebook.launch.child import load

USAGE = "usage: python -m ddp_notebook.run train.py [args]   or   … -m package.train [args]"
WRONG_USAGE = 3
_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def main(arguments: Sequence[str]) -> int:
    """Run a script, or with -m a module, as `python` does; its exit code, or of wrong usage."""
    as_module = arguments[:1] == ["-m"]
    rest = list(arguments[1:] if as_module else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        return 0 if rest else WRONG_USAGE
    if not as_module and not Path(rest[0]).is_file():
        sys.stderr.write(f"ddp_notebook.run: there is no file {rest[0]}\n{USAGE}\n")
        return WRONG_USAGE
    sys.argv[:] = rest
    # As torch's entry point does when the variable is set.
    os.environ["DDP_NOTEBOOK"] = "1"
    with contextlib.suppress(Exception):  # no torch, or an unknown one: the script runs as ever
        load("ddp_notebook.autoload").load()
    try:
        if as_module:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            # As the main module, which it stays until Python ends.
            path = Path(rest[0]).absolute()  # as Python names it: a script may change its folder
            if not sys.flags.safe_path:
                sys.path[0] = str(path.resolve().parent)
            main_module = ModuleType("__main__")
            vars(main_module).update(__file__=str(path), __builtins__=builtins, __cached__=None)
            sys.modules["__main__"] = main_module
            code = compile(path.read_bytes(), str(path), "exec")
            exec(code, vars(main_module))  # noqa: S102  # it is what was asked for
    except Exception as error:  # noqa: BLE001  # Python, too, shows whatever ends a script
        # As Python shows it: without the lines that led to the script.
        trace = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame on that is not ours."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
