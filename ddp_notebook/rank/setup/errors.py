"""The errors of stages of setup that cannot be passed."""

from __future__ import annotations


class StageError(Exception):
    """A stage failed: why, what to type, and the finding's category if it is certain."""

    def __init__(self, cause: str, remedy: str, category: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.category = category


class Refused(ValueError, RuntimeError):
    """A call that cannot work in a cell: why, what to type, and the finding's category.

    torch raises a ValueError for a second group, and a RuntimeError where processes fail.
    """

    def __init__(self, cause: str, remedy: str, category: str) -> None:
        super().__init__(f"{cause}.\n{remedy}")
        self.remedy = remedy
        self.category = category
