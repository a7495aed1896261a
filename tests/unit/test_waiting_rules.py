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
)

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.diagnosis.collectives.wait_graph import pairs, wait_graph
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.model import (
    Activity,
    Blocked,
    Case,
    Child,
    Collective,
    Collectives,
    Lacks,
    Phase,
    Place,
    RankReport,
    ThreadError,
)

FOR_KEY = RankReport(0, Activity.WAITING, "key", initialized=True, key="ready")

# -- a thread that raised ------------------------------------------------------------------

LOADER = ThreadError("loader", "KeyError", "'shard 3'", (Place("train.py", 6, "load", "x[i]"),))


def waits_for_thread(*, locked: bool) -> Case:
    alone = replace(BUSY, locked=locked, in_threads=(LOADER,), doing="train.py:9")
    return play({0: [all_reduce(10)], 1: [], 2: [all_reduce(10)]}, {1: alone})


def test_a_thread_that_raised_while_its_rank_waits_for_it_for_ever_is_named() -> None:
    finding = the_one(waits_for_thread(locked=True))
    assert (finding.category, finding.ranks) == ("exception-on-one-rank", (1,))
    assert finding.waiting == (0, 2)
    assert finding.cause.startswith(
        "its thread 'loader' raised KeyError: 'shard 3' at train.py:6 in load; the main thread"
    )
    alone = replace(BUSY, locked=True, in_threads=(LOADER,))
    every = Case(tuple(replace(alone, rank=rank) for rank in (0, 1)))
    assert found(every) == [("exception", (0, 1))], "before any collective, too"


def test_a_thread_that_raised_is_no_mistake_where_its_rank_goes_on() -> None:
    (late,) = diagnose_run(waits_for_thread(locked=False)).findings
    assert late.passing and any("'loader' raised KeyError" in line for line in late.evidence)
    assert found(play({0: [], 1: []}, {1: replace(DONE, in_threads=(LOADER,))})) == []


def test_a_thread_that_raised_instead_of_a_collective_that_the_others_are_in() -> None:
    step = all_reduce((5, "load"))
    ended = {1: replace(DONE, in_threads=(LOADER,))}
    case = play({0: [step, all_reduce(9)], 1: [all_reduce(9)], 2: [step, all_reduce(9)]}, ended)
    assert found(case) == [("exception-on-one-rank", (1,))]
    elsewhere = replace(LOADER, path=(Place("train.py", 2, "telemetry"),))
    case = replace(
        case,
        ranks=tuple(replace(e, in_threads=(elsewhere,)) if e.in_threads else e for e in case.ranks),
    )
    assert found(case) == [("conditional-collective", (1,))], "it has nothing to do with it"


FED = """
def load(out):
    if rank == 1:
        seen.append(1)
        {raises}
    out.append(tensor())
box, seen = [], []
t = Thread(target=load, args=(box,))
t.start()
t.join()
rows = box
{test}
    all_reduce(rows)
barrier()
"""


def fed(test: str, size: int = 2) -> tuple[Case, dict[str, str]]:
    """A thread of rank 1 raised, and rank 1 is in the barrier: the others are behind `test`."""
    raised = replace(LOADER, path=(Place("train.py", 5, "load", "x[i]"),))
    case = play({r: [barrier(14)] if r == 1 else [all_reduce(13)] for r in range(size)})
    ranks = tuple(replace(e, in_threads=(raised,) if e.rank == 1 else ()) for e in case.ranks)
    return replace(case, ranks=ranks), {"train.py": FED.format(raises="x[i]", test=test)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "test", ["if rows:", "while rows:", "for x in box:", "if not t.x and box:"]
)
def test_what_hangs_on_what_a_thread_writes_is_left_out_where_the_thread_raised(
    test: str, size: int
) -> None:
    finding = the_one(*fed(test, size))
    assert (finding.category, finding.ranks) == ("exception-on-one-rank", (1,))
    assert finding.waiting == tuple(r for r in range(size) if r != 1)
    assert "raised KeyError: 'shard 3' at train.py:5 in load" in finding.cause
    assert "all_reduce at train.py:13" in finding.cause


