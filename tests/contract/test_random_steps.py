"""A few of the random walks of `tests/random_steps.py`: steps change nothing that is computed."""

from __future__ import annotations

import random
from pathlib import Path

from random_steps import TRAINS, begin, losses, walk
from support import SEED

from ddp_notebook.session import Session


def test_steps_at_random_change_no_loss_and_strand_nobody(ranks4: Session, tmp_path: Path) -> None:
    script = tmp_path / "walked_through.py"
    script.write_text(TRAINS)
    wanted = losses(begin(ranks4, script, as_script=False), ranks4)
    for number in range(3):
        seen, _ = walk(ranks4, script, random.Random(SEED + number))
        assert seen == wanted, f"DDP_NOTEBOOK_SEED={SEED + number}"
