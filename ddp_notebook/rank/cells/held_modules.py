"""Keeps the standard library as it was for our own modules, whatever the user's code replaces.

`json.dumps = None`, a mocked `time.monotonic` or a frozen clock is the user's own affair, but a
rank must still say that the cell has ended. So each of our modules gets copies of the modules that
it imported. What our code sets in one of them is set in the real one too.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

_OURS = "ddp_notebook."
_READ_AS_THEY_ARE = frozenset({"sys", "builtins", "importlib", "linecache", "logging", "warnings"})
"""What changes in them is meant for us too: streams, sources, filters, handlers."""

_held: dict[str, ModuleType] = {}


class _Held(ModuleType):
    """A module as it was."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(vars(real))
        self.__dict__["_real"] = real

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)
        super().__setattr__(name, value)


def hold() -> None:
    """Hold what our modules use of the standard library; once, before any code of the user's.

    In the process that ranks are forked from where there is one: they share the memory of it.
    """
    if _held:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and name != __name__:
            imported = {n: real for n, real in vars(module).items() if _is_to_be_held(real)}
            vars(module).update({n: _copy(real) for n, real in imported.items()})


def _is_to_be_held(value: Any) -> bool:
    if type(value) is not ModuleType:
        return False
    top = value.__name__.partition(".")[0]
    return top in sys.stdlib_module_names and top not in _READ_AS_THEY_ARE


def _copy(real: ModuleType) -> ModuleType:
    if real.__name__ not in _held:
        held = _held[real.__name__] = _Held(real)
        if real is os:
            vars(held)["path"] = _copy(os.path)
    return _held[real.__name__]
