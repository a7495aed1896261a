"""Every use of ipykernel's private API inside a rank, each checked before use and tested.

Without it a cell is a little slower; nothing else is lost.
"""

from __future__ import annotations

from typing import Any

from ddp_notebook.model import QUIET


def keep_quiet(kernel: Any) -> bool:
    """Have `kernel` not publish busy and idle for messages labelled QUIET; False if it cannot.

    The session hears of a cell's begin and end through the beacon. Nobody reads these
    messages, but each goes through the controller to the notebook: a tenth of the time that
    a short cell takes.
    """
    publish = getattr(kernel, "_publish_status", None)
    if publish is None or not hasattr(kernel, "get_parent"):
        return False

    def publish_status(status: str, channel: str = "shell", *args: Any, **options: Any) -> None:
        if channel == "shell" and _is_quiet(kernel.get_parent("shell")):
            return
        publish(status, channel, *args, **options)

    kernel._publish_status = publish_status
    return True


def _is_quiet(message: Any) -> bool:
    metadata = message.get("metadata") if isinstance(message, dict) else None
    return isinstance(metadata, dict) and metadata.get("label") == QUIET
