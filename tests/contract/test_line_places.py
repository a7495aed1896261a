"""A breakpoint is hit wherever the line is; the other ways and holders are played by the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_places import HOLDERS, PLACES, Place, play

from ddp_notebook.session import Session

CHOSEN = [
    (place, place.ways[-1] if number % 2 else place.ways[:2][-1], number)
    for number, place in enumerate(PLACES)
]


@pytest.mark.parametrize(
    ("place", "way", "number"), CHOSEN, ids=[f"{place.name}, {way}" for place, way, _ in CHOSEN]
)
def test_it_is_hit_with_the_right_variables(
    ranks2: Session, tmp_path: Path, place: Place, way: str, number: int
) -> None:
    holders = HOLDERS[:2] if way == "function" else HOLDERS
    play(ranks2, place, way, holders[number // 2 % len(holders)], tmp_path)
