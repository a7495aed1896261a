"""The key of a store for which the user's code waits: ``store.wait(["ready"])``, ``store.get``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from ddp_notebook.rank.component import Component

_METHODS = ("get", "wait", "multi_get")
"""Methods of a store that wait until the key is set."""
_GIVES_UP_WITHIN = timedelta(minutes=1)
"""A caller with a shorter timeout expects that the key may be missing."""


class StoreKeys(Component):
    """Makes the key for which a call waits visible on the stack."""

    def attach(self) -> None:
        """Call torch's methods through a Python function, which has a frame. Done once."""
        for name in _METHODS:
            method = getattr(dist.Store, name, None)
            if method is not None:
                setattr(dist.Store, name, _with_a_frame(method))


def _with_a_frame(method: Callable[..., Any]) -> Callable[..., Any]:
    def waits_for_key(self: Any, *args: Any, **named: Any) -> Any:
        return method(self, *args, **named)

    _codes.add(waits_for_key.__code__)
    return functools.update_wrapper(waits_for_key, method)


_codes: set[object] = set()


def awaited(frames: Iterable[FrameType]) -> str:
    """The keys that the innermost of these frames waits for; empty for none.

    Calls that time out soon are ignored.
    """
    for frame in frames:
        if frame.f_code not in _codes:
            return ""
        names = frame.f_locals
        args, named = names.get("args", ()), names.get("named", {})
        keys = args[0] if args else next((named[n] for n in ("key", "keys") if n in named), "")
        limit = args[1] if len(args) > 1 else named.get("timeout", _limit_of(names.get("self")))
        if isinstance(limit, timedelta) and limit < _GIVES_UP_WITHIN:
            return ""
        return ", ".join(map(_text, (keys,) if isinstance(keys, str | bytes) else keys))
    return ""


def _limit_of(store: Any) -> Any:
    return getattr(store, "timeout", None)


def _text(key: Any) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)
