"""Hangs of the commonest kinds on ranks that are as those of NCCL, and what follows them.

Their collectives return at once and end later, on what stands for a GPU: see `lazy`. All tests of
hangs, aborts, the guard and the ends of runs go by so once a week (`.ci/weekly`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import support
import test_after_a_hang as hangs
from lazy import lazily

from ddp_notebook.session import InitOptions, Session

pytestmark = pytest.mark.timeout(60)

COMMONEST = (
    *("save, on rank 0 alone", "another order", "another shape", "a batch less"),
    *("no_sync on one rank", "an exception on one rank"),
    *("a rank is killed in a collective", "work.wait under another name"),
)


@pytest.fixture(scope="module")
def ranks(nothing_left_behind_by_the_module: None) -> Iterator[Session]:
    """Three such ranks."""
    options = InitOptions(world_size=3, device="cpu")
    with support.shared_session(options) as session, lazily(session):
        yield session


@pytest.mark.parametrize("name", COMMONEST)
def test_after_a_hang_the_ranks_are_back(ranks: Session, name: str) -> None:
    hangs.test_after_every_kind_of_hang_the_ranks_are_back(ranks, name)


def test_a_rank_that_is_only_slow_is_no_hang(ranks: Session) -> None:
    hangs.test_a_rank_that_is_only_slow_is_no_hang_and_can_be_given_up(ranks)
