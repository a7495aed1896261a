"""The moments in the life of a rank's components, and who tells them: in one order, always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """A cell or a script that begins. `number` is the session's, `paused` before collectives.

    `ledger`: the training step that is recorded for a ledger; 0: none.
    """

    number: int
    paused: bool = False
    ledger: int = 0


class Component:
    """A part of the rank's runtime. Each moment does nothing unless a component has a use for it.

    None may raise: a defect of ours must not stop the user's code.
    """

    def attach(self) -> None:
        """Once, before the first setup or run: put hooks where they belong."""

    def setup_begins(self) -> None:
        """Process groups are about to be forgotten and replaced."""

    def run_begins(self, run: Run) -> None:
        """A cell or a script begins; what belongs to the last one does not count any more."""

    def run_ends(self) -> None:
        """It is over; what it left is still there to be asked for."""


class Lifecycle:
    """Tells components what begins, in their order, and what ends, in the reverse order."""

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(components)

    def attach(self) -> None:
        """See `Component.attach`."""
        for component in self._components:
            component.attach()

    def setup_begins(self) -> None:
        """See `Component.setup_begins`."""
        for component in self._components:
            component.setup_begins()

    def run_begins(self, run: Run) -> None:
        """See `Component.run_begins`."""
        for component in self._components:
            component.run_begins(run)

    def run_ends(self) -> None:
        """See `Component.run_ends`. Calls all of them; raises what the last that failed raised."""
        failed: Exception | None = None
        for component in reversed(self._components):
            try:
                component.run_ends()
            except Exception as error:  # noqa: BLE001  # the user's code replaced what it needs
                failed = error
        if failed is not None:
            raise failed
