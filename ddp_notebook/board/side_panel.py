"""A panel beside the notebook for the live board, by jupyter-widgets' sidecar."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOW = (
    "To have it beside the notebook: right-click on the board, Create New View for Cell Output. "
    "Or: %pip install sidecar, reload the page, %ddp_board"
)


def can_have_panel() -> bool:
    """True where sidecar is installed for the kernel; the page needs it, too."""
    return importlib.util.find_spec("sidecar") is not None


class SidePanel:
    """One panel, in which boards are shown one after another."""

    def __init__(self) -> None:
        self._panel: Any = None

    @property
    def is_open(self) -> bool:
        """True once something was shown; also when its tab was closed on the page."""
        return self._panel is not None

    def show(self, bundle: Mapping[str, Any], *, again: bool) -> None:
        """Show a MIME bundle in the panel; `again` opens it where it was closed."""
        if again:
            self.close()
        if self._panel is None:
            from sidecar import Sidecar  # it may not be installed

            # The title has the notebook, as a page may have several.
            notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).stem
            title = f"DDP ranks: {notebook}" if notebook else "DDP ranks"
            self._panel = Sidecar(title=title, anchor="split-right")
        output = {"output_type": "display_data", "data": dict(bundle), "metadata": {}}
        self._panel.outputs = (output,)

    def close(self) -> None:
        """Take the panel away."""
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
