"""The main thread's activity: written by itself, read by threads that answer in its place."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType

from ddp_notebook import model
from ddp_notebook.rank.component import Component, Run


class Aborted(RuntimeError):
    """The rank waited in code of ours, and what it ran was aborted (%ddp_abort)."""


@dataclass(frozen=True)
class Failure:
    """How the last thing that ran here failed. `category` is a finding's, empty if uncertain."""

    type: str
    text: str
    category: str = ""
    remedy: str = ""
    frames: tuple[model.Frame, ...] = ()
    """The user's lines that the error passed through, the outermost first."""
    during: model.ThreadError | None = None
    """The error that was being handled when it was raised."""
    path: str = ""
    """The file or folder that was not there, if that is the error."""
    trace: TracebackType | None = None
    """Where it was raised, with the variables as they were; kept until something runs again."""


class MainThread(Component):
    """The state of the main thread."""

    def __init__(self) -> None:
        self.running = False
        """A cell, a script or a stage of setup runs."""
        self.waiting_in = ""
        """The stage of setup in which it waits in code of ours; empty: torch's stack tells."""
        self.paused_before = ""
        """The stage of setup before which it is paused; empty when it is not."""
        self.paused_at = ""
        """The line before which a thread is paused; empty when none is."""
        self.paused_in: FrameType | None = None
        """The frame of that line."""
        self.doing = ""
        """In words, while it waits in code of ours."""
        self.gpu_works = False
        """It waits in code of ours until its GPU is done."""
        self.error: Failure | None = None
        self.task: asyncio.Task[None] | None = None
        """The last cell with top-level `await`; it may be over."""
        self.abort = threading.Event()
        """Set to end waiting loops of ours."""

    def end_if_aborted(self) -> None:
        """Raise Aborted where what runs here was aborted."""
        if self.abort.is_set():
            raise Aborted("aborted (%ddp_abort)")

    def awaits_gpu(self, on: bool) -> None:
        """Note that the main thread waits in code of ours until its GPU is done; not `on`: no more.

        Raises Aborted where it was aborted meanwhile: what the GPU has computed is of no use. Does
        nothing in another thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.gpu_works = on
        self.doing = "the GPU works on what was issued" if on else ""
        if not on and self.abort.is_set():
            raise Aborted("aborted while the GPU worked")

    def setup_begins(self) -> None:
        """An abort was of what ran before."""
        self.abort.clear()
        self.error = None

    def run_begins(self, run: Run) -> None:
        """Something runs; an abort was of what ran before."""
        self.abort.clear()
        self.running, self.error = True, None

    def run_ends(self) -> None:
        """Nothing runs; `error` is the runner's to set."""
        self.running = False
