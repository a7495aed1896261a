"""Which job the verbs that look at ranks mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_notebook import jobs

if TYPE_CHECKING:
    from ddp_notebook.jobs.targets import Target


class Attachment:
    """Which job the verbs that look at ranks mean, when it is not the session's own."""

    def __init__(self) -> None:
        self.current: Target | None = None
        """None: the session's ranks."""

    def attach(self, words: Sequence[str]) -> Target:
        """Look at what the user names. Raises UsageMistake, and then nothing has changed."""
        self.current = target = jobs.targets.named(words)
        return target

    def detach(self) -> Target | None:
        """Look at the session's ranks again; what was looked at."""
        before, self.current = self.current, None
        return before
