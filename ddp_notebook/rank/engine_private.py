"""Every use of ipykernel's and IPython's private API inside a rank, each checked and tested.

Without it an interrupted cell takes longer to end, and a rank cannot be asked anything while it
is blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def keep_no_tracebacks(shell: Any) -> bool:
    """Have `shell` not keep a formatted traceback of each error; False if it does not anyway.

    IPython keeps them for `%notebook`, which has no use on a rank, and formats each traceback
    a second time for it: most of the time that an interrupted cell takes to end.
    """
    if not hasattr(shell, "_format_exception_for_storage"):
        return False

    def nothing(exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        name, text = type(exception).__name__, str(exception)
        return {"ename": name, "evalue": text, "traceback": []}

    shell._format_exception_for_storage = nothing
    return True


def answer(
    kernel: Any, request: str, reply: str, to: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
) -> bool:
    """Have `kernel` answer messages of type `request` with `to(question, about)`.

    On its control thread, whatever its main thread is doing. False if it cannot.
    """
    handlers = getattr(kernel, "control_handlers", None)
    if not isinstance(handlers, dict) or not hasattr(kernel, "session"):
        return False

    def handle(stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        asked = parent["content"]
        content = dict(to(str(asked.get("question", "")), asked.get("about") or {}))
        kernel.session.send(stream, reply, content, parent=parent, ident=ident)

    handlers[request] = handle
    return True
