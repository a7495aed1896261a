"""What the fork server imports before it forks, and the progress of these imports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENGINE_MODULES = (
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "ipyparallel.controller.app",
    "ipykernel.kernelapp",
    "ipykernel.control",
    "ipykernel.debugger",  # half of the time an engine takes to start
    "ipykernel.comm.manager",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.core.magics",
    "zmq.asyncio",
    "psutil",
)
TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "ddp_notebook.rank.runtime",
    "ddp_notebook.rank.setup.store_process",
    "ddp_notebook.rank.cells.scripts",
    # The first DDP(...) or optimizer.step() imports these: 2 s in each rank, 1 s once here.
    "torch._dynamo",
)
IDLE_MODULES = ("matplotlib.font_manager", "matplotlib.figure", "matplotlib.pyplot")
"""Imported one by one while no command waits; a new command waits for one import at most.

The matplotlib backend itself must be loaded where the shell is.
"""

_ABOUT_ALL = 2_450
"""The expected number of module lookups until all is loaded; only for the progress bar."""
_TELL_EVERY_S = 0.2


class LoadProgress:
    """Calls `tell` with the share that is done, from time to time, from within the imports.

    A thread could do it as well, but a process that forks must have none.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._count = 0
        self._told_s = time.monotonic()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which module lookups are counted."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Counts the lookup of a module; other finders resolve it."""
        self._count += 1
        if time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._told_s = time.monotonic()
            self._tell(min(0.99, self._count / _ABOUT_ALL))
