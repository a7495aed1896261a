"""A Jupyter-native interactive debugger for PyTorch DistributedDataParallel.

In a notebook: `%load_ext ddp_notebook`, then `%ddp_init --world-size 4` and `%%ddp` cells.

The rooms, top to bottom; a room imports only from those below its line, and rooms on one line
do not know each other (checked by import-linter, see pyproject.toml):

    magics | __main__                the verbs as magics; the console script
    board | doctor | workshop        the live board; checks of the machine; the exercises' judges
      | run | pytest                 a script as a prepared rank; tests whose ranks hang
    testing                          fakes, for tests
    session                          everything a user can do, without a notebook
    jobs                             jobs that no notebook started
    cluster | archive | autoload     ipyparallel, known here only; saved runs; torch's hook
    rank | views                     what runs on a rank; text, HTML and plots
    diagnosis                        the rules, and the words of what they find
    launch                           starts processes
    bench | faults                   pure: plans and statistics; the fault lab
    errors | files | syntax          wrong calls; files of others, with care; source as a tree
    model                            values, and the fold of events into a state

Importing this package imports none of them: every rank imports it, and `%load_ext` is
to return at once.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.session import InitOptions, Session

__all__ = [
    "InitOptions",
    "Session",
    "__version__",
    "load_ipython_extension",
    "unload_ipython_extension",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("InitOptions", "Session"):
        from ddp_notebook import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and warm a fork server, for `%load_ext ddp_notebook`."""
    collecting = gc.isenabled()
    gc.disable()  # nothing that is loaded is garbage, and looking for it takes a fifth of the time
    try:
        from ddp_notebook import magics
    finally:
        if collecting:
            gc.enable()
    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks and remove the magics, for `%unload_ext ddp_notebook`."""
    from ddp_notebook import magics

    magics.unload(shell)
