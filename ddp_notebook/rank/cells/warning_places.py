"""Warnings are shown at the line that caused them, where a function of ours is in between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import TextIO

from ddp_notebook.rank.component import Component
from ddp_notebook.rank.inspect.frames import OURS


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
            if filename.startswith(OURS):
                # From the warning outwards: torch's frames, then ours, then the user's.
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_code.co_filename != filename:
                    frame = frame.f_back
                while frame is not None and frame.f_code.co_filename.startswith(OURS):
                    frame = frame.f_back
                if frame is not None:
                    filename, lineno, line = frame.f_code.co_filename, frame.f_lineno, None
            show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_at_caller
