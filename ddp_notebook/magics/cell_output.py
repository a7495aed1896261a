"""The output of the notebook cell that runs: text, MIME bundles, regions that are drawn again."""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO, TypeVar

from IPython.core.displaypub import CapturingDisplayPublisher

from ddp_notebook.model import Snapshot
from ddp_notebook.views.board_rows import headline, loading_text
from ddp_notebook.views.live_region import LiveRegion

T = TypeVar("T")
Bundle = Mapping[str, str]
Watch = Callable[[float, Callable[[], T]], None]
"""Called during work: the share done, 0 to 1, and a function that makes the result so far."""

NOTHING: Bundle = {"text/plain": ""}
_PROGRESS_INTERVAL_S = 0.5
"""The ranks that are measured need the cores."""


class CellOutput:
    """The output of whichever cell runs in one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.is_live = getattr(shell, "kernel", None) is not None
        """True if a front end can redraw what it shows: in a kernel, not in a terminal."""

    @property
    def publisher(self) -> Any:
        """The present display publisher: another one while output is captured (%%capture)."""
        return self._shell.display_pub

    @property
    def folds(self) -> bool:
        """True if long text should be folded: it is displayed, and not captured."""
        # %%capture and redirect_stdout want the text itself, all of it.
        captured = isinstance(self.publisher, CapturingDisplayPublisher)
        if captured or isinstance(sys.stdout, io.StringIO):
            return False
        return self.is_live or sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Print `text`."""
        print(text)  # noqa: T201  # the cell's output is where it belongs

    def publish(self, bundle: Bundle) -> None:
        """Display a MIME bundle."""
        self.publisher.publish(data=dict(bundle), metadata={})

    @contextmanager
    def progress(self, render: Callable[[T | None, float, float], Bundle]) -> Iterator[Watch[T]]:
        """Shows the progress of some work, in a terminal as a line; yields what the work calls.

        `render` gets the result so far (None before there is one), the share that is done and the
        seconds since the start. It is called on the drawing thread.
        """
        began_s = time.monotonic()
        latest: tuple[float, Callable[[], T] | None] = (0.0, None)

        # Called on the drawing thread while the work goes on: the ranks' result so far is computed
        # only as often as it is drawn.
        def bundle() -> Bundle:
            done, so_far = latest
            result = so_far() if so_far is not None else None
            return render(result, done, time.monotonic() - began_s)

        def words() -> str:
            return " ".join(str(bundle().get("text/plain", "")).split())

        def watch(done: float, so_far: Callable[[], T]) -> None:
            nonlocal latest
            latest = (done, so_far)
            region.nudge()

        region = LiveRegion(self.publisher, bundle, _PROGRESS_INTERVAL_S)
        if self.is_live:
            region.open()
        line = nullcontext() if self.is_live else text_line(words, sys.stdout, _PROGRESS_INTERVAL_S)
        try:
            with line:
                yield watch
        finally:
            region.close(NOTHING)


# -- in a terminal -----------------------------------------------------------------------


_AGAIN_AFTER_S = 0.2


def _show(text: str, terminal: TextIO) -> None:
    """Make `text` the last line. Not by an escape code: not every terminal knows those."""
    columns = shutil.get_terminal_size().columns - 1
    terminal.write("\r" + text[:columns].ljust(columns) + ("" if text else "\r"))
    terminal.flush()


@contextmanager
def progress_line(state: Callable[[], Snapshot], terminal: TextIO) -> Iterator[None]:
    """Within, the last line of `terminal` shows how the ranks start, with a clock."""
    began_s = time.monotonic()

    def text() -> str:
        snapshot = state()
        seconds = f" · {time.monotonic() - began_s:.0f} s"
        doing = headline(snapshot) if snapshot.ranks else "starting"
        return loading_text(snapshot) or doing + seconds

    with text_line(text, terminal, _AGAIN_AFTER_S):
        yield


@contextmanager
def text_line(text: Callable[[], str], terminal: TextIO, again_after_s: float) -> Iterator[None]:
    """Within, the last line of `terminal` is `text`, from another thread; a file gets nothing."""
    if not terminal.isatty():
        yield
        return
    over = threading.Event()

    def write() -> None:
        while not over.wait(again_after_s):
            _show(text(), terminal)

    writer = threading.Thread(target=write, name="ddp-progress", daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()
        _show("", terminal)
