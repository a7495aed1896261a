"""Whether this package was changed since the notebook's kernel loaded it: an upgrade, an edit.

Ranks would run the new code and the kernel the old one, with incompatible protocols.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddp_notebook.errors import UsageMistake

_PACKAGE = Path(__file__).parents[2]
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def changed_ns() -> int:
    """When a file of the package was changed last; 0 where that is not known."""
    try:
        return max(
            Path(folder, name).stat().st_mtime_ns
            for folder, _, names in os.walk(_PACKAGE)
            for name in names
            if name.endswith(".py")
        )
    except (OSError, ValueError):  # it lies in an archive; it is being replaced
        return 0


def installed_version() -> str:
    """The version that a new process would load; empty where that is not known."""
    try:
        found = _VERSION.search((_PACKAGE / "__init__.py").read_text("utf-8", "replace"))
    except OSError:
        return ""
    return found[1] if found else ""


_loaded_ns, _loaded_version = changed_ns(), installed_version()


def check() -> str:
    """What to note on the board; empty where nothing changed. Raises UsageMistake on an upgrade."""
    installed = installed_version()
    if installed and installed != _loaded_version:
        raise UsageMistake(
            f"ddp_notebook {installed} was installed after this kernel had loaded "
            f"{_loaded_version}, and the two do not go together. Restart the kernel, then type "
            "%load_ext ddp_notebook"
        )
    if changed_ns() == _loaded_ns:
        return ""
    return (
        "The code of ddp_notebook was changed after this kernel had loaded it. If anything looks "
        "wrong: restart the kernel."
    )
