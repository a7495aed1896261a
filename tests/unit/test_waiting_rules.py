"""Ranks that wait for a key, for a message from anybody, or in two threads at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, the_one
from traces import (
    BUSY,
    DESTROYED,
    DONE,
    all_reduce,
    barrier,
    died,
    message,
    op,
    play,
    raised,
    report,
    with_facts,
)

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.diagnosis.collectives.wait_graph import pairs, wait_graph
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing, standing
from ddp_notebook.model import (
    Activity,
    CallFacts,
    Case,
    Collective,
    Collectives,
    InitArguments,
    Phase,
    Place,
    RankError,
    RankReport,
    ThreadError,
)

FOR_KEY = report(0, Activity.WAITING, "key", initialized=True, key="ready")

# -- a rank at one place: a lock, a queue, a process, a sleep, a file ------------------------


def test_a_rank_that_stands_at_one_place_is_waited_for_and_its_place_is_told() -> None:
    in_get = with_facts(BUSY, doing="Queue.get (train.py, line 40)", still_s=12.0)
    case = play({0: [all_reduce(10)], 1: [], 2: [all_reduce(10)]}, {1: in_get})
    (late,) = diagnose_run(case).findings
    assert late.passing and (late.category, late.ranks) == ("straggler", (1,))
    assert late.cause.endswith("it is busy, but uses no CPU time")
    assert "it has been in Queue.get (train.py, line 40) for 12 s" in late.evidence
    assert doing(in_get) == "in Queue.get (train.py, line 40) for 12 s, using no CPU time"
    asleep = replace(in_get, doing="train.py, line 40")
    assert doing(asleep) == "in train.py, line 40 for 12 s, using no CPU time"
    assert doing(with_facts(in_get, still_s=1.0)) == "busy: Queue.get (train.py, line 40)"
    assert standing((in_get, replace(in_get, rank=1), replace(BUSY, rank=2))) == (
        "ranks 0 and 1 have been in Queue.get (train.py, line 40) for 12 s, using no CPU time"
    )
    in_setup = with_facts(FOR_KEY, rank=0, key="", inside="store", entered=1)
    (late,) = diagnose_run(Case((in_setup, replace(in_get, rank=1)))).findings
    assert late.passing and "busy in Queue.get (train.py, line 40), but uses" in late.cause


def test_what_a_thread_of_a_late_rank_raised_is_told_beside_it() -> None:
    loader = ThreadError("loader", "KeyError", "'shard 3'", (Place("train.py", 6, "load"),))
    waits = replace(BUSY, in_threads=(loader,), doing="train.py, line 9")
    (late,) = diagnose_run(play({0: [all_reduce(10)], 1: []}, {1: waits})).findings
    assert late.passing and any("'loader' raised KeyError" in line for line in late.evidence)
    assert found(play({0: [], 1: []}, {1: replace(DONE, in_threads=(loader,))})) == []


def test_ranks_that_wait_on_one_line_for_files_of_other_names_are_one_finding() -> None:
    waits = [
        with_facts(BUSY, polls_for=f"/tmp/{name}/ready", doing="train.py, line 8") for name in "ab"
    ]
    case = play({0: [barrier(9)], 1: [], 2: []}, {1: waits[0], 2: waits[1]})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == ("filesystem", (1, 2))
    assert "under 2 paths" in finding.cause and "rank 2: at train.py, line 8, for /tmp/b" in str(
        finding
    )


def test_a_process_that_the_users_interrupt_ended_is_no_finding_unless_others_wait_for_it() -> None:
    dead = report(0, Activity.DEAD, exit_code=1, last_words="...\nKeyboardInterrupt\n")
    case = Case((dead, replace(IDLE[1], rank=1)), script=True)
    assert not list(deaths(case, [dead], ()))
    assert [each.ranks for each in deaths(case, [dead], (1,))] == [(0,)]
    other = with_facts(dead, last_words="KeyError: 3")
    assert [each.ranks for each in deaths(case, [other], ())] == [(0,)]


# -- a key of the store ------------------------------------------------------------------


def test_a_key_that_no_rank_can_set_any_more_is_named() -> None:
    finding = the_one(play({0: [barrier(5)], 1: [], 2: [barrier(5)]}, {1: FOR_KEY}))
    assert (finding.category, finding.ranks, finding.waiting) == ("unset-key", (1,), (0, 2))
    assert "No rank will set the store's key 'ready'" in finding.cause
    assert "ranks 0 and 2 are waiting in `barrier` at train.py, line 5" in finding.evidence


def test_where_most_ranks_wait_for_the_key_it_is_the_other_who_had_to_set_it() -> None:
    case = play({0: [barrier(5)], 1: [barrier(5)], 2: [barrier(5)]}, {1: FOR_KEY, 2: FOR_KEY})
    finding = the_one(case)
    assert (finding.ranks, finding.waiting) == ((0,), (1, 2))
    assert "rank 0 has finished" in finding.evidence


def test_a_key_that_some_rank_has_set_lacks_another_value() -> None:
    counts = replace(FOR_KEY, keys_set=("ready",))
    finding = the_one(play({0: [barrier(5)], 1: [], 2: [barrier(5)]}, {1: counts}))
    assert (finding.category, finding.ranks) == ("unset-key", (1,))
    assert "No rank will set another value of the store's key 'ready'" in finding.cause
    assert "rank 1 has set 'ready'" in finding.evidence


def test_of_two_ranks_it_is_not_known_which_had_to_set_the_key() -> None:
    finding = the_one(play({0: [barrier(5)], 1: [barrier(5)]}, {1: FOR_KEY}))
    assert (finding.category, finding.ranks) == ("unset-key", (0, 1))
    assert "Which rank had to set it is not known" in finding.evidence


def test_before_any_collective_the_key_is_named_too() -> None:
    reports = (replace(FOR_KEY, rank=0), replace(FOR_KEY, rank=1))
    assert found(Case(reports)) == [("unset-key", (0, 1))]


def test_a_rank_that_still_works_may_set_the_key() -> None:
    reports = (replace(BUSY, rank=0, doing="cell 3, line 4"), replace(FOR_KEY, rank=1))
    (finding,) = diagnose_run(Case(reports)).findings
    assert finding.passing and (finding.category, finding.ranks) == ("straggler", (0,))
    assert "'ready'" in finding.cause


GAVE_UP = report(
    0,
    Activity.FAILED,
    error_type="DistStoreError",
    error_text="wait timeout after 2000ms, keys: /default_pg/0//ready",
    error_at=(Place("train.py", 8, "vocabulary", "store.wait(['ready'], two_seconds)"),),
)


@pytest.mark.parametrize(
    ("other", "category", "ranks", "words"),
    [
        (
            replace(DONE, keys_set=("ready",)),
            "straggler",
            (0,),
            "only after ranks 1 and 2 gave up",
        ),
        (
            replace(BUSY, doing="train.py, line 4"),
            "straggler",
            (0,),
            "rank 0 is busy in train.py, line 4",
        ),
        (DONE, "unset-key", (0,), "No rank has set"),
        (replace(DONE, keys_set=("read",)), "unset-key", (0,), "No rank has set"),
    ],
)
def test_who_is_to_set_the_key_that_others_gave_up_is_named(
    other: RankReport, category: str, ranks: tuple[int, ...], words: str
) -> None:
    ends = {0: other, 1: GAVE_UP, 2: GAVE_UP}
    for first in ([], [all_reduce(3)]):  # in setup, and later
        finding = the_one(play({0: first, 1: first, 2: first}, ends))
        assert (finding.category, finding.ranks) == (category, ranks)
        assert words in "; ".join((finding.cause, *finding.evidence)) and not finding.passing


def test_a_key_that_torch_waited_for_or_whose_setter_failed_is_no_fault_of_the_others() -> None:
    of_torch = with_facts(GAVE_UP, error_at=(Place("train.py", 2, "", "dist.new_group([0, 1])"),))
    step = [all_reduce(3)]
    for first, last in ((DONE, of_torch), (raised("'lr'", "KeyError"), GAVE_UP)):
        case = play({0: step, 1: step, 2: step}, {0: first, 1: last, 2: last})
        assert not {"unset-key", "straggler"} & {category for category, _ in found(case)}
    # Two others have set theirs: which of both came too late is not known.
    keys = with_facts(GAVE_UP, error_text="wait timeout after 9ms, keys: /a//done/0, /a//done/1")
    sets = {rank: replace(DONE, keys_set=(f"done/{rank}",)) for rank in (0, 1)}
    case = play({0: step, 1: step, 2: step}, {**sets, 2: keys})
    assert "straggler" not in {category for category, _ in found(case)}
    sets[1] = replace(keys, keys_set=("done/1",))
    case = play({0: step, 1: step, 2: step}, {**sets, 2: keys})
    assert found(case) == [("straggler", (0,))]


def test_one_rank_that_can_get_on_is_enough_to_set_the_key() -> None:
    case = play({0: [], 1: [all_reduce(5, group="g")], 2: [], 3: []}, groups={"g": (1, 3)})
    reports = {0: replace(FOR_KEY, rank=0), 2: replace(BUSY, rank=2), 3: replace(BUSY, rank=3)}
    case = replace(case, ranks=tuple(reports.get(e.rank, e) for e in case.ranks))
    assert wait_graph(case).stuck == ()


def test_whoever_died_before_it_could_set_the_key_explains_it() -> None:
    case = play({0: [barrier(5)], 1: [barrier(5)]}, {0: died(-9), 1: FOR_KEY})
    assert found(case) == [("rank-died", (0,))]


# -- from anybody ------------------------------------------------------------------------


def from_anybody(source: int | None = None, **more: object) -> Collective:
    return replace(message("recv", 0, 5), peer=source, **more)  # type: ignore[arg-type]


def case_of(of: dict[int, list[Collective]], *reports: RankReport) -> Case:
    records = {
        rank: tuple(replace(each, rank=rank, number=n) for n, each in enumerate(those))
        for rank, those in of.items()
    }
    return Case(reports, collectives=Collectives(records))


IDLE = tuple(RankReport(rank, Activity.IDLE, initialized=True) for rank in range(3))


def test_a_message_received_from_anybody_is_paired_with_the_one_that_was_sent() -> None:
    long, short = {"shape": (8,), "numel": 8}, {"shape": (2,), "numel": 2}
    case = case_of(
        {
            0: [from_anybody(1, **long), replace(message("recv", 1, 6), **short)],
            1: [message("send", 0, 9, **long), message("send", 0, 10, **short)],
        },
        *IDLE[:2],
    )
    assert [(s.shape, r.shape) for s, r in pairs(case.collectives)] == [((8,),) * 2, ((2,),) * 2]
    assert not found(case)


def test_while_it_is_not_known_from_whom_nothing_is_paired() -> None:
    case = case_of(
        {
            0: [from_anybody(shape=(8,)), message("recv", 1, 6, dtype="int64")],
            1: [message("send", 0, 9, shape=(8,)), message("send", 0, 10, dtype="int64")],
        },
        *IDLE[:2],
    )
    assert not list(pairs(case.collectives)) and not found(case)


def test_one_sender_who_still_works_is_enough_for_a_recv_from_anybody() -> None:
    waits = RankReport(0, Activity.WAITING, "collective", initialized=True)
    done = from_anybody(1, phase=Phase.DONE)
    of = {0: [done, from_anybody()], 1: [message("send", 0, 9, phase=Phase.DONE)], 2: []}
    working = replace(BUSY, rank=2)
    assert wait_graph(case_of(of, waits, IDLE[1], working)).stuck == ()
    over = case_of(of, waits, IDLE[1], IDLE[2])
    assert found(over) == [("p2p-mismatch", (2,))], "rank 1 has sent one, rank 2 none"


def test_a_peer_that_left_is_named_also_where_its_last_message_was_small_enough_to_pass() -> None:
    """The system takes a small message; who sent it then waits for the next one."""
    waits = RankReport(1, Activity.WAITING, "collective", initialized=True)
    sends = message("send", 1, 13, phase=Phase.DONE)
    gets, answers = (
        message("recv", 0, 17, phase=Phase.DONE),
        message("send", 0, 19, phase=Phase.DONE),
    )
    of = {0: [sends], 1: [gets, answers, message("recv", 0, 20)]}
    assert found(case_of(of, DESTROYED, waits)) == [("missing-destroy", (0,))]
    of = {0: [sends], 1: [gets, message("recv", 0, 20)]}
    assert found(case_of(of, DESTROYED, waits)) == [("p2p-mismatch", (0,))], "it owes nothing"


@pytest.mark.parametrize(
    ("sent_by_1", "sent_by_2", "culprits"), [(1, 0, (2,)), (2, 1, (2,)), (1, 1, (0,)), (0, 3, (1,))]
)
def test_of_messages_from_any_rank_who_sent_fewer_lacks_one(
    sent_by_1: int, sent_by_2: int, culprits: tuple[int, ...]
) -> None:
    case = play(
        {
            0: [*(from_anybody(r) for r in (1,) * sent_by_1 + (2,) * sent_by_2), from_anybody()],
            1: [*[message("send", 0, 9)] * sent_by_1, barrier(12)],
            2: [*[message("send", 0, 9)] * sent_by_2, barrier(12)],
        }
    )
    assert found(case) == [("p2p-mismatch", culprits)]


def test_a_message_with_another_tag_is_not_the_one_that_is_waited_for() -> None:
    waits = RankReport(0, Activity.WAITING, "collective", initialized=True)
    sends = replace(waits, rank=1)
    of = {0: [from_anybody(tag=3)], 1: [message("send", 0, 9, tag=4)]}
    finding = the_one(case_of(of, waits, sends))
    assert finding.ranks == (0, 1) and finding.cause.endswith("do not match: 3 and 4")


def test_neighbours_that_receive_under_their_own_tags_are_told() -> None:
    waits = RankReport(0, Activity.WAITING, "collective", initialized=True)
    up, down = 1, 2
    of = {
        0: [message("send", 1, 9, tag=down), message("recv", 1, 9, tag=down)],
        1: [
            *(message(what, 0, 8, tag=up) for what in ("send", "recv")),
            *(message(what, 2, 9, tag=down) for what in ("send", "recv")),
        ],
        2: [message("send", 1, 8, tag=up), message("recv", 1, 8, tag=up)],
    }
    finding = the_one(case_of(of, waits, replace(waits, rank=1), replace(waits, rank=2)))
    assert finding.ranks == (0, 1) and finding.cause.endswith("do not match: 1 and 2")


def test_of_two_works_that_are_not_done_the_rank_waits_for_the_one_that_lacks_a_rank() -> None:
    waits = RankReport(0, Activity.WAITING, "collective", initialized=True)
    sent, lacks = message("send", 1, 5), replace(all_reduce(6), slot=0)
    case = case_of({0: [sent, lacks], 1: [message("recv", 0, 9, phase=Phase.DONE)]}, waits, IDLE[1])
    assert wait_graph(case).at[0].operation == "all_reduce"
    assert wait_graph(case).stuck == (0,)


# -- threads -----------------------------------------------------------------------------


def in_thread(thread: int, slot: int, issued_ns: int, done_ns: int, line: int) -> Collective:
    return replace(
        all_reduce((line, "work")),
        slot=slot,
        call=CallFacts(thread=thread, waited=True),
        issued_ns=issued_ns,
        done_ns=done_ns,
        phase=Phase.DONE if done_ns else Phase.ISSUED,
    )


@pytest.mark.parametrize(("issued_ns", "at_once"), [(11, True), (31, False)])
def test_two_threads_that_use_one_group_at_the_same_time_are_told_with_the_mistake(
    issued_ns: int, at_once: bool
) -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    first = in_thread(1, 0, 10, 0 if at_once else 20, 5)
    other = in_thread(2, 1, issued_ns, 0, 6)
    odd = replace(other, shape=(9,), numel=9)
    finding = the_one(case_of({0: [first, other], 1: [first, odd]}, *waits))
    assert finding.category == "shape-mismatch"
    assert ("Give each thread a group of its own" in finding.remedy) == at_once
    began = "Rank 1: `all_reduce` (collective 1) began while `all_reduce` (collective 0) was"
    assert any(began in line for line in finding.evidence) == at_once


def test_a_message_to_a_rank_that_there_is_not_can_never_be_received() -> None:
    waits = [
        RankReport(r, Activity.WAITING, "collective", arguments=InitArguments(world_size=3))
        for r in range(3)
    ]
    of = {
        rank: [replace(message("send", rank + 1, 17), rank=rank, phase=Phase.ISSUED)]
        for rank in range(3)
    }
    assert wait_graph(case_of(of, *waits)).stuck == (0, 1, 2)
    # Of a job on several hosts that rank may be one that is not seen here.
    larger = [replace(e, arguments=InitArguments(world_size=4)) for e in waits]
    assert wait_graph(case_of(of, *larger)).stuck == ()


def test_threads_that_run_at_once_are_the_mistake_where_ranks_are_at_other_lines() -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    reduce, meet = in_thread(1, 0, 10, 0, 5), in_thread(2, 1, 11, 0, 6)
    apart = replace(meet, operation="barrier", api="barrier", shape=(), numel=0, dtype="")
    finding = the_one(case_of({0: [reduce, apart], 1: [reduce, in_thread(2, 1, 11, 0, 7)]}, *waits))
    assert (finding.category, finding.ranks) == ("mismatched-order", (0, 1))
    assert "Give each thread a group of its own" in finding.remedy


def test_what_gloo_could_not_join_though_all_wrote_down_the_same_is_of_two_threads() -> None:
    words = "16 vs 12. Received data size doesn't match expected size"
    dead = report(0, Activity.DEAD, exit_code=-6, last_words=words)
    waits = replace(RankReport(1), activity=Activity.WAITING, inside="collective")
    of = [in_thread(0, 0, 1, 2, 5), in_thread(1, 1, 10, 0, 6)]
    finding = the_one(case_of({0: of, 1: of}, dead, waits))
    assert (finding.category, finding.ranks) == ("mismatched-order", (0, 1))
    alone = [in_thread(0, 0, 1, 2, 5), in_thread(0, 1, 10, 0, 6)]
    finding = the_one(case_of({0: alone, 1: alone}, dead, waits))
    assert finding.category == "shape-mismatch"


def test_two_threads_in_one_group_at_once_are_named_where_nothing_moves_any_more() -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    of = {
        0: [in_thread(1, 0, 10, 0, 5), in_thread(2, 1, 11, 0, 6)],
        1: [in_thread(1, 0, 10, 0, 5), in_thread(2, 1, 12, 0, 6)],
    }
    finding = the_one(case_of(of, *waits))
    assert (finding.category, finding.ranks) == ("mismatched-order", (0, 1))
    assert "call collectives of one group from several threads" in finding.cause
    moving = [with_facts(e, runnable=True) for e in waits]
    assert not found(case_of(of, *moving))


def test_threads_that_take_turns_are_no_finding() -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    one = [in_thread(1, 0, 10, 20, 5), in_thread(2, 1, 30, 40, 6), in_thread(1, 2, 50, 0, 5)]
    assert not found(case_of({0: one, 1: one}, *waits))


def test_a_rank_that_gloo_ended_for_a_message_that_is_too_large_is_no_mystery() -> None:
    words = "op.nbytes. 320 vs 192. Received data size doesn't match expected size. Is there"
    step = op("all_to_all_single", 33)
    case = play({0: [step, barrier(40)], 1: [step], 2: [step, barrier(40)]}, {1: died(-6)})
    of = dict(case.collectives.of)
    of[1] = (replace(of[1][0], phase=Phase.ISSUED, done_ns=0),)
    ranks = tuple(with_facts(e, last_words=words) if e.rank == 1 else e for e in case.ranks)
    case = replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == ("shape-mismatch", (0, 1, 2))
    assert "Rank 1 received 320 bytes, not 192" in finding.cause
    assert finding.commands == ("%ddp_restart --ranks 1",)
    mute = tuple(with_facts(e, last_words="") for e in ranks)
    assert found(replace(case, ranks=mute)) == [("rank-died", (1,))]


@pytest.mark.parametrize(("second", "category"), [(2, "mismatched-order"), (1, "shape-mismatch")])
def test_what_gloo_ended_where_two_threads_use_one_group_is_left_to_chance(
    second: int, category: str
) -> None:
    """All wrote down the same shapes; the second call is of another thread, or of the same."""
    words = "op.nbytes. 8 vs 4. Received data size doesn't match expected size. Is there"
    of = {rank: [in_thread(1, 0, 10, 20, 5), in_thread(second, 1, 11, 0, 6)] for rank in (0, 1)}
    closed = RankError(type="RuntimeError", text="Connection closed by peer [127.0.0.1]:1")
    lost = replace(RankReport(1), activity=Activity.FAILED, error=closed, initialized=True)
    gone = with_facts(replace(RankReport(0), activity=Activity.DEAD), last_words=words)
    gone = replace(gone, end=replace(gone.end, code=-6))
    finding = the_one(case_of(of, gone, lost))
    assert (finding.category, finding.ranks) == (category, (0, 1))
    assert "Rank 0 received 8 bytes, not 4" in finding.cause
    assert ("threads" in finding.cause) is (category == "mismatched-order")
