"""Progress in a terminal: a line that says what the start of the ranks or a benchmark does."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ddp_notebook.model import Snapshot
from ddp_notebook.views.board_rows import headline, loading_text

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
