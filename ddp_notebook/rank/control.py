"""Answers calls, orders and questions by name: one function for each, with its types checked.

Questions come through `control_socket.py` and are answered on its thread, whatever the main
thread is doing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.model import codec
from ddp_notebook.rank.calls import Answer, Call, Order, Question, Request


class Handlers:
    """Which function answers what."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[Any], Any]] = {}
        self._orders: dict[str, Callable[[Any], None]] = {}
        self._questions: dict[str, Callable[[Any], Any]] = {}

    def on_call(self, call: Call[Request, Answer], function: Callable[[Request], Answer]) -> None:
        """`function` answers `call`."""
        self._calls[call.name] = function

    def on_order(self, order: Order[Request], function: Callable[[Request], None]) -> None:
        """`function` carries out `order`."""
        self._orders[order.name] = lambda about: function(codec.decode(order.request, about))

    def on_question(
        self, question: Question[Request, Answer], function: Callable[[Request], Answer]
    ) -> None:
        """`function` answers `question`, from any thread and without waiting."""

        def answer(about: Any) -> Any:
            return codec.readable(codec.encode(function(codec.decode(question.request, about))))

        self._questions[question.name] = answer

    def call(self, name: str, request: Any) -> Any:
        """Answer a call. Raises what its function raises."""
        return self._calls[name](request)

    def carry_out(self, order: str, request: Any) -> None:
        """Carry out an order; events say what comes of it."""
        self._orders[order](request)

    def answer(self, question: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `question` as JSON, or ``{"error": why}``."""
        function = self._questions.get(question)
        if function is None:
            return {"error": f"a rank cannot be asked for {question!r}"}
        try:
            return {"answer": function(about)}
        except Exception as error:  # noqa: BLE001  # a defect of ours must not hurt the rank
            return {"error": codec.readable(f"{type(error).__name__}: {error}")}
