"""The tests of hangs, aborts, the guard and the ends of runs, on ranks that are as those of NCCL.

Their collectives return at once and end later, on what stands for a GPU: see `lazy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import support
import test_after_a_hang as hangs
from lazy import lazily

from ddp_notebook.session import InitOptions, Session

pytestmark = pytest.mark.timeout(60)

NOT_SO = {
    "two groups in opposite order": "communicators run side by side, of gloo and on a GPU",
    "send and send": "the stand-in's works end side by side, and not in order as on a stream",
    "no barrier before the group is destroyed": "NCCL waits in there, and gloo does not",
    "FSDP2, evaluated on rank 0 alone": "a reduce_scatter of gloo's ends when it is waited for",
    "FSDP2, a backward on rank 0 alone": "a reduce_scatter of gloo's ends when it is waited for",
}
"""Kinds of hangs that are none here, and why."""


def _lazy_ranks(world_size: int) -> Iterator[Any]:
    options = InitOptions(world_size=world_size, device="cpu")
    with support.shared_session(options) as session, lazily(session):
        yield session


@pytest.fixture(scope="module")
def lazy3(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    yield from _lazy_ranks(3)


@pytest.mark.parametrize("name", [name for name in hangs.KINDS if name not in NOT_SO])
def test_after_every_kind_of_hang_the_ranks_are_back(lazy3: Session, name: str) -> None:
    hangs.test_after_every_kind_of_hang_the_ranks_are_back(lazy3, name)


def test_a_rank_that_is_only_slow_is_no_hang_and_can_be_given_up(lazy3: Session) -> None:
    hangs.test_a_rank_that_is_only_slow_is_no_hang_and_can_be_given_up(lazy3)


def test_whatever_else_a_rank_waits_for_it_does_not_wait_in_a_collective(lazy3: Session) -> None:
    hangs.test_whatever_else_a_rank_waits_for_it_does_not_wait_in_a_collective(lazy3)
