"""Collectives in loops, after refusals and in another order: whose mistake it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from collective_cases import DDP, SKIP, Program, found, lost, refuse, refused, same, the_one
from traces import (
    DESTROYED,
    all_reduce,
    backward,
    barrier,
    died,
    forward,
    message,
    op,
    places,
    play,
    raised,
)

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import (
    Case,
    Category,
    GroupMade,
    ModelParts,
    ReplicaCounts,
    name_ranks,
)

EPOCHS = """
for epoch in range(9):
    for x in loader:
        loss = net(x)
        loss.backward()
    if rank == 0:
        evaluate()
    if val >= best:
        break
"""


def test_an_evaluation_of_rank_0_after_each_epoch_is_no_lack_of_batches() -> None:
    epoch = [backward(5)] * 3
    case = play(same(3, [*DDP, *epoch, *epoch], r0=[*DDP, *epoch, all_reduce(7), *epoch]))
    finding = the_one(case, {"train.py": EPOCHS})
    assert (finding.category, finding.ranks) == (Category.CONDITIONAL_COLLECTIVE, (0,))
    assert "move it out of `if rank == 0`" in finding.remedy


def test_a_rank_that_breaks_out_of_the_outer_loop_is_no_lack_of_batches() -> None:
    epoch = [backward(5)] * 3
    case = play(same(3, [*DDP, *epoch, *epoch], r1=[*DDP, *epoch]))
    finding = the_one(case, {"train.py": EPOCHS})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "for `if val >= best`" in finding.remedy


def test_a_rank_that_comes_once_more_is_said_to() -> None:
    case = play(same(3, [*DDP, *[backward(7)] * 3], r1=[*DDP, *[backward(7)] * 4]))
    finding = the_one(case, {"train.py": SKIP})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert finding.cause.startswith("Rank 1 called `backward` once more than ranks 0")


def test_of_models_that_differ_the_one_unlike_most_is_named() -> None:
    def told(own: int, rank: int) -> str:
        return (
            "DDP expects same model across all ranks, but Rank "
            f"{rank} has {own} params, while rank {1 - rank % 2} has inconsistent 5 params."
        )

    ends = {rank: raised(told(6 if rank == 1 else 4, rank), "RuntimeError") for rank in range(3)}
    finding = the_one(play(same(3, DDP), ends))
    assert (finding.category, finding.ranks) == (Category.PARAM_MISMATCH, (1,))
    assert len(finding.evidence) >= 3


def test_a_rank_that_comes_again_as_the_others_do_has_done_nothing_wrong() -> None:
    usual, odd = all_reduce(9, shape=(8,)), all_reduce(9, shape=(5,))
    for steps in ([usual, usual], [usual, barrier(12)]):
        case = play(same(3, steps, r1=[refused(odd), *steps]))
        assert found(case) == []
    # and what goes wrong later is told as ever
    case = play(same(3, [usual, all_reduce(12)], r1=[refused(odd), usual]))
    assert found(case, {"train.py": "\n" * 20}) == [("early-exit", (1,))]


def test_a_rank_that_comes_again_where_another_was_refused_for_its_sake() -> None:
    step, odd = all_reduce(9, shape=(8,)), all_reduce(9, shape=(5,))
    case = refuse(play(same(3, [step], r1=[refused(odd), step])), 2, "not sent")
    assert found(case)[0] == ("shape-mismatch", (1,))


# -- another order -------------------------------------------------------------------------


def metrics(*names: str) -> Program:
    return [all_reduce(18, shape=(), label=name) for name in names]


def test_another_name_at_one_line_explains_another_shape() -> None:
    loss, accuracy = all_reduce(18, label="loss"), all_reduce(18, shape=(3,), label="accuracy")
    case = play(same(3, [loss], r2=[accuracy]))
    finding = the_one(refuse(case, 2, "not sent"))
    assert (finding.category, finding.ranks) == (Category.MISMATCHED_ORDER, (2,))
    assert finding.cause.startswith("Rank 2 calls `all_reduce` for 'accuracy' where ranks 0")
    assert finding.cause.endswith(" call it for 'loss'")
    # Files of each rank's own are no names that ranks share.
    own = [all_reduce(18, shape=(4 + rank,), label=f"shard-{rank}") for rank in range(3)]
    assert found(play({r: [own[r]] for r in range(3)})) == [("shape-mismatch", (0, 1, 2))]


def test_other_metrics_in_the_same_slots_are_found_though_nothing_hangs() -> None:
    case = play(same(3, metrics("day", "loss", "seen"), r1=metrics("loss", "night", "seen")))
    assert found(case) == [("mismatched-order", (1,))]
    case = play(same(3, metrics("day"), r1=metrics("night")))
    assert found(case) == [("mismatched-order", (1,))]
    case = play({0: metrics("a", "b"), 1: metrics("b", "a")})
    assert found(case) == [("mismatched-order", (0, 1))]


def test_each_ranks_own_files_are_no_metrics() -> None:
    case = play({rank: metrics(f"shard{rank}.0", f"shard{rank}.1") for rank in range(3)})
    assert found(case) == []


def test_two_collectives_of_one_shape_the_other_way_round() -> None:
    a, b = all_reduce(5), all_reduce(6)
    assert found(play(same(3, [a, b, barrier(9)], r1=[b, a, barrier(9)]))) == [
        ("mismatched-order", (1,))
    ]


def test_two_branches_that_call_the_same_in_another_order() -> None:
    code = "if rank == 1:\n    dist.broadcast(x, 0)\n    dist.all_reduce(y)\nelse:\n"
    code += "    dist.all_reduce(y)\n    dist.broadcast(x, 0)\n"
    case = play(
        same(
            3,
            [all_reduce(5), op("broadcast", 6, root=0)],
            r1=[op("broadcast", 2, root=0), all_reduce(3)],
        )
    )
    assert found(case, {"train.py": code}) == [("mismatched-order", (1,))]
    assert [ranks for _, ranks in found(case)] == [(1,)]


@pytest.mark.parametrize("habit", [0, 2])
def test_of_three_roots_on_three_ranks_none_is_right(habit: int) -> None:
    before = [all_reduce(5), op("broadcast", 9, root=habit)]
    programs = {r: [*before, all_reduce(5), op("broadcast", 9, root=r)] for r in range(3)}
    assert found(play(programs)) == [("op-mismatch", (0, 1, 2))]


def test_two_groups_in_opposite_order() -> None:
    a, b = all_reduce(5, group="a"), all_reduce(6, group="b")
    groups = {"a": (0, 1), "b": (0, 1)}
    finding = the_one(play({0: [a, b], 1: [b, a]}, groups=groups))
    assert (finding.category, finding.ranks) == (Category.MISMATCHED_ORDER, (0, 1))
    assert finding.waiting == ()
    assert any(line.startswith("rank 0 is waiting in group a") for line in finding.evidence)
    groups = {"a": (0, 1, 2), "b": (0, 1, 2)}
    case = play({0: [a, b], 1: [b, a], 2: [a, b]}, groups=groups)
    assert found(case) == [("mismatched-order", (1,))]


# -- barriers ------------------------------------------------------------------------------


def test_barriers_of_different_groups() -> None:
    case = play(
        {0: [barrier(5)], 1: [barrier(5)], 2: [barrier(5, group="all")]}, groups={"all": (0, 1, 2)}
    )
    assert found(case) == [("barrier-misuse", (2,))]


def test_a_barrier_that_only_the_members_of_a_group_reach() -> None:
    own, rest = [all_reduce(5, group="pair"), barrier(6), all_reduce(9)], [all_reduce(9)]
    case = play({0: own, 1: own, 2: rest, 3: rest}, groups={"pair": (0, 1)})
    assert found(case) == [("barrier-misuse", (0, 1))]


def test_a_barrier_that_one_rank_does_not_reach() -> None:
    case = play(same(3, [barrier(5), all_reduce(9)], r1=[all_reduce(9)]))
    assert found(case) == [("barrier-misuse", (1,))]
    code = "\n\n\nif rank != 1:\n    dist.barrier()\n\n\n\ndist.all_reduce(x)\n"
    assert found(case, {"train.py": code}) == [("conditional-collective", (1,))]


# -- messages ------------------------------------------------------------------------------


def test_both_send_first() -> None:
    case = play({r: [message("send", 1 - r, 13), message("recv", 1 - r, 14)] for r in (0, 1)})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (0, 1))
    assert finding.waiting == ()
    assert finding.cause == f"Deadlock: {name_ranks((0, 1))} all call `send` before `recv`"
    assert "rank 0, `send` to rank 1 at train.py" in finding.evidence[0]


def test_a_ring_in_which_all_receive_first() -> None:
    case = play(
        {r: [message("recv", (r - 1) % 3, 5), message("send", (r + 1) % 3, 6)] for r in range(3)}
    )
    assert found(case) == [("p2p-mismatch", (0, 1, 2))]


def test_a_tag_that_differs() -> None:
    case = play({0: [message("send", 1, 5, tag=1)], 1: [message("recv", 0, 6, tag=2)]})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (0, 1))
    assert finding.cause.startswith("The tags of") and finding.cause.endswith(": 1 and 2")


def test_a_message_of_another_size() -> None:
    case = play({0: [message("send", 1, 5, shape=(8,))], 1: [message("recv", 0, 6, shape=(4,))]})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (0, 1))
    assert finding.cause == "Rank 0 sends float32 [8] to rank 1, which receives into float32 [4]"


def test_a_send_whose_peer_went_on_to_a_barrier() -> None:
    case = play({0: [message("send", 1, 5), barrier(9)], 1: [barrier(9)], 2: [barrier(9)]})
    assert [c for c, _ in found(case)] == ["p2p-mismatch"]


def test_a_peer_that_left() -> None:
    programs = {
        0: [message("send", 1, 13)],
        1: [message("recv", 0, 17), message("send", 0, 19), message("recv", 0, 20)],
    }
    case = play(programs, {0: DESTROYED})
    assert found(case) == [("missing-destroy", (0,))]
    assert found(lost(case, 1)) == [("missing-destroy", (0,))]
    assert found(play(programs, {0: died(0)})) == [("missing-destroy", (0,))]
    beside = the_one(play(same(3, [barrier(9), barrier(10)], r0=[barrier(9)]), {0: died(0)}))
    assert (beside.category, beside.ranks) == (Category.EARLY_EXIT, (0,))
    assert "exited with code 0" in beside.cause and "waiting in `barrier`" in beside.cause
    assert found(play(programs)) == [("p2p-mismatch", (0,))]


# -- groups of some ranks ------------------------------------------------------------------


def making(case: Case, lists: dict[int, list[tuple[int, ...]]], **more: Any) -> Case:
    """`case`, in which each rank gave these lists to `new_group` before."""
    path = places(4)
    ranks = tuple(
        replace(
            e,
            groups_made=tuple(
                GroupMade(number, members, path=path, **more)
                for number, members in enumerate(lists[e.rank], 1)
            ),
        )
        for e in case.ranks
    )
    return replace(case, ranks=ranks)


def test_a_rank_that_did_as_it_should_is_not_told_to_stay_out_of_its_own_group() -> None:
    # Rank 3 left a call of new_group out: what it calls group 2 is of other ranks.
    a, b, c = (0, 1), (0, 2), (2, 3)
    lists = {0: [a, b, c], 1: [a, b, c], 2: [a, b, c], 3: [a, c]}
    pair = all_reduce(5, group="2")
    case = play({0: [pair], 1: [], 2: [pair], 3: [pair]}, groups={"2": (0, 2, 3)})
    assert found(making(case, lists)) == [], "it may run and be right: nobody waits"
    stuck = play({0: [pair, barrier(9)], 1: [], 2: [pair], 3: [pair]}, groups={"2": (0, 2, 3)})
    finding = diagnose_run(making(stuck, lists)).findings[0]
    assert (finding.category, finding.ranks) == (Category.SUBGROUP_MISUSE, (3,))
    assert finding.cause.startswith("`new_group` call 2: rank 3 lists ranks 2")
    assert "with the same lists, in the same order" in finding.remedy
    assert finding.evidence[-1].startswith("rank 3: `new_group` of [0-1], [2-3]; group 2 at train")
    finding = diagnose_run(making(stuck, lists, called="dp", of_mesh=True)).findings[0]
    assert (finding.category, finding.ranks) == (Category.MESH_MISMATCH, (3,))
    assert finding.cause.endswith(f"list {name_ranks((0, 2))} (dp)")


def test_of_two_orders_of_new_group_neither_is_right_unless_a_test_of_the_rank_made_one() -> None:
    lists = {0: [(0, 1), (1,)], 1: [(1,), (0, 1)]}
    stuck = making(play({0: [all_reduce(9)], 1: []}), lists)
    assert [f.ranks for f in diagnose_run(stuck).findings] == [(0, 1)]
    stuck = making(stuck, {**lists, 1: []})
    assert diagnose_run(stuck).findings[0].category is not Category.SUBGROUP_MISUSE
    alone = making(play({0: [all_reduce(9)], 1: []}), {0: [(0,), (0, 1)], 1: [(0, 1)]})
    other = replace(alone.ranks[1].groups_made[0], path=places(6))
    alone = replace(alone, ranks=(alone.ranks[0], replace(alone.ranks[1], groups_made=(other,))))
    code = "import x\n\nif rank == 0:\n    new_group([0])\n\nnew_group([0, 1])\n"
    assert diagnose_run(alone, {"train.py": code}).findings[0].ranks == (0,)


def test_a_majority_that_an_unseen_rank_could_undo_names_no_minority() -> None:
    # From outside only those are seen to make a group that are in there.
    stuck = play({0: [all_reduce(9)], 1: [], 2: [], 3: []})
    lists = {0: [], 1: [(0, 1)], 2: [(1, 2, 3)], 3: [(1, 2, 3)]}
    assert diagnose_run(making(stuck, lists)).findings[0].ranks == (1, 2, 3)
    all_seen = diagnose_run(making(stuck, {**lists, 0: [(1, 2, 3)]})).findings[0]
    assert all_seen.ranks == (1,)


# -- DDP -----------------------------------------------------------------------------------


def test_a_rank_whose_backward_reduces_only_some_buckets() -> None:
    step = [forward(), backward(20, (5,)), backward(20, (7,))]
    for after in ([barrier(30)], step, []):
        case = play(same(3, [*DDP, *step, *step, barrier(30)], r1=[*DDP, *step, *step[:2], *after]))
        assert found(case) == [("unused-params", (1,))], after


def test_the_error_of_the_next_forward_names_unused_parameters() -> None:
    error = raised("Expected to have finished reduction in the prior iteration", "RuntimeError")
    case = play(same(3, [*DDP, backward(), backward()], r1=[*DDP]), {1: error})
    assert found(case) == [("unused-params", (1,))]
    assert found(play(same(2, [*DDP]), {0: error, 1: error})) == [("unused-params", (0, 1))]
    counts = ReplicaCounts("net", unready_steps=1, unready=("b.weight", "b.bias"))
    case = replace(
        case, ranks=tuple(replace(e, parts=ModelParts(replicas=(counts,))) for e in case.ranks)
    )
    told = diagnose_run(case).headline
    assert told == "`b.weight` and `b.bias` got no gradient on rank 1 in the previous step"


def test_a_rank_that_goes_forward_and_reduces_nothing() -> None:
    step = [forward(), backward()]
    case = play(same(3, [*DDP, *step * 4], r2=[*DDP, *step, forward(), *step, *step]))
    assert found(case) == [("no-sync-misuse", (2,))]
    code = "\n" * 18 + "loss = net(x)\nloss.backward()\n"
    assert found(case, {"train.py": code}) == [("divergent-control-flow", (2,))]


@pytest.mark.parametrize("size", [2, 3])
def test_a_pass_whose_buckets_are_all_on_their_way_is_whole(size: int) -> None:
    """DDP issues its buckets without waiting: a rank may stand in the last of several."""
    buckets = [backward(20, (5,)), backward(20, (7,))]
    for before, line in ((DDP, 15), ([*DDP, *buckets], 15), ([*DDP, *buckets], 28)):
        save = barrier(line, (3, "save"))
        case = play(same(size, [*before, *buckets], r0=[*before, save, *buckets]))
        of = dict(case.collectives.of)
        for rank in range(1, size):
            second = replace(buckets[1], rank=rank, number=len(of[rank]), slot=len(of[rank]))
            of[rank] = (*of[rank], second)
        case = replace(case, collectives=replace(case.collectives, of=of))
        assert found(case) == [("conditional-collective", (0,))]


def test_a_barrier_before_the_first_backward_is_no_matter_of_gradients() -> None:
    case = play(
        same(3, [*DDP, forward(19), backward()], r0=[*DDP, forward(), barrier(12), backward()])
    )
    assert found(case) == [("conditional-collective", (0,))]
    case = play(same(3, [*DDP, backward(), barrier(30)], r0=[*DDP, barrier(30)]))
    assert found(case) == [("divergent-control-flow", (0,))]


def test_join_may_pair_other_lines() -> None:
    step = [op("all_reduce", 30, api="join", shape=(1,)), backward()]
    shadow = [op("all_reduce", 40, api="join", shape=(1,)), replace(backward(40), api="join")]
    case = play({r: [*DDP, *step * (3 + 2 * r), *shadow * (4 - 2 * r)] for r in range(3)})
    assert found(case) == []


# -- refusals that the code catches ----------------------------------------------------------


def test_a_refused_collective_that_is_called_again_in_its_place_is_no_mistake() -> None:
    usual, odd = all_reduce(9, shape=(8,)), all_reduce(9, shape=(5,))
    assert not found(play(same(3, [usual, barrier(12)], r1=[refused(odd), usual, barrier(12)])))
    assert not found(play(same(3, [usual, barrier(12)])))


# -- tasks of an event loop --------------------------------------------------------------
