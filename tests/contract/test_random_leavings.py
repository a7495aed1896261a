"""A few of the random leavings of `tests/random_leavings.py`: a pause is left, nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_leavings import ENDS, FRESH, KEEPS, Leavings
from support import ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 60 * ROUNDS)]


def test_however_a_pause_is_left_nothing_stays_and_the_next_cell_works(tmp_path: Path) -> None:
    with Leavings(tmp_path / "train.py") as leavings:
        for number, kinds in enumerate((KEEPS + FRESH, ENDS) * ROUNDS):
            print(f"{leavings.seed(number)}: {leavings.play(kinds)}")
