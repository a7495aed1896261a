"""A job that was taken over is given back, whoever answers late; a paused rank is not forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.jobs import acting, prepared
from ddp_notebook.jobs.acting import taken_over
from ddp_notebook.rank import calls
from ddp_notebook.rank.collectives.pause import PauseGate


def test_a_rank_that_is_resumed_just_before_it_pauses_goes_on() -> None:
    gate: Any = PauseGate(SimpleNamespace(abort=threading.Event()))  # type: ignore[arg-type]
    gate.pause()
    assert gate.resume() is None, "it is not there yet"
    waits = threading.Thread(target=gate.wait, args=(7,), daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive()


@pytest.mark.parametrize(("answer", "kept"), [((2, 1), ()), ((2, 99), (1,))])
def test_a_job_is_given_back_to_ranks_that_answer_late_and_of_others_it_is_said(
    answer: tuple[int, int], kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 answers when it is asked for the second time, rank 1 never or at once."""
    asked = [0, 0]

    def ask(sockets: Any, question: Any, *_: object) -> dict[int, object]:
        if question is calls.TAKE_OVER:
            return dict.fromkeys(sockets, calls.Taken(1))
        for rank in sockets:
            asked[rank] += 1
        return {rank: calls.Taken(0) for rank in sockets if asked[rank] >= answer[rank]}

    now: Iterator[int] = iter(range(99))
    monkeypatch.setattr(taken_over, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(taken_over, "ask", ask)
    monkeypatch.setattr(prepared, "sockets_of", lambda job: dict.fromkeys(job.alive))
    job: Any = SimpleNamespace(name="job 7", job=SimpleNamespace(alive=(0, 1)))

    assert acting.TakenOver(job).give_back() == kept