def test_a_test_that_has_nothing_to_do_with_the_thread_leaves_it_open_who_is_wrong() -> None:
    case, code = fed("if loss < 1:")
    open_ = the_one(case, code)
    assert (open_.category, open_.ranks) == ("undecided", ())
    assert "'loader' raised KeyError" in open_.cause and "if loss < 1:" in open_.cause
    assert open_.waiting == (0, 1)
    module = {"train.py": code["train.py"].replace("loss < 1", "torch.isnan(loss)")}
    module["train.py"] = module["train.py"].replace("seen.append(1)", "torch.save(1)")
    assert the_one(case, module).category == "undecided", "both use a module of another cell"
    victim = replace(LOADER, text="Connection closed by peer", path=LOADER.path)
    every = replace(case, ranks=tuple(replace(e, in_threads=(LOADER,)) for e in case.ranks))
    told = replace(case, ranks=tuple(replace(e, in_threads=(victim,)) for e in case.ranks))
    for other in (every, told):
        assert found(other, code) == [("conditional-collective", (0,))]


def test_a_test_of_the_rank_is_a_better_reason_than_a_thread_that_raised() -> None:
    by_rank = the_one(*fed("if rank == 0 and box:"))
    assert (by_rank.category, by_rank.ranks) == ("conditional-collective", (0,))
    assert any("'loader' raised KeyError" in line for line in by_rank.evidence)


def test_a_rank_that_waits_for_processes_that_it_started_is_late_and_they_are_told() -> None:
    child = Child(4711, "sleeping", 12.0)
    parent = replace(BUSY, doing="cell 7, line 3", children=(child,))
    case = play({0: [barrier(5)], 1: []}, {1: parent})
    (late,) = diagnose_run(case).findings
    assert late.passing and late.ranks == (1,)
    assert "with the processes that it started" in late.cause
    assert any(
        "4711" in line and "sleeping and has not run for 12 s" in line for line in late.evidence
    )
    assert "4711" in doing(parent)


# -- a lock, a file or a process of its own --------------------------------------------------

QUEUE = Blocked(Lacks.LOCK, "Queue.get()", threads=("its thread 'loader' waits at train.py:6",))
IN_GET = replace(BUSY, doing="train.py:9", path=(Place("train.py", 9, "", "q.get()"),), pid=71)


def stuck_at(blocked: Blocked, *others: RankReport) -> Case:
    """Rank 1 of three is blocked; the others wait in all_reduce."""
    ends = {1: replace(IN_GET, blocked=blocked), **dict(enumerate(others, 2))}
    case = play({0: [all_reduce(10)], 1: [], 2: [] if others else [all_reduce(10)]}, ends)
    ranks = tuple(replace(e, pid=70 + e.rank, at_rest=True) for e in case.ranks)
    return replace(case, ranks=ranks)


def test_a_rank_none_of_whose_threads_can_fill_its_queue_is_named() -> None:
    finding = the_one(stuck_at(QUEUE))
    assert (finding.category, finding.ranks, finding.waiting) == ("local-deadlock", (1,), (0, 2))
    assert finding.cause.startswith("rank 1 waits for ever at train.py:9: Queue.get() needs")
    assert "rank 1: its thread 'loader' waits at train.py:6" in finding.evidence
    alone = replace(IN_GET, blocked=QUEUE)
    every = Case(tuple(replace(alone, rank=rank) for rank in (0, 1)))
    assert found(every) == [("local-deadlock", (0, 1))], "before any collective, too"
    over = Case(tuple(replace(e, activity=Activity.IDLE) for e in every.ranks))
    assert found(over) == [], "their run has ended"
    pipe = the_one(stuck_at(Blocked(Lacks.PIPE, holder=4711)))
    assert (
        pipe.category == "local-deadlock" and "rank 1: it waits for process 4711" in pipe.evidence
    )


