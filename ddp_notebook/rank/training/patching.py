"""How code of ours comes to run inside torch's: patched methods and hooks on the user's modules.

An observer's error never reaches the user: whatever ours raises ends the counting of this process
(`failed`), and torch's own function runs as if nothing had been there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.rank import torch_private

Before = Callable[..., Any]
After = Callable[[bool, Any, Any, Any], None]


class Patches:
    """Patches of public methods of torch. While `off()`, they only call what they replaced."""

    def __init__(self, off: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._off = off
        self._failed = failed
        torch_private.keep_from_compiler(off)

    def contained(self, tell: Callable[..., Any]) -> Callable[..., Any]:
        """Return `tell` as it can be called anywhere: its errors go to `failed`."""
        failed = self._failed

        def told(*given: Any) -> Any:
            try:
                return tell(*given)
            except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
                failed(error)
                return None

        torch_private.keep_from_compiler(told)
        return told

    def patch(
        self, owner: Any, name: str, before: Before | None = None, after: After | None = None
    ) -> None:
        """Have `before` and `after` called around a function or method of `owner`.

        `before` gets the arguments by position, the ones by name as a dict, and the callback of
        torch's compiler, None where nothing is compiled; what it returns is the second argument of
        `after`. The first is whether the function ended without an error, the third its own first
        argument, the fourth its result. Whoever is to be told is bound now: this runs in every
        step.
        """
        original, off = getattr(owner, name), self._off
        compilers_callback = torch_private.compilers_callback
        failed = self._failed
        for ours in filter(None, (before, after)):
            torch_private.keep_from_compiler(getattr(ours, "__func__", ours))

        @functools.wraps(original)
        def patched(*args: Any, **named: Any) -> Any:
            # By this variable `UserCode.has_called` also knows a frame that only stands in for
            # torch's.
            __tracebackhide__ = True  # IPython leaves the frame out of the user's traceback
            if off():
                return original(*args, **named)
            token, done, result = None, False, None
            if before is not None:
                try:
                    # Read here: what the compiler leaves alone with all that it calls, sees none.
                    token = before(args, named, compilers_callback())
                except Exception as error:  # noqa: BLE001  # ours to solve, not the user's
                    failed(error)
            if after is None:
                return original(*args, **named)
            try:
                result = original(*args, **named)
                done = True
            finally:
                try:
                    after(done, token, args[0] if args else None, result)
                except Exception as error:  # noqa: BLE001
                    failed(error)
            return result

        # The compiler leaves this frame alone, and compiles what it calls as without it.
        torch_private.keep_from_compiler(patched, inner_too=False)
        setattr(owner, name, patched)


class ModuleHook:
    """A forward pre-hook on a module of the user's: calls `tell` with the module and its inputs.

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


torch_private.keep_from_compiler(ModuleHook.__call__)
