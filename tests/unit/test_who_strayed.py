"""Which of few ranks is wrong: who tried again, whose peer is new, whose store is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, same, the_one
from traces import DONE, all_reduce, barrier, message, play

from ddp_notebook.diagnosis import failures
from ddp_notebook.model import Category, CellFinished

RETRY = """
def publish(up):
    for attempt in range(3):
        try:
            dist.all_reduce(v)
            up.put(v)
            return v
        except OSError:
            log("again")
for epoch in {turns}:
    publish(up)
dist.barrier()
"""
STEP, END = all_reduce(11, (5, "publish")), barrier(12)


def retried(turns: str = "range(4)") -> dict[str, str]:
    return {"train.py": RETRY.replace("{turns}", turns)}


@pytest.mark.parametrize(("size", "again"), [(2, 0), (2, 1), (4, 2)])
def test_who_called_once_more_tried_again_where_nothing_else_can_set_ranks_apart(
    size: int, again: int
) -> None:
    programs = same(size, [*[STEP] * 4, END])
    finding = the_one(play({**programs, again: [*[STEP] * 5, END]}), retried())
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (again,))
    assert "once more than" in finding.cause and "except OSError" in finding.cause


def test_who_tried_again_is_named_also_where_the_others_have_finished() -> None:
    programs = {0: [STEP] * 5, 1: [STEP] * 4}
    assert found(play(programs, {1: DONE}), retried()) == [("divergent-control-flow", (0,))]


@pytest.mark.parametrize(
    "turns", ["loader", "range(len(shard))", "range(3 + rank)", "enumerate(batches)"]
)
def test_in_a_loop_over_data_a_rank_may_as_well_have_run_out_of_it(turns: str) -> None:
    case = play({0: [*[STEP] * 4, END], 1: [*[STEP] * 5, END]})
    assert [ranks for _, ranks in found(case, retried(turns))] == [(0,)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            return v\n", ""),  # it is called three times on every rank
        ('log("again")', "raise"),
        ("    publish(up)", "    if bad(epoch): continue\n    publish(up)"),
    ],
)
def test_a_try_in_a_loop_is_not_always_tried_again(old: str, new: str) -> None:
    case = play({0: [*[STEP] * 4, END], 1: [*[STEP] * 5, END]})
    code = RETRY.replace("{turns}", "range(4)").replace(old, new)
    assert all("once more than" not in f for f, _ in found(case, {"train.py": code}))
    assert [ranks for _, ranks in found(case, {"train.py": code})] == [(0,)]


NAMES = """
metrics = {"loss": loss, "hist": hist}
for key in order(metrics):
    dist.all_reduce(metrics[key])
"""


def test_two_names_that_the_code_spells_are_two_things_and_not_two_shapes() -> None:
    loss, hist = all_reduce(4, shape=(1,), label="loss"), all_reduce(4, shape=(7,), label="hist")
    case = play({0: [loss, hist], 1: [hist, loss]})
    assert [c for c, _ in found(case, {"train.py": NAMES})] == ["mismatched-order"]
    of_data = [replace(loss, label="shard-0"), replace(hist, label="shard-1")]
    case = play({0: of_data[:1], 1: of_data[1:]})
    assert [c for c, _ in found(case, {"train.py": NAMES})] == ["shape-mismatch"]


# -- messages ------------------------------------------------------------------------------


def test_in_a_ring_who_has_a_peer_that_it_never_had_is_wrong() -> None:
    """Rank 0 has sent to rank 1 before; rank 2 receives from rank 0, to whom rank 1 sends."""
    case = play(
        {
            0: [message("send", 1, 19), message("send", 1, 19)],
            1: [message("recv", 0, 16), message("send", 2, 19), message("recv", 0, 16)],
            2: [message("recv", 0, 16)],
        }
    )
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (2,))
    assert "rank 2 receives from rank 0, as never before, and rank 1 sends to rank 2" in (
        finding.cause
    )


def test_in_a_ring_in_which_two_peers_are_new_either_may_be_wrong() -> None:
    case = play(
        {
            0: [message("send", 1, 19)],
            1: [message("send", 2, 19)],
            2: [message("recv", 0, 16)],
        }
    )
    assert found(case) == [("p2p-mismatch", (0, 1, 2))]


def test_who_goes_on_without_its_usual_answer_is_wrong() -> None:
    """A worker gets a task and answers; of one task rank 1 leaves the answer out."""
    task, answer = message("recv", 0, 16), message("send", 0, 19)
    ask = [message("send", 1, 7), message("send", 2, 7)]
    get = [message("recv", 1, 10), message("recv", 2, 10)]
    case = play(
        {
            0: [*ask, *get] * 4,
            1: [task, answer, task, answer, task, task, answer],
            2: [task, answer] * 4,
        }
    )
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (1,))
    assert "went on without the send to rank 0" in finding.cause


def test_a_new_phase_is_no_break_of_a_habit() -> None:
    """Rank 0 has sent all and waits for gradients; rank 1 waits for one more: either may err."""
    case = play(
        {
            0: [*[message("send", 1, 7)] * 3, message("recv", 1, 10)],
            1: [*[message("recv", 0, 16)] * 4, message("send", 0, 19)],
        }
    )
    assert found(case) == [("p2p-mismatch", (0, 1))]


def test_a_barrier_of_all_in_place_of_the_pair_s_is_the_mistake_of_who_calls_it() -> None:
    """Ranks 0 and 1 are in the last barrier of all, and not with rank 2, which is too soon."""
    groups = {"left": (0, 1), "right": (2, 3)}
    own = [barrier(9, group="left" if rank < 2 else "right") for rank in range(4)]
    programs = {rank: [*[own[rank]] * 3, barrier(12)] for rank in range(4)}
    case = play({**programs, 2: [own[2], own[2], barrier(7), barrier(12)]}, groups=groups)
    assert found(case) == [("barrier-misuse", (2,))]


# -- a store whose host has left -----------------------------------------------------------

LOST = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"


def end(rank: int, outcome: str = "error", error: str = "DistNetworkError") -> CellFinished:
    return CellFinished(rank=rank, cell=1, outcome=outcome, ename=error, evalue=LOST)


def test_a_store_that_left_with_the_only_rank_that_finished_is_that_ranks() -> None:
    (finding,) = failures.raised([end(0, "ok"), end(1), end(2)], (0, 1, 2))
    assert (finding.category, finding.ranks) == (Category.STORE_GONE, (0,))
    assert finding.waiting == (1, 2)
    (several,) = failures.raised([end(0, "ok"), end(1, "ok"), end(2)], (0, 1, 2))
    assert (several.category, several.ranks) == (Category.UNDECIDED, ())
    (own,) = failures.raised([end(0, "ok"), end(1, error="ValueError")], (0, 1))
    assert (own.category, own.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
