"""A few rounds of random kills in a real kernel; `python tests/random_kills.py` plays many."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from random_kills import Rounds
from support import ROUNDS, SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 60 * ROUNDS)]


@pytest.mark.usefixtures("warm_kernels")
def test_whatever_is_struck_every_cell_answers_and_the_next_works(tmp_path: Path) -> None:
    with Rounds(tmp_path / "train.py") as rounds:
        for number in range(2 * ROUNDS):
            rounds.choose = random.Random(f"{SEED}/{number}")
            print(f"DDP_NOTEBOOK_SEED={SEED}, round {number}: {rounds.play()}")
