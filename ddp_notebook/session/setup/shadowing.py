"""Which file beside the notebook Python loads in place of a module that the ranks need."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_notebook import files

_NEEDED = frozenset(
    {
        *("torch", "numpy", "zmq", "psutil", "tornado", "traitlets", "dateutil", "decorator"),
        *("IPython", "ipykernel", "ipyparallel", "jupyter_client", "jupyter_core", "comm"),
        *("packaging", "sympy", "networkx", "jinja2", "fsspec", "filelock", "typing_extensions"),
    }
)


def why_not_loaded(python_path: Sequence[str]) -> str:
    """A message about files that shadow modules that ranks load, and the remedy; empty for none.

    Called when a start has failed: many such files are harmless.
    """
    files = [str(file) for file in _shadowing(python_path)]
    if not files:
        return ""
    one = len(files) == 1
    return (
        f"{' and '.join(files[:3])} {'has the name' if one else 'have the names'} of "
        f"{'a module' if one else 'modules'} that the ranks load, and Python finds "
        f"{'it' if one else 'them'} first. Rename {'it' if one else 'them'}."
    )


def _shadowing(python_path: Sequence[str]) -> Iterator[Path]:
    own = Path(os.__file__).parent  # what comes before it in the path wins over Python's own
    names = sys.stdlib_module_names | _NEEDED
    for entry in python_path:
        folder = Path(entry)
        if not folder.is_absolute() and files.current_folder_is_gone():
            continue
        if folder.name in ("site-packages", "dist-packages"):
            return
        if folder.resolve() == own:
            names = _NEEDED
            continue
        for name in sorted(names):
            file = (folder / f"{name}.py").absolute()
            if file.is_file():
                yield file
