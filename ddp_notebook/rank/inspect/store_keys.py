"""The key of a store for which the user's code waits: ``store.wait(["ready"])``, ``store.get``.

And those that it has set.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddp_notebook.rank.component import Component, Run

_METHODS = ("get", "wait", "multi_get")
"""Methods of a store that wait until the key is set."""
_SETTING = ("set", "add", "append", "compare_set", "multi_set")
_GIVES_UP_WITHIN = timedelta(minutes=1)
"""A caller with a shorter timeout expects that the key may be missing."""


class StoreKeys(Component):
    """Makes the key for which a call waits visible on the stack, and knows what this rank set."""

    def __init__(self) -> None:
        self._set: deque[Any] = deque(maxlen=64)

    def attach(self) -> None:
        """Call torch's methods through a Python function, which has a frame. Done once."""
        # The store's client waits in C++ for as long as its timeout, often half an hour, and tells
        # nobody for what. A frame on the stack has the arguments, at no cost while nobody looks.
        for names, around in ((_METHODS, _with_a_frame), (_SETTING, self._noting)):
            for name in names:
                method = getattr(dist.Store, name, None)
                if method is not None:
                    setattr(dist.Store, name, around(method))

    def run_begins(self, run: Run) -> None:
        """Forget the keys that the last run set."""
        self._set.clear()

    def set_by_me(self) -> tuple[str, ...]:
        """Return the keys that were set last in this run, each once."""
        return tuple(dict.fromkeys(key for keys in list(self._set) for key in _texts(keys)))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        note = self._set.append

        def sets_key(self: Any, *args: Any, **named: Any) -> Any:
            result = method(self, *args, **named)
            # After the call: a set that blocks, or fails, has set nothing.
            note(args[0] if args else next(iter(named.values()), ""))
            return result

        return functools.update_wrapper(sets_key, method)


def _with_a_frame(method: Callable[..., Any]) -> Callable[..., Any]:
    def waits_for_key(self: Any, *args: Any, **named: Any) -> Any:
        return method(self, *args, **named)

    _codes.add(waits_for_key.__code__)
    return functools.update_wrapper(waits_for_key, method)


_codes: set[object] = set()


def awaited(frames: Iterable[FrameType]) -> str:
    """Return the keys that the innermost of these frames waits for; empty for none.

    Calls that time out soon are ignored.
    """
    frame = next(iter(frames), None)
    if frame is None or frame.f_code not in _codes:
        return ""
    names = frame.f_locals
    args, named = names.get("args", ()), names.get("named", {})
    keys = args[0] if args else next((named[n] for n in ("key", "keys") if n in named), "")
    own = getattr(names.get("self"), "timeout", None)
    limit = args[1] if len(args) > 1 else named.get("timeout", own)
    if isinstance(limit, timedelta) and limit < _GIVES_UP_WITHIN:
        return ""
    return ", ".join(_texts(keys))


def _texts(keys: Any) -> Iterable[str]:
    for key in (keys,) if isinstance(keys, str | bytes) else keys:
        yield key.decode(errors="replace") if isinstance(key, bytes) else str(key)
