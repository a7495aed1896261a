"""Which of few ranks is wrong: who tried again, whose peer is new, whose store is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import DDP, found, lost, same, the_one
from msgspec import structs
from traces import BUSY, DONE, all_reduce, backward, barrier, forward, message, op, play, raised

from ddp_notebook.diagnosis import diagnose_run, failures
from ddp_notebook.diagnosis.source_code.singled_out import singled_out
from ddp_notebook.diagnosis.source_code.sources import Sources
from ddp_notebook.model import (
    DEFAULT_GROUP,
    CallFacts,
    Case,
    Category,
    CellFinished,
    Collective,
    Collectives,
    Phase,
    Place,
    RankReport,
)

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


def test_scripts_that_only_lie_in_the_folder_tell_nothing() -> None:
    texts = {
        "train.py": "import model\nstep(out)",
        "model.py": "def step(x): ...",
        "other.py": "if rank == 1:\n    out = pad(out)",
        "plugin.py": "x = 1",
    }
    assert singled_out(Sources(texts), {"out"}, (0, 1)) == (1,)
    seen = Sources(texts, {"plugin.py"})
    assert singled_out(seen, {"out"}, (0, 1)) == ()
    known = {name for name in texts if seen.tree(Place(name, 1)) is not None}
    assert known == {"train.py", "model.py", "plugin.py"}


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
    first = play({0: [loss], 1: [hist]})  # the second was refused: no name is shared yet
    assert [c for c, _ in found(first, {"train.py": NAMES})] == ["mismatched-order"]
    of_data = [replace(loss, label="shard-0"), replace(hist, label="shard-1")]
    case = play({0: of_data[:1], 1: of_data[1:]})
    assert [c for c, _ in found(case, {"train.py": NAMES})] == ["shape-mismatch"]


# -- messages ------------------------------------------------------------------------------


def test_a_rank_before_a_loop_has_not_left_it() -> None:
    code = "for _ in range(warm):\n  forward()\nfor _ in range(rest):\n  forward()\n  backward()\n"
    case = play(
        {
            1: [message("send", 2, 2), message("send", 2, 4)],
            2: [message("recv", 1, 2), message("send", 3, 2), message("send", 3, 2)],
            3: [message("recv", 2, 4), message("send", 2, 5)],
        }
    )
    finding = the_one(case, {"train.py": code})
    assert (finding.category, finding.ranks) == ("p2p-mismatch", (2, 3))
    assert "each sends first and waits for the other's recv" in finding.cause


def test_in_a_ring_in_which_two_peers_are_new_either_may_be_wrong() -> None:
    case = play(
        {
            0: [message("send", 1, 19)],
            1: [message("send", 2, 19)],
            2: [message("recv", 0, 16)],
        }
    )
    assert found(case) == [("p2p-mismatch", (0, 1, 2))]


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
    broken = structs.replace(end(1), evalue="Broken pipe")
    (wrote,) = failures.raised([end(0, "ok"), broken], (0, 1))
    assert (wrote.category, wrote.ranks) == (Category.STORE_GONE, (0,))
    (own,) = failures.raised([end(0, "ok"), end(1, error="ValueError")], (0, 1))
    assert (own.category, own.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))


AUC = """
def log(scores):
    for name, value in scores.items():
        dist.all_reduce(value)
log(scores)
"""


@pytest.mark.parametrize("more", [[], [barrier(6)]])
def test_a_name_that_only_one_rank_has_is_no_matter_of_batches(more: list[Collective]) -> None:
    names = [all_reduce(5, (4, "log"), label=name) for name in ("acc", "f1", "auc")]
    case = play({**same(3, [*names[:2], *more]), 1: [*names, *more]})
    finding = the_one(case, {"train.py": AUC})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (1,))
    assert "'auc'" in finding.cause and "Loop over the same names" in finding.remedy
    shards = [replace(each, label=f"part-{n}") for n, each in enumerate(names)]
    case = play({**same(3, [replace(e, label=f"{e.label}.x") for e in names[:2]]), 1: shards})
    assert all("Loop over the same names" not in f.remedy for f in diagnose_run(case).findings)


SOME = """
for step in range(9):
    for name, p in model.named_parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
