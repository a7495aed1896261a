"""What observing costs a training step: with DDP, averaged by hand, with FSDP2, in a pipeline."""

from __future__ import annotations

from pathlib import Path

from rows import Measurement, Numbers, Row, compare
from scripts import by_ddp_run, by_torchrun

SCRIPT = Path(__file__).parent / "kinds_of_steps.py"
_TITLES = {
    "ddp": "a training step with DDP, 8 layers of 128 (CPU)",
    "by_hand": "  averaged by hand, 16 all_reduces",
    "sharded": "  FSDP2, 9 units",
    "pipelined": "  two stages, 1F1B, 4 micro-batches",
}


class Training(Measurement):
    """The same script by `%ddp_run` and by torchrun, which has no observer, in turns."""

    name = "training"

    def __init__(self) -> None:
        self._rounds = 0

    def round(self) -> Numbers:
        """Both once; who is first takes turns. Of each kind of step the sum over both ranks."""
        self._rounds += 1
        ways = [("ours", by_ddp_run), ("plain", by_torchrun)]
        if self._rounds % 2:
            ways.reverse()
        found = {name: run(SCRIPT)[0] for name, run in ways}
        return {
            f"{kind} {name}": sum(rank[kind] for rank in ranks)
            for name, ranks in found.items()
            for kind in _TITLES
        }

    def rows(self, medians: Numbers) -> list[Row]:
        """Against torch alone."""
        return [
            compare(
                title,
                medians[f"{kind} ours"] / 1e6,
                medians[f"{kind} plain"] / 1e6,
                1.02,
                "torchrun",
            )
            for kind, title in _TITLES.items()
        ]