def test_a_rank_whose_event_loop_has_nothing_left_to_run_is_named() -> None:
    line = "its task 'Task-1' waits at train.py:7 in collect"
    finding = the_one(stuck_at(Blocked(Lacks.EVENT, threads=(line,))))
    assert (finding.category, finding.ranks, finding.waiting) == ("local-deadlock", (1,), (0, 2))
    assert "waits for ever at train.py:9: its event loop has no timer" in finding.cause
    assert f"rank 1: {line}" in finding.evidence and "wait_for" in finding.remedy


def test_a_lock_on_a_file_that_a_rank_at_work_or_no_rank_holds_is_waited_for() -> None:
    at_work = stuck_at(Blocked(Lacks.FILE_LOCK, "/data/a.lock", 72), BUSY)
    assert {f.passing for f in diagnose_run(at_work).findings} == {True}
    for_others = stuck_at(Blocked(Lacks.FILE_LOCK, "/data/a.lock", 4711))
    assert found(for_others) == [], "who has it goes on"
    saves = stuck_at(Blocked(Lacks.FILE_LOCK, "/data/a.lock", 70))
    saves = replace(saves, ranks=(replace(saves.ranks[0], at_rest=False), *saves.ranks[1:]))
    assert found(saves) == [], "a thread of the holder may release it"


def test_a_fifo_is_waited_for_in_vain_where_all_other_ranks_wait() -> None:
    fifo = Blocked(Lacks.FIFO, "/data/orders")
    finding = the_one(stuck_at(fifo))
    assert (finding.category, finding.ranks, finding.waiting) == ("filesystem", (1,), (0, 2))
    assert "the FIFO /data/orders" in finding.cause
    assert {f.passing for f in diagnose_run(stuck_at(fifo, BUSY)).findings} == {True}


@pytest.mark.parametrize("lacks", Lacks)
def test_of_a_rank_that_waits_by_itself_it_is_said_for_what(lacks: Lacks) -> None:
    assert doing(replace(IN_GET, blocked=Blocked(lacks))).startswith("waits for ")


def test_ranks_that_wait_on_one_line_for_files_of_other_names_are_one_finding() -> None:
    waits = [replace(BUSY, polls_for=f"/tmp/{name}/ready", doing="train.py:8") for name in "ab"]
    case = play({0: [barrier(9)], 1: [], 2: []}, {1: waits[0], 2: waits[1]})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == ("filesystem", (1, 2))
    assert "under 2 paths" in finding.cause and "rank 2: at train.py:8, for /tmp/b" in str(finding)


def test_a_process_that_the_users_interrupt_ended_is_no_finding_unless_others_wait_for_it() -> None:
    dead = RankReport(0, Activity.DEAD, exit_code=1, last_words="...\nKeyboardInterrupt\n")
    case = Case((dead, replace(IDLE[1], rank=1)), script=True)
    assert not list(deaths(case, [dead], ()))
    assert [each.ranks for each in deaths(case, [dead], (1,))] == [(0,)]
    other = replace(dead, last_words="KeyError: 3")
    assert [each.ranks for each in deaths(case, [other], ())] == [(0,)]


# -- a key of the store ------------------------------------------------------------------


def test_a_key_that_no_rank_can_set_any_more_is_named() -> None:
    finding = the_one(play({0: [barrier(5)], 1: [], 2: [barrier(5)]}, {1: FOR_KEY}))
    assert (finding.category, finding.ranks, finding.waiting) == ("unset-key", (1,), (0, 2))
    assert "'ready', which no rank has set" in finding.cause
    assert "ranks 0,2 are in barrier at train.py:5" in finding.cause


def test_where_most_ranks_wait_for_the_key_it_is_the_other_who_had_to_set_it() -> None:
    case = play({0: [barrier(5)], 1: [barrier(5)], 2: [barrier(5)]}, {1: FOR_KEY, 2: FOR_KEY})
    finding = the_one(case)
    assert (finding.ranks, finding.waiting) == ((0,), (1, 2))
    assert "rank 0 has finished" in finding.cause


