"""Warnings are shown at the line that caused them, where a function of ours is in between."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TextIO

from ddp_notebook.rank.component import Component

_OURS = f"{Path(__file__).parents[2]}/"


class WarningPlaces(Component):
    """Shows warnings of torch at the user's line, not at that of our stand-in.

    torch warns at its caller's line, and of a function that we patch the caller is our stand-in.
    """

    def attach(self) -> None:
        """Have `warnings.showwarning` look for the line; user code may replace it afterwards."""
        show = warnings.showwarning

        def show_at_caller(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(_OURS):
                frame = sys._getframe(1)
                inside = False  # from the warning outwards: torch's frames, ours, the user's
                while frame.f_back is not None and not (
                    inside and not frame.f_code.co_filename.startswith(_OURS)
                ):
                    inside = inside or frame.f_code.co_filename == filename
                    frame = frame.f_back
                filename, lineno, line = frame.f_code.co_filename, frame.f_lineno, None
            show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_at_caller
