"""Finds the user's global variables: those of IPython's cells, or of a program's `__main__`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GlobalNames:
    """`get` gives the user's global variables as they are now.

    `hidden` has those among them that are not the user's: they count once they have another value.
    """

    get: Callable[[], Mapping[str, Any]]
    hidden: Mapping[str, Any] = field(default_factory=dict)
