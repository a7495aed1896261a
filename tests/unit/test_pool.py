"""Which fork server the next ranks get."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.session import pool
from ddp_notebook.session.pool import RankPool
from ddp_notebook.session.record import Record


class Server:
    """As much of a fork server's client as the pool uses."""

    def __init__(self, mode: str) -> None:
        self.mode, self.alive, self.equal, self.closed = mode, True, True, False

    def equals_a_new_one(self) -> bool:
        return self.equal

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> RankPool:
    monkeypatch.setattr(pool, "ForkServerClient", Server)
    return RankPool(Record())


def test_a_warm_fork_server_serves_the_next_start(ranks: RankPool) -> None:
    assert ranks.warm_fork_server("fork") is ranks.warm_fork_server("fork")


@pytest.mark.parametrize(
    "change", [{"alive": False}, {"mode": "process"}, {"equal": False}], ids=lambda c: next(iter(c))
)
def test_one_that_has_ended_or_would_differ_from_a_new_one_does_not(
    ranks: RankPool, change: dict[str, Any]
) -> None:
    before: Any = ranks.warm_fork_server("fork")
    vars(before).update(change)
    after = ranks.warm_fork_server("fork")
    assert after is not before and before.closed
