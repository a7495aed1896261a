"""Ranks that died during set-up: the stage, how, and their last output, for an error message."""

from __future__ import annotations

from ddp_notebook.model import Snapshot, Stage, Status
from ddp_notebook.state.descriptions import exit_text


def deaths(snapshot: Snapshot) -> list[str]:
    """One line per dead rank."""
    lines = []
    for state in snapshot.ranks:
        if state.status is Status.DEAD:
            stage = state.entering or state.stage or Stage.LAUNCHED
            words = state.last_words.strip().splitlines()
            last = f" Last words: {words[-1].strip()}" if words else ""
            lines.append(
                f"Rank {state.rank} died in stage {stage.value}, "
                f"{exit_text(state.exit_code or 0)}.{last}"
            )
    return lines