def test_a_loop_that_asks_for_another_value_of_a_key_is_quoted() -> None:
    asks = replace(FOR_KEY, key_test="store.get('ready') != b'2'")
    finding = the_one(play({0: [barrier(5)], 1: [], 2: [barrier(5)]}, {1: asks}))
    assert finding.category == "unset-key"
    assert "another value of the store's key 'ready' (store.get('ready') != b'2')" in finding.cause
    assert "which no rank has set" not in finding.cause


@pytest.mark.parametrize(
    ("key", "keys_set", "ranks"),
    [
        ("done/0/0, done/0/1, done/0/2", ("done/0/0", "done/0/1", "done/1/2"), (2,)),
        ("step/7", ("", "step/5 step/6", ""), (1,)),
        ("step/7", ("step/5", "step/6", ""), (0, 1, 2)),  # any of two may go on counting
        ("ready", ("there", "done/1", ""), (0, 1, 2)),
    ],
)
def test_who_had_to_set_a_key_is_known_by_what_the_others_set(
    key: str, keys_set: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    waits = (
        replace(FOR_KEY, rank=rank, key=key, keys_set=tuple(each.split()))
        for rank, each in enumerate(keys_set)
    )
    case = Case(tuple(waits))
    assert found(case) == [("unset-key", ranks)]
    assert ("is rank 2's to set" in the_one(case).cause) == (ranks == (2,))


@pytest.mark.parametrize(
    ("key", "source", "ranks"),
    [
        ("ready", "", (0, 1)),
        ("ready", "store.wait(['ready'])", (0, 1)),
        ("rank_0/ready", "", (0,)),
        ("rank_1/ready", "", (0, 1)),
        ("epoch/0", "", (0, 1)),
        ("ready", "store.wait(['ready'])\nif rank == 0 and ok:\n    store.set('ready', '1')", (0,)),
        ("ready", "store.wait(['ready'])\nif rank == 1:\n    store.set('ready', '1')", (0, 1)),
        ("ready", "store.wait(['ready'])\nif ok:\n    store.set('ready', '1')", (0, 1)),
        ("ready", "if rank == 1: store.wait(['ready'])", (0,)),
        ("ready", "if missing: store.wait(['ready'])", (0, 1)),
    ],
)
def test_whose_key_it_is_of_two_ranks_is_told_by_its_name_or_the_code_or_not_at_all(
    key: str, source: str, ranks: tuple[int, ...]
) -> None:
    waits = replace(FOR_KEY, rank=1, key=key, path=(Place("train.py", 1),))
    case = play({0: [barrier(5)], 1: [barrier(5)]}, {1: waits})
    (finding,) = diagnose_run(case, {"train.py": source}).findings
    assert (finding.category, finding.ranks) == ("unset-key", ranks)
    words = "whose it is to set cannot be told"
    if len(ranks) == 1:
        words = f"it is rank {ranks[0]}'s to set, as its name or the code tells"
    assert words in finding.cause


def test_before_any_collective_the_key_is_named_too() -> None:
    reports = (replace(FOR_KEY, rank=0), replace(FOR_KEY, rank=1))
    assert found(Case(reports)) == [("unset-key", (0, 1))]


def test_a_rank_that_still_works_may_set_the_key() -> None:
    reports = (replace(BUSY, rank=0, doing="cell 3, line 4"), replace(FOR_KEY, rank=1))
    (finding,) = diagnose_run(Case(reports)).findings
    assert finding.passing and (finding.category, finding.ranks) == ("straggler", (0,))
    assert "'ready'" in finding.cause


GAVE_UP = RankReport(
    0,
    Activity.FAILED,
    error_type="DistStoreError",
    error_text="wait timeout after 2000ms, keys: /default_pg/0//ready",
    error_at=(Place("train.py", 8, "vocabulary", "store.wait(['ready'], two_seconds)"),),
)


@pytest.mark.parametrize(
    ("other", "category", "ranks", "words"),
    [
        (replace(DONE, keys_set=("ready",)), "straggler", (0,), "only after ranks 1-2 gave it up"),
        (replace(BUSY, doing="train.py:4"), "straggler", (0,), "it is busy in train.py:4"),
        (DONE, "unset-key", (0,), "which no rank has set"),
        (replace(DONE, keys_set=("read",)), "unset-key", (0,), "which no rank has set"),
    ],
)
def test_who_is_to_set_the_key_that_others_gave_up_is_named(
    other: RankReport, category: str, ranks: tuple[int, ...], words: str
) -> None:
    ends = {0: other, 1: GAVE_UP, 2: GAVE_UP}
    for first in ([], [all_reduce(3)]):  # in set-up, and later
        finding = the_one(play({0: first, 1: first, 2: first}, ends))
        assert (finding.category, finding.ranks) == (category, ranks)
        assert words in finding.cause and not finding.passing


def test_a_key_that_torch_waited_for_or_whose_setter_failed_is_no_fault_of_the_others() -> None:
    of_torch = replace(GAVE_UP, error_at=(Place("train.py", 2, "", "dist.new_group([0, 1])"),))
    step = [all_reduce(3)]
    for first, last in ((DONE, of_torch), (raised("'lr'", "KeyError"), GAVE_UP)):
        case = play({0: step, 1: step, 2: step}, {0: first, 1: last, 2: last})
        assert not {"unset-key", "straggler"} & {category for category, _ in found(case)}
    # Two others have set theirs: which of both came too late is not known.
    keys = replace(GAVE_UP, error_text="wait timeout after 9ms, keys: /a//done/0, /a//done/1")
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
    assert finding.ranks == (0, 1) and finding.cause.startswith("the tags differ")


def test_neighbours_that_receive_under_their_own_tags_are_all_told() -> None:
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
    assert finding.ranks == (0, 1, 2) and finding.cause.startswith("the tags differ")


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
        thread=thread,
        waited=True,
        issued_ns=issued_ns,
        done_ns=done_ns,
        phase=Phase.DONE if done_ns else Phase.ISSUED,
    )