"""


def test_a_name_that_a_turn_of_the_loop_left_out_is_no_other_order() -> None:
    w, head, b = (all_reduce(5, label=name) for name in ("w", "head", "b"))
    case = play({**same(3, [w, head, b] * 3), 2: [w, head, b, w, b, w, head, b]})
    finding = the_one(case, {"train.py": SOME})
    assert (finding.category, finding.ranks) == (Category.DIVERGENT_CONTROL_FLOW, (2,))
    assert "if p.grad is not None" in finding.cause and "'head'" in finding.cause
    case = play({**same(3, [w, head, b] * 2), 2: [w, b, head] * 2})
    assert found(case, {"train.py": SOME}) == [("mismatched-order", (2,))]


# -- time ----------------------------------------------------------------------------------

GAVE_UP = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation"
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:917"


def given_up(
    came_s: float | None, last: RankReport, limit_s: float = 10.0, what: str = "barrier"
) -> Case:
    """Ranks 0 and 1 wait from second 1 on until they give up; rank 2 comes at `came_s`."""
    there = op(
        what,
        9,
        phase=Phase.FAILED,
        call=CallFacts(limit_s=limit_s),
        issued_ns=10**9,
        done_ns=11 * 10**9,
    )
    at = {rank: (replace(there, rank=rank),) for rank in (0, 1)}
    if came_s is not None:
        at[2] = (replace(there, rank=2, issued_ns=round(came_s * 1e9)),)
    ends = [raised(GAVE_UP, "RuntimeError")] * 2 + [last]
    reports = tuple(replace(e, rank=r, entered=1, left=1) for r, e in enumerate(ends))
    return Case(reports, collectives=Collectives(at, {DEFAULT_GROUP: (0, 1, 2)}))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (given_up(41.0, raised(CLOSED, "RuntimeError")), "called barrier"),
        (given_up(41.0, raised(CLOSED, "RuntimeError"), 0.0), "called barrier"),
        (
            given_up(41.0, raised(CLOSED, "RuntimeError"), 1800.0, "monitored_barrier"),
            "called monitored_barrier",
        ),
        (
            given_up(None, replace(BUSY, doing="train.py, line 7, in tokenise")),
            "has not called barrier",
        ),
        (
            # With wait_all_ranks=True rank 0 names who did not come, and nothing else.
            lost(
                given_up(41.0, raised(CLOSED, "RuntimeError"), 1800.0, "monitored_barrier"),
                0,
                text="[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 4000 ms",
            ),
            "called monitored_barrier",
        ),
    ],
)
def test_who_came_after_the_others_had_given_up_is_late(case: Case, words: str) -> None:
    finding = the_one(case)
    assert (finding.category, finding.ranks, finding.waiting) == ("straggler", (2,), (0, 1))
    assert words in finding.cause and "gave it up" in finding.cause and not finding.passing


@pytest.mark.parametrize(
    "case",
    [
        given_up(3.0, raised(GAVE_UP, "RuntimeError")),  # all came, and the network is slow
        given_up(None, DONE),  # it has left
        given_up(41.0, raised("'lr'", "KeyError")),  # it has an error of its own
    ],
)
def test_a_timeout_has_other_reasons_than_time(case: Case) -> None:
    assert all(category != "straggler" for category, _ in found(case))


LEAVES = "import sys\nif {test}:\n    {leave}\ndist.all_reduce(x)\n"


@pytest.mark.parametrize("leave", ["sys.exit(0)", "return"])
@pytest.mark.parametrize(
    ("test", "who"),
    [
        ("rank == 1", 1),
        ("rank == 1 and not found", 1),
        ("rank != 0", 0),  # the one that goes on alone
        ("rank == 0 and found", 0),
    ],
)
def test_of_two_ranks_the_one_that_the_code_names_is_wrong(test: str, leave: str, who: int) -> None:
    left = 0 if test.startswith("rank == 0") else 1
    case = play({1 - left: [all_reduce(4)], left: []}, {left: DONE})
    code = LEAVES.format(test=test, leave=leave)
    assert found(case, {"train.py": code}) == [("conditional-collective", (who,))]


EPOCH = """\
for x in loader:
    loss = model(x).sum()
    loss.backward()
