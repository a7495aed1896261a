"""Answers questions of the session on the engine's control thread, whatever main is doing.

A fixed set of questions; the answer is JSON. ipykernel's table of control handlers is
private to it: without it a blocked rank cannot be asked, and is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.agent import evidence, facts, rescue

REQUEST = "ddp_ask_request"
REPLY = "ddp_ask_reply"

QUESTIONS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "evidence": evidence.gather,
    "free": rescue.free,
    "facts": facts.gather,
}


def attach(kernel: Any) -> bool:
    """Have `kernel` answer; False when this ipykernel has changed."""
    handlers = getattr(kernel, "control_handlers", None)
    if not isinstance(handlers, dict) or not hasattr(kernel, "session"):
        return False

    def handle(stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        content = answer(str(parent["content"].get("question", "")))
        kernel.session.send(stream, REPLY, content, parent=parent, ident=ident)

    handlers[REQUEST] = handle
    return True


def answer(question: str) -> dict[str, Any]:
    """The answer to `question`, or ``{"error": why}``."""
    ask = QUESTIONS.get(question)
    if ask is None:
        return {"error": f"a rank cannot be asked for {question!r}"}
    try:
        return {"answer": dict(ask())}
    except Exception as error:  # noqa: BLE001  # a defect of ours must not hurt the rank
        return {"error": f"{type(error).__name__}: {error}"}
