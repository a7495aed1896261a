"""A rank that is paused before collectives, and resumed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from ddp_notebook.rank.collectives.pause import PauseGate


def test_a_rank_that_is_resumed_just_before_it_pauses_goes_on() -> None:
    gate: Any = PauseGate(SimpleNamespace(abort=threading.Event()))  # type: ignore[arg-type]
    gate.pause()
    assert gate.resume() is None, "it is not there yet"
    waits = threading.Thread(target=gate.wait, args=(7,), daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive()
