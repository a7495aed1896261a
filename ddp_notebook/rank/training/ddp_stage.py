"""The frame around each stage of `%ddp_wrap` on a rank: what fails there is an answer too."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

from ddp_notebook.model import CellFinished, CellStarted
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.rank import events

_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc")

_Work = Callable[..., dict[str, Any]]


def stage_of(stage: WrapStage) -> Callable[[_Work], _Work]:
    """The work of a stage. A failure is an answer too, or the session would not learn of it."""

    def decorate(work: _Work) -> _Work:
        @functools.wraps(work)
        def answer(**arguments: Any) -> dict[str, Any]:
            with _busy(stage):
                try:
                    return work(**arguments)
                except KeyboardInterrupt:
                    return {"failed": "interrupted", "text": "was interrupted"}
                except (MemoryError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                    return _failure(error)

        return answer

    return decorate


def _failure(error: Exception) -> dict[str, Any]:
    kind = "memory" if is_out_of_memory(error) else "error"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return {"failed": kind, "text": text[:300]}


@contextlib.contextmanager
def _busy(stage: WrapStage) -> Iterator[None]:
    """Meanwhile the board shows the rank in `stage`; an interrupt is raised within alone."""
    voice = events.current()
    pulse = voice.pulse
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    voice.pulse = lambda: {**pulse(), "doing": f"%ddp_wrap: {stage.value}"}
    voice.emit_now(CellStarted, cell=0)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        voice.pulse = pulse
        voice.emit_now(CellFinished, cell=0, outcome="ok")
        signal.signal(signal.SIGINT, previous)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(w in str(error).lower() for w in _OUT_OF_MEMORY)
