"""A few rounds of random kills in a real kernel; `python tests/random_kills.py` plays many."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_kills import Kills
from support import ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 60 * ROUNDS)]


def test_whatever_is_struck_every_cell_answers_and_the_next_works(tmp_path: Path) -> None:
    with Kills(tmp_path / "train.py") as rounds:
        for number in range(2 * ROUNDS):
            print(f"{rounds.seed(number)}: {rounds.play()}")
