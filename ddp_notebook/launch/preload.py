"""Imports torch in the fork server before it forks, so that ranks share most of its memory."""

from __future__ import annotations

import builtins
import copy
import ctypes
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast

ENGINE_MODULES = (
    "ipyparallel.controller.app",  # first: what it loads is shared with a controller forked next
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
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
    "torch.distributed.launcher.api",
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

_OF_ENGINES = frozenset(
    {"IPython", "ipykernel", "ipyparallel", "traitlets", "zmq", "tornado", "comm"}
    | {"jupyter_client", "jupyter_core", "matplotlib_inline"}
)
_OF_DEBUGPY = ("debugpy", "pydev", "_pydev")
_BUILTINS_OF_DEBUGPY = ("execfile", "runfile")


def draw_together() -> None:
    """Have children copy fewer of the pages that they share; once all is loaded.

    A page is copied as soon as one object on it gets another reference.
    """
    # IPython makes a set of these names in each rank: they lay on a thousand pages.
    # New strings, made one after another, lie side by side: their references are counted on few
    # pages.
    for name in list(sys.modules):
        sys.modules[str(name.encode(), "utf-8")] = sys.modules.pop(name)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def hide_engine_modules() -> None:
    """Have a process that is no engine look as if what engines need were not imported.

    Programs ask `sys.modules` whether they run in a notebook or in a debugger. Who imports such a
    module gets the one that is loaded.
    """
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if (top := _package(name)) in _OF_ENGINES or top == "debugpy"
    }
    for name in hidden:
        del sys.modules[name]
    for name in _BUILTINS_OF_DEBUGPY:
        vars(builtins).pop(name, None)
    sys.meta_path.insert(0, _HiddenModules(hidden))


def _package(name: str) -> str:
    """Return the package of a module; debugpy has several."""
    top = name.partition(".")[0]
    return "debugpy" if top.startswith(_OF_DEBUGPY) else top


class _HiddenModules(Loader):
    """Finds the modules of `hide_engine_modules` again."""

    def __init__(self, hidden: dict[str, ModuleType]) -> None:
        self._hidden = hidden

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a hidden module; None of another."""
        module = self._hidden.get(name)
        if module is None or module.__spec__ is None:
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is loaded."""
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Show it, and all of its package, as they were."""
        if module.__spec__ is not None:
            module.__spec__.loader = cast("Loader | None", module.__loader__)
        package = _package(module.__name__)
        for name, hidden in self._hidden.items():
            if _package(name) == package:
                sys.modules.setdefault(name, hidden)
