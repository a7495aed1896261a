"""Progress bars on a rank are text: a rank has no front end of its own to draw widgets in."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _TextBars(types.ModuleType):
    """Stands in for tqdm.autonotebook, by which tqdm.auto decides between text and widgets."""

    def __getattr__(self, name: str) -> Any:
        if name in ("tqdm", "trange"):
            return getattr(importlib.import_module("tqdm.std"), name)
        raise AttributeError(f"module 'tqdm.autonotebook' has no attribute {name!r}")


def prefer_text() -> None:
    """Make `tqdm.auto` choose text here. `tqdm.notebook` itself stays as it is."""
    sys.modules.setdefault("tqdm.autonotebook", _TextBars("tqdm.autonotebook"))
