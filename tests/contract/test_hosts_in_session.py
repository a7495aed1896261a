"""A session whose ranks are on two hosts: the routing alone, as both are this machine."""

from __future__ import annotations

from collections.abc import Iterator

import fake_hosts
import pytest
from results import last_values

from ddp_notebook.launch.placement import parse_hosts
from ddp_notebook.launch.process_ids import host_of
from ddp_notebook.session import InitOptions, Session, pool

HOSTS = InitOptions(world_size=3, device="cpu", hosts=parse_hosts("near-a:2,near-b"))


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pool, "HostsClient", fake_hosts.FakeHosts)
    yield


def test_ranks_are_started_on_their_hosts(session: Session) -> None:
    board = session.init(HOSTS)
    assert [host_of(state.pid) for state in board.snapshot.ranks] == [1, 1, 2]
    code = "[os.environ[n] for n in ('LOCAL_RANK','LOCAL_WORLD_SIZE','GROUP_RANK','GROUP_WORLD_SIZE')]"
    assert last_values(session, f"import os\n{code}") == {
        (0,): "['0', '2', '0', '2']",
        (1,): "['1', '2', '0', '2']",
        (2,): "['0', '1', '1', '2']",
    }
