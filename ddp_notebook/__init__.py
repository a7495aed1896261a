"""A Jupyter-native interactive debugger for PyTorch DistributedDataParallel.

In a notebook: `%load_ext ddp_notebook`, then `%ddp_init --world-size 4` and `%%ddp` cells.

The layers, top to bottom (checked by import-linter, see pyproject.toml):

    magics, __main__                                     parse, call, return
    session                                              one method per verb
    views, faults, bench, cluster, listener, agent,      none knows another
    analysis, workshop
    launch                                               starting processes
    errors
    model                                                words and values

Importing this package imports none of them: every rank imports it, and `%load_ext` is
to return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.session import Session

__all__ = ["Session", "__version__", "load_ipython_extension", "unload_ipython_extension"]
__version__ = "0.1.0"

_MAGICS = "_ddp_notebook_magics"


def __getattr__(name: str) -> Any:
    if name == "Session":
        from ddp_notebook.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext ddp_notebook` calls: register the magics, warm a fork server."""
    import atexit

    from ddp_notebook.magics import DDPMagics
    from ddp_notebook.session import Session

    if getattr(shell, _MAGICS, None) is not None:
        return
    session = Session()
    magics = DDPMagics(shell, session)
    shell.register_magics(magics)
    setattr(shell, _MAGICS, magics)
    atexit.register(session.shutdown)
    session.warm()


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext ddp_notebook` calls: end the ranks."""
    magics = getattr(shell, _MAGICS, None)
    if magics is not None:
        magics.session.shutdown()
        setattr(shell, _MAGICS, None)
