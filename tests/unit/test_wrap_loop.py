"""The loop that takes ranks through a wrap, with ranks that follow a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.model import Category, RankExited, RankSpawned
from ddp_notebook.model.ddp import (
    BucketPlan,
    Fingerprint,
    RankFailure,
    Synced,
    TensorInfo,
    WrapStage,
)
from ddp_notebook.rank import calls
from ddp_notebook.session import queries
from ddp_notebook.session.findings import LastFindings
from ddp_notebook.session.record import Record
from ddp_notebook.session.tools.ddp_construction import DdpConstruction, Wrap, WrapOptions
from ddp_notebook.testing import FakeCluster

# -- waiting ---------------------------------------------------------------------------


MODULE = calls.Described("module", "Net")

SAME = calls.Compared(Fingerprint(), ())

VERIFIED = calls.Nothing()

BROADCASTED = Synced(("a",), ("a",), 4)


def record_of(world_size: int) -> Record:
    record = Record()
    record.begin(world_size)
    record.add([RankSpawned(rank=rank, pid=100 + rank, device="cpu") for rank in range(world_size)])
    return record


def scripted(world_size: int, record: Record, **answers: Any) -> tuple[Wrap, FakeCluster]:
    everyone = range(world_size)
    usual = {
        "describe": dict.fromkeys(everyone, MODULE),
        "compare": dict.fromkeys(everyone, SAME),
        "verify": dict.fromkeys(everyone, VERIFIED),
        "broadcast": dict.fromkeys(everyone, BROADCASTED),
    }
    cluster = FakeCluster(record, {**usual, **answers})
    ranks = tuple(everyone)
    return Wrap(cluster, record, ranks, "net", WrapOptions(step=True), lambda found: None), cluster


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy rank has longer to answer once another failed; here none ever will."""
    monkeypatch.setattr(queries, "OTHERS_GRACE_S", 0.05)


def test_ranks_that_differ_never_begin_a_collective() -> None:
    tensor = TensorInfo("w", (1,), "float32", requires_grad=True)
    other = calls.Compared(Fingerprint(buffers=(tensor,)), ())
    made, cluster = scripted(3, record_of(3), compare={0: SAME, 1: other, 2: SAME})
    assert made.begin()
    made.step()
    assert cluster.called == ["describe", "compare"]
    assert made.diagnosis is not None
    assert made.diagnosis.findings[0].ranks == (1,)
    assert [row.state for row in made.table.rows] == ["paused", "failed"]
    with pytest.raises(UsageMistake, match=r"has ended\. Begin again: %ddp_wrap net"):
        made.step()


@pytest.mark.usefixtures("short_grace")
def test_a_rank_out_of_memory_ends_the_wait_for_the_others() -> None:
    memory = RankFailure("memory", "MemoryError")
    made, _ = scripted(3, record_of(3), broadcast={0: memory})
    made.step(WrapStage.BROADCAST)
    assert made.diagnosis is not None
    (finding,) = made.diagnosis.findings
    assert (finding.category, finding.ranks, finding.waiting) == (
        Category.OOM_ON_ONE_RANK,
        (0,),
        (1, 2),
    )
    assert [(row.ranks, row.state, row.waits_for) for row in made.table.rows] == [
        ((0,), "failed", ()),
        ((1, 2), "waiting", (0,)),
    ]


def test_a_rank_that_died_between_two_steps_is_named_and_nothing_is_done() -> None:
    record = record_of(2)
    made, cluster = scripted(2, record)
    made.step()
    called = len(cluster.called)
    record.add([RankExited(rank=1, pid=101, exit_code=-9)])
    with pytest.raises(UsageMistake, match="Rank 1 is dead"):
        made.step()
    assert len(cluster.called) == called
    assert made.stage is WrapStage.BROADCAST


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_dies_in_a_stage_ends_the_wait_for_the_others() -> None:
    record = record_of(2)
    made, cluster = scripted(2, record, broadcast={})
    made.step()
    cluster.meanwhile["broadcast"] = lambda: record.add([RankExited(rank=1, pid=101, exit_code=-9)])
    made.step()
    assert made.diagnosis is not None
    (finding,) = made.diagnosis.findings
    assert (finding.category, finding.ranks, finding.waiting) == (Category.RANK_DIED, (1,), (0,))


def test_a_stage_that_is_passed_cannot_be_stepped_to() -> None:
    made, _ = scripted(2, record_of(2))
    made.step(WrapStage.BROADCAST)
    with pytest.raises(UsageMistake, match=r"already passed\. The next is buckets: %ddp_step"):
        made.step(WrapStage.BROADCAST)
    assert made.stage is WrapStage.BUCKETS


def test_a_session_that_is_lost_ends_the_wait() -> None:
    record = record_of(2)
    made, _ = scripted(2, record, broadcast={})
    made.step()
    record.note(ended="The controller ended.")
    with pytest.raises(SessionLost, match="The controller ended"):
        made.step()


def test_what_a_rank_raised_where_no_stage_could_catch_it_is_told() -> None:
    raised = UsageMistake("The rank could not answer: ImportError")
    made, _ = scripted(2, record_of(2), **{"plan buckets": {0: BucketPlan((), None), 1: raised}})
    made.step(WrapStage.BROADCAST)
    table = made.step()
    assert "ImportError" in table.rows[-1].text


def test_a_group_built_anew_ends_what_was_begun() -> None:
    record = record_of(2)
    made, _ = scripted(2, record)
    made.step()
    record.note(generation=5)
    with pytest.raises(UsageMistake, match=r"has been rebuilt since\. Begin again: %ddp_wrap net"):
        made.step()


def test_a_wrap_needs_a_name_unless_it_asks_for_the_last_ones_buckets() -> None:
    pool: Any = SimpleNamespace(need=lambda verb: SimpleNamespace(cluster=None))
    runs: Any = SimpleNamespace(idle=lambda ranks, verb: (0,))
    construction = DdpConstruction(record_of(1), pool, runs, LastFindings())
    for options in (WrapOptions(), WrapOptions(buckets=True)):
        with pytest.raises(UsageMistake, match="%ddp_wrap model"):
            construction.wrap("", options)


def test_what_cannot_be_wrapped_is_said_with_its_ranks() -> None:
    absent = calls.Described("absent", "")
    made, cluster = scripted(3, record_of(3), describe={0: MODULE, 1: absent, 2: MODULE})
    with pytest.raises(UsageMistake, match=r"\(rank 1: there is no such variable\).*%%ddp"):
        made.begin()
    assert cluster.called == ["describe"]
