"""A forward pre-hook on a module of the user's that copies and pickles of it leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """Calls `tell` with the module and its inputs.

    A copy of the module shares it, without effect. In a pickle it becomes a function of the
    standard library that does nothing: files must not need this package.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *got: Any) -> None:
        # What looks at the inputs would become a part of the trace or of what is compiled, which
        # torch then refuses.
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if not (tracing or torch.compiler.is_compiling()):
            self._tell(*got)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __copy__(self) -> ModuleHook:
        return self

    def __deepcopy__(self, _memo: Any) -> ModuleHook:
        return self
