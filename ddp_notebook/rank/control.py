"""Answers questions of the session on the engine's control thread, whatever main is doing.

A fixed set of questions; the answer is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.rank import engine_private
from ddp_notebook.rank.collectives import pause
from ddp_notebook.rank.inspect import case, facts, reachability, stacks
from ddp_notebook.rank.setup import rescue
from ddp_notebook.rank.training import facts as runfacts

REQUEST = "ddp_ask_request"
REPLY = "ddp_ask_reply"

QUESTIONS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "evidence": lambda _: case.gather(),
    "free": lambda _: rescue.free(),
    "facts": lambda _: facts.gather(),
    "facts of the run": lambda _: runfacts.gather(),
    "reach": reachability.answer,
    "let go": lambda _: pause.let_go(),
    "let go for good": lambda _: pause.let_go_for_good(),
    "stacks": lambda _: stacks.gather(),
    "stacks with locals": lambda _: stacks.gather(with_locals=True),
}
"""Each is asked with what it is about, a JSON object."""


def attach(kernel: Any) -> bool:
    """Have `kernel` answer; False when this ipykernel has changed."""
    return engine_private.answer(kernel, REQUEST, REPLY, answer)


def answer(question: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to `question`, or ``{"error": why}``."""
    ask = QUESTIONS.get(question)
    if ask is None:
        return {"error": f"a rank cannot be asked for {question!r}"}
    try:
        return {"answer": dict(ask(about))}
    except Exception as error:  # noqa: BLE001  # a defect of ours must not hurt the rank
        return {"error": f"{type(error).__name__}: {error}"}
