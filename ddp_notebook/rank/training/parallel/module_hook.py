"""A forward pre-hook of ours on a module of the user's, which no copy and no file takes along."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls `told` with the module and what it gets.

    In a copy it does the same to no purpose, and in a pickle it is a function of the standard
    library's that does nothing: files must not need us.
    """

    __slots__ = ("_told",)

    def __init__(self, told: Callable[..., None]) -> None:
        self._told = told

    def __call__(self, *got: Any) -> None:
        self._told(*got)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __copy__(self) -> ModuleHook:
        return self

    def __deepcopy__(self, _memo: Any) -> ModuleHook:
        return self
