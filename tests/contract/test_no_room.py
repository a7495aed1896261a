"""Without room for our files ranks train as torch alone does, and the board says what is off."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ddp_notebook.session import InitOptions, Session

SMALL_BYTES = 1_000_000
"""Less than a collective log needs."""


@pytest.fixture
def cramped() -> Iterator[Session]:
    """Two ranks whose files may not grow beyond that: as on a full disk, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, before[1]))
    session = Session()
    try:
        session.init(InitOptions(world_size=2, device="cpu"))
        yield session
    finally:
        session.shutdown(keep_warm=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_kills_no_rank_and_is_said(cramped: Session) -> None:
    source = "for i in range(3):\n    x = torch.ones(4)\n    dist.all_reduce(x)\nx.sum().item()"
    result = cramped.run_cell(source)
    result.raise_for_error()
    assert result.outputs[-1].items[-1].data["text/plain"] == "8.0"
    (note,) = [note for note in cramped.status().notes if "not recorded" in note]
    assert note.startswith("Ranks 0-1: Collectives are not recorded, nor compared: no room in /")
    assert "File too large" in note
    assert not cramped.why().findings