def test_two_threads_in_one_group_at_once_are_named_where_nothing_moves_any_more() -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    of = {
        0: [in_thread(1, 0, 10, 0, 5), in_thread(2, 1, 11, 0, 6)],
        1: [in_thread(1, 0, 10, 0, 5), in_thread(2, 1, 12, 0, 6)],
    }
    finding = the_one(case_of(of, *waits))
    assert (finding.category, finding.ranks) == ("mismatched-order", (0, 1))
    assert "two threads of ranks 0-1 each use one group at the same time" in finding.cause
    moving = [replace(e, runnable=True) for e in waits]
    assert not found(case_of(of, *moving))


@pytest.mark.parametrize(("issued_ns", "twice"), [(11, True), (31, False)])
def test_a_thread_that_was_refused_beside_another_in_one_group(issued_ns: int, twice: bool) -> None:
    waits = [replace(RankReport(r), activity=Activity.WAITING, inside="collective") for r in (0, 1)]
    first = in_thread(1, 0, 10, 0 if twice else 20, 5)
    other = replace(in_thread(2, 1, issued_ns, issued_ns, 6), phase=Phase.REFUSED, waited=False)
    told = found(case_of({0: [first, other], 1: [first]}, *waits))
    assert (("mismatched-order", (0,)) in told) == twice


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
    ranks = tuple(replace(e, last_words=words) if e.rank == 1 else e for e in case.ranks)
    case = replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))
    finding = the_one(case)
    assert (finding.category, finding.ranks) == ("shape-mismatch", (0, 1, 2))
    assert "rank 1 got 320 bytes" in finding.cause and "192 at most" in finding.cause
    assert finding.commands == ("%ddp_restart --ranks 1",)
    mute = tuple(replace(e, last_words="") for e in ranks)
    assert found(replace(case, ranks=mute)) == [("rank-died", (1,))]
