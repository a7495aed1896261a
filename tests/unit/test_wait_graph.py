"""Who waits for whom, who can still get on, and who never will."""

from __future__ import annotations

from dataclasses import replace

from traces import BUSY, all_reduce, backward, barrier, message, play, raised, with_facts

from ddp_notebook.diagnosis.collectives.wait_graph import counterpart, wait_graph
from ddp_notebook.model import Activity, Case, Phase, RankReport

STEP = backward()


def can_progress(case: Case) -> bool:
    """True while some waiting rank may still be freed by what another does, or none waits."""
    return not case.waiting or bool(wait_graph(case).may_come & set(case.waiting))


def test_a_rank_waits_for_the_members_that_have_not_come() -> None:
    case = play({0: [STEP, STEP], 1: [STEP], 2: [STEP]}, {1: BUSY})
    graph = wait_graph(case)
    assert graph.waits == {0: (1, 2)}
    assert graph.at[0].slot == 1
    assert graph.stuck == (0,)  # rank 2 has finished, however busy rank 1 is
    assert not can_progress(case)


def test_waiting_for_a_busy_rank_through_others_ends() -> None:
    pair = all_reduce(5, group="pair")
    case = play({0: [pair, STEP], 1: [pair, STEP], 2: []}, {2: BUSY}, groups={"pair": (0, 1)})
    graph = wait_graph(case)
    assert graph.waits == {0: (2,), 1: (2,)}
    assert graph.stuck == ()
    assert can_progress(case)


def test_nobody_waits_and_ranks_that_compute() -> None:
    assert can_progress(play({0: [STEP], 1: [STEP]}))
    assert can_progress(play({0: [], 1: []}, {0: BUSY, 1: BUSY}))


def test_a_busy_rank_for_which_nobody_waits_frees_nobody() -> None:
    both = {r: [message("send", 1 - r, 5)] for r in (0, 1)}
    case = play({**both, 2: []}, {2: BUSY})
    assert wait_graph(case).cycles == ((0, 1),)
    assert not can_progress(case)


def test_ranks_in_one_slot_with_different_operations_wait_for_each_other() -> None:
    graph = wait_graph(play({0: [barrier(5)], 1: [STEP], 2: [STEP]}))
    assert graph.waits == {0: (1, 2), 1: (0,), 2: (0,)}
    assert graph.cycles == ((0, 1, 2),)


def test_on_a_gpu_a_message_behind_one_that_is_not_done_has_not_begun() -> None:
    """All have returned at once. As a batch, or with async_op, they are in no order."""
    case = play({r: [message("send", 1 - r, 5)] for r in (0, 1)})

    def with_recvs_behind(api: str) -> Case:
        of = {}
        for rank, (sent, *_) in case.collectives.of.items():
            first = replace(sent, api=api)
            of[rank] = (first, replace(first, operation="recv", api="recv", number=sent.number + 1))
        ranks = tuple(
            replace(each, waits_for=of[each.rank][0].number, awaits=replace(each.awaits, gpu=True))
            for each in case.ranks
        )
        return replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))

    assert wait_graph(with_recvs_behind("send")).cycles == ((0, 1),)
    assert wait_graph(with_recvs_behind("batch_isend_irecv")).cycles == ()
    assert wait_graph(with_recvs_behind("isend")).cycles == ()


def test_all_are_there_and_only_the_picture_is_old() -> None:
    case = play({0: [STEP, STEP], 1: [STEP, STEP]})
    late = play({0: [STEP, STEP], 1: [STEP, STEP]}, rounds=1)
    mixed = replace(
        case,
        ranks=(late.ranks[0], case.ranks[1]),
        collectives=replace(
            case.collectives, of={0: late.collectives.of[0], 1: case.collectives.of[1]}
        ),
    )
    assert mixed.ranks[0].activity is Activity.WAITING
    assert wait_graph(mixed).waits == {0: ()}
    assert can_progress(mixed)


def test_a_rank_that_waits_for_a_file_needs_somebody_to_write_it() -> None:
    polling = with_facts(BUSY, polls_for="/data/ready")
    assert not can_progress(play({0: [STEP], 1: []}, {1: polling}))
    assert can_progress(play({0: [STEP], 1: [], 2: []}, {1: polling, 2: BUSY}))


def test_a_held_or_silent_rank_may_still_come() -> None:
    for activity in (Activity.HELD, Activity.SILENT):
        case = play({0: [STEP], 1: []}, {1: replace(BUSY, activity=activity)})
        assert can_progress(case), activity


def test_a_collective_before_which_a_rank_is_held_has_not_come() -> None:
    case = play({0: [STEP], 1: [STEP]}, rounds=1)
    of = {**case.collectives.of, 1: (replace(case.collectives.of[1][0], phase=Phase.HELD),)}
    held = replace(case.ranks[1], activity=Activity.HELD, waits_for=None)
    case = replace(case, ranks=(case.ranks[0], held), collectives=replace(case.collectives, of=of))
    assert wait_graph(case).waits[0] == (1,)
    assert can_progress(case)


def test_a_rank_that_gave_up_waiting_does_not_come_any_more() -> None:
    case = play({0: [STEP, STEP], 1: [STEP, STEP, STEP]})
    gave_up = replace(raised("Timed out waiting 5000ms"), rank=1)
    case = replace(case, ranks=(case.ranks[0], gave_up))
    graph = wait_graph(case)
    assert graph.waits == {1: (0,)}
    assert graph.stuck == (1,)


def test_a_rank_that_failed_in_a_collective_frees_nobody_there() -> None:
    case = play({0: [STEP], 1: [STEP]}, rounds=1)
    of = {**case.collectives.of, 1: (replace(case.collectives.of[1][0], phase=Phase.FAILED),)}
    failed = replace(raised("bad argument", "ValueError"), rank=1)
    case = replace(
        case, ranks=(case.ranks[0], failed), collectives=replace(case.collectives, of=of)
    )
    assert wait_graph(case).stuck == (0,)
    assert not can_progress(case)


def test_a_rank_in_the_store_is_the_matter_of_set_up() -> None:
    ranks = (RankReport(0, Activity.WAITING, "store", entered=1), RankReport(1, Activity.IDLE))
    graph = wait_graph(Case(ranks))
    assert (graph.waits, graph.stuck) == ({}, ())


def test_a_rank_of_which_it_is_not_said_where_it_waits_is_in_its_oldest_pending() -> None:
    case = play({0: [STEP, STEP], 1: [STEP]})
    unsaid = replace(case.ranks[0], waits_for=None)
    assert wait_graph(replace(case, ranks=(unsaid, case.ranks[1]))).at[0].slot == 1


def test_messages_are_paired_in_the_order_in_which_they_were_sent() -> None:
    case = play(
        {
            0: [message("send", 1, 5), message("send", 1, 6, tag=3), message("send", 1, 7)],
            1: [message("recv", 0, 8), message("recv", 0, 9, tag=3)],
        }
    )
    sent = case.collectives.of[0]
    first, second = (counterpart(case.collectives, each) for each in sent[:2])
    assert first is not None and first.place is not None and first.place.line == 8
    assert second is not None and second.tag == 3
    assert counterpart(case.collectives, sent[2]) is None
    assert wait_graph(case).waits == {0: (1,)}