dist.barrier()
"""
REBUILD = replace(forward(2), dtype="int32")
"""With which the reducer sets its buckets anew, in the second step alone."""


@pytest.mark.parametrize("end", [[barrier(4)], []], ids=["waits behind the loop", "has finished"])
def test_a_step_more_is_seen_by_what_the_reducer_sends_in_its_second_step(
    end: list[Collective],
) -> None:
    one = [*DDP, backward(3)]
    programs = {0: [*one, REBUILD, backward(3), *end], 1: [*one, *end]}
    assert found(play(programs), {"train.py": EPOCH}) == [("uneven-inputs", (1,))]


def test_integers_that_every_forward_sends_are_a_call_of_their_own() -> None:
    """Buffers, which a rank that evaluates alone sends: as before, that is said."""
    buffers = replace(forward(2), dtype="int32", shape=(1,))
    code = EPOCH + "if rank == 0:\n    model(y)\ndist.barrier()\n"
    alone = replace(forward(6), dtype="int32", shape=(1,))
    both = [*DDP, buffers, backward(3), barrier(4)]
    programs = {0: [*both, alone, barrier(7)], 1: [*both, barrier(7)]}
    assert found(play(programs), {"train.py": code}) == [("conditional-collective", (0,))]
    both = [*DDP, buffers, backward(3), REBUILD, buffers, backward(3), barrier(4)]
    assert found(play({0: both, 1: both}), {"train.py": EPOCH}) == []


CAUGHT = """\
def validate():
    try:
        load()
    except OSError:
        return
    dist.all_reduce(score)
validate()
dist.barrier()
"""


def test_of_two_ranks_that_no_test_of_the_code_tells_apart_both_are_named() -> None:
    """One may call too much, or the other have returned from an `except`, as here."""
    score, end = all_reduce(7, (6, "validate")), barrier(8)
    case = play({0: [score, end], 1: [end]})
    assert found(case, {"train.py": CAUGHT}) == [("conditional-collective", (0, 1))]
    assert found(play({0: [score, end], 1: [end], 2: [score, end]}), {"train.py": CAUGHT}) == [
        ("conditional-collective", (1,))
    ]


@pytest.mark.parametrize("thread", [1, 0], ids=["a thread", "the main thread"])
def test_a_thread_and_a_backward_that_come_in_any_order_are_no_way_of_one_rank(thread: int) -> None:
    """Which of both is first in a slot is chance on each rank: none strayed from the others."""
    copy = replace(all_reduce(8, (25, "publish"), shape=(7,)), call=CallFacts(thread=thread))
    usual = [*DDP, backward(34), copy, backward(34)]
    case = play({0: [*DDP, copy, backward(34), backward(34)], 1: usual, 2: usual})
    (first, *_) = diagnose_run(case, {}).findings
    if thread:
        assert (first.category, first.ranks) == (Category.MISMATCHED_ORDER, (0, 1, 2))
        assert "more than one thread" in first.cause and "group of its own" in first.remedy
    else:
        assert first.ranks == (0,) and "thread" not in first.cause
    assert not diagnose_run(play(dict.fromkeys(range(3), usual)), {}).findings


@pytest.mark.parametrize(
    ("turns", "remedy"),
    [
        ("for x in loader:", "same number of batches"),
        ("for i in range(3):", "same number of batches"),
        ('for i in range(state["step"], n):', "same bounds on every rank: `for i in range(state["),
    ],
)
def test_batches_are_no_matter_of_a_loop_that_counts_to_a_bound(turns: str, remedy: str) -> None:
    code = f"{turns}\n    dist.all_reduce(x)\ndist.barrier()\n"
    step = all_reduce(2)
    finding = the_one(
        play({0: [step] * 3 + [barrier(3)], 1: [step] * 2 + [barrier(3)]}), {"train.py": code}
    )
    assert (finding.category, finding.ranks) == (Category.UNEVEN_INPUTS, (1,))
    assert remedy in finding.remedy


def test_two_ranks_that_both_validate_or_are_at_different_turns_are_left_alone() -> None:
    score, end = all_reduce(7, (6, "validate")), barrier(8)
    assert found(play({0: [score, end], 1: [score, end]}), {"train.py": CAUGHT}) == []
    behind = play({0: [score, end], 1: [score, end]}, rounds=1)
    assert found(behind, {"train.py": CAUGHT}) == []
