"""Why setup does not get on: nothing where all is well, and the mistakes of values and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from setup_cases import (
    HOST,
    IN_SETUP,
    PORT,
    arguments,
    case,
    coming,
    done,
    failed,
    found,
    idle,
    knocking,
    the_one,
    waiting,
)
from traces import with_facts

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.model import Activity, Category, InitArguments, Place, RankReport, Ranks

# --------------------------------------------------------------------------- all is well


@st.composite
def healthy(draw: st.DrawFn, smallest: int = 1) -> tuple[list[RankReport], str]:
    """Ranks of a healthy setup at one moment, and who hosts the store.

    Each is somewhere on the same way, no further than the others' being late allows.
    """
    size = draw(st.integers(smallest, 6))
    store = draw(st.sampled_from(["session", "rank0"]))
    tried_before = draw(st.booleans())  # a setup of ours notes its call twice
    names = st.sampled_from([HOST, "localhost"])
    numbers = st.integers(0, 4)
    places = [draw(numbers) for _ in range(size)]
    if min(places) < 2:  # before all have written their key, none gets beyond the rendezvous
        places = [min(place, 2) for place in places]
    elif min(places) < 3:  # a group is made when all are in it
        places = [min(place, 3) for place in places]
    host_is_up = store == "session" or places[0] >= 2 or (places[0] == 1 and draw(st.booleans()))
    if not host_is_up:
        places = [min(place, 1) for place in places]
    ranks = []
    for rank, place in enumerate(places):
        name = draw(names)
        came = arguments(rank, size, store, master_addr=name)
        resolved = draw(st.booleans())
        known: dict[str, Any] = {
            "addresses": {name: (HOST,)} if resolved or name == HOST else {},
            "runnable": draw(st.booleans()),
            "entered": 1 + tried_before,
        }
        if place == 0:
            ranks.append(coming(rank, polls_for=""))
        elif place == 1 and not host_is_up:
            ranks.append(with_facts(knocking(rank, came), **known))
        elif place in (1, 2, 3):
            ranks.append(waiting(rank, IN_SETUP[place - 1], came, **known))
        else:
            ranks.append(done(rank, came, **known))
    return ranks, store


@given(healthy())
def test_a_healthy_set_up_has_no_finding_but_who_is_late(
    job: tuple[list[RankReport], str],
) -> None:
    ranks, store = job
    diagnosis = diagnose_setup(case(*ranks, store=store))
    assert not diagnosis.wrong, diagnosis
    late = {e.rank for e in ranks if e.activity is Activity.BUSY}
    some_wait = any(e.activity is Activity.WAITING for e in ranks)
    assert {r for f in diagnosis.findings for r in f.ranks} == (late if some_wait else set())


@given(healthy(smallest=3), st.data())
def test_the_rank_whose_port_was_changed_is_the_culprit_and_no_other(
    job: tuple[list[RankReport], str], data: st.DataObject
) -> None:
    ranks, store = job
    size = len(ranks)
    bad = data.draw(st.integers(0, size - 1))
    is_host = store == "rank0" and bad == 0
    # Nobody gets past the rendezvous without it; without the host nobody reaches the store.
    came = [replace(arguments(r, size, store)) for r in range(size)]
    ranks = [
        each
        if each.activity is Activity.BUSY
        else knocking(each.rank, came[each.rank])
        if is_host
        else waiting(each.rank, "rendezvous", came[each.rank])
        for each in ranks
    ]
    wrong = replace(came[bad], master_port=PORT + 1)
    ranks[bad] = waiting(bad, "store", wrong) if is_host else knocking(bad, wrong)
    if sum(e.entered > 0 for e in ranks) < 3:
        ranks = [waiting(r, "rendezvous", came[r]) if r != bad else ranks[r] for r in range(size)]
    told = data.draw(st.sampled_from([None, {}]))
    assert found(*ranks, store=store, told=told) == [(Category.ENV_MISMATCH, (bad,))]


def test_nothing_is_wrong_where_nobody_waits() -> None:
    assert diagnose_setup(case(idle(0), idle(1))).findings == ()
    assert diagnose_setup(case(coming(0), idle(1), done(2))).findings == ()


def test_a_rank_that_is_late_is_named_and_not_blamed() -> None:
    diagnosis = diagnose_setup(case(waiting(0), coming(1), waiting(2)))
    (late,) = diagnosis.findings
    assert (late.category, late.ranks, late.waiting) == (Category.STRAGGLER, (1,), (0, 2))
    assert late.passing
    assert not diagnosis.wrong
    assert "load (train.py, line 7)" in late.cause
    assert diagnosis.doing is not None
    assert diagnosis.doing[1] == "busy: load (train.py, line 7)"


def test_a_rank_that_is_held_is_nobodys_mistake_and_the_remedy_steps_it_on() -> None:
    held = RankReport(1, Activity.HELD)
    (finding,) = diagnose_setup(case(waiting(0), held, waiting(2))).findings
    assert (finding.category, finding.ranks, finding.passing) == (Category.STRAGGLER, (1,), True)
    assert finding.commands == ("%ddp_step --ranks 1",)


def test_a_rank_that_does_not_answer_proves_nothing() -> None:
    assert found(waiting(0), RankReport(1, Activity.SILENT), waiting(2)) == []


def test_ranks_that_meet_again_with_other_values_are_compared_with_those_that_do_too() -> None:
    again = arguments(0, 2, backend="mpi", master_port=PORT + 1)
    ahead = waiting(0, "rendezvous", again, entered=2, left=1)
    behind = replace(coming(1), entered=1, left=1, arguments=arguments(1, 2))
    assert found(ahead, behind) == []
    (late,) = diagnose_setup(case(ahead, behind)).findings
    assert late.ranks == (1,)


# --------------------------------------------------------------------------- values that differ


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"master_port": 23457}, "`MASTER_PORT=23457`, but ranks 0 and 2 have `29500`"),
        (
            {"master_addr": "10.0.0.9"},
            "`MASTER_ADDR=10.0.0.9`, but ranks 0 and 2 have `127.0.0.1`",
        ),
        ({"world_size": 4}, "`WORLD_SIZE=4`, but ranks 0 and 2 have `3`"),
        ({"backend": "nccl"}, "backend `nccl`, but ranks 0 and 2 have `gloo`"),
        ({"method": "tcp"}, "init_method `tcp`, but ranks 0 and 2 have `env`"),
    ],
)
def test_a_value_that_differs_is_said_with_both_and_what_to_set(
    change: dict[str, Any], cause: str
) -> None:
    ranks = [waiting(0), waiting(1, came=replace(arguments(1), **change)), waiting(2)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (1,))
    assert finding.cause == f"Rank 1 has {cause}"
    of_launcher = cause.partition("=")[0].strip("`").isupper()
    assert finding.remedy.startswith("Do not set `" if of_launcher else "Set ")
    assert [fact.partition(":")[0] for fact in finding.evidence] == ["ranks 0 and 2", "rank 1"]


def test_files_that_differ_are_a_mismatch() -> None:
    came = [InitArguments("file", r, 2, path=f"/tmp/{r}", backend="gloo") for r in range(2)]
    finding = the_one(*(waiting(r, came=came[r]) for r in range(2)), told={})
    assert finding.cause == "Rank 1 has the file `/tmp/1`, but rank 0 has `/tmp/0`"


def test_where_each_rank_has_a_file_of_its_own_none_of_them_is_right() -> None:
    came = [InitArguments("file", r, 3, path=f"/tmp/{r}", backend="gloo") for r in range(3)]
    finding = the_one(*(waiting(r, came=came[r]) for r in range(3)), told={})
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (0, 1, 2))
    assert finding.evidence == tuple(f"rank {rank}: /tmp/{rank}" for rank in range(3))
    came[1] = replace(came[1], path="/tmp/2")
    finding = the_one(*(waiting(r, came=came[r]) for r in range(3)), told={})
    assert finding.ranks == (0,), "two have the same"


def test_every_rank_with_a_port_of_its_own_is_one_mistake_against_the_stores_host() -> None:
    came = [arguments(r, store="rank0", master_port=40000 + r) for r in range(3)]
    ranks = [waiting(0, "store", came[0]), knocking(1, came[1]), knocking(2, came[2])]
    finding = the_one(*ranks, store="rank0")
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (1, 2))
    assert finding.cause.endswith("have other values of `MASTER_PORT`, but rank 0 has `40000`")
    assert finding.evidence == tuple(f"rank {r}: MASTER_PORT={40000 + r}" for r in range(3))


def test_where_the_session_hosts_the_store_every_port_of_its_own_is_wrong() -> None:
    ranks = [knocking(r, arguments(r, master_port=40000 + r)) for r in range(3)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (0, 1, 2))
    assert finding.cause.endswith("the session's store has `29500`")
    assert finding.remedy == "Do not set `MASTER_PORT` on ranks 0-2: the launcher has set it."


@pytest.mark.parametrize(
    ("values", "told", "host", "expected"),
    [
        ({0: "a", 1: "b", 2: "b"}, "", 0, ("b", (0,))),
        ({0: "a", 1: "b", 2: "b"}, "a", 0, ("a", (1, 2))),
        ({0: "a", 1: "b", 2: "b"}, "c", 0, ("b", (0,))),
        ({0: "a", 1: "b"}, "", 1, ("b", (0,))),
        ({0: "a", 1: "b"}, "", None, ("a", (1,))),
        ({1: "a", 2: "b"}, "", 0, ("a", (2,))),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, "", 3, ("b", (0, 1))),
        ({0: "a", 1: "b", 2: "c"}, "", None, ("a", (1, 2))),
    ],
    ids=["most", "told", "told to none", "tie, host", "tie", "no host", "two and two", "each"],
)
def test_which_of_several_values_is_right(
    values: dict[int, str], told: str, host: int | None, expected: tuple[str, Ranks]
) -> None:
    votes = vote(values, told, host)
    assert (votes.value, votes.minority) == expected


@pytest.mark.parametrize(
    ("names", "addresses"),
    [
        (["localhost", HOST], {}),
        (["localhost", HOST], {"localhost": ("127.0.0.1", "::1")}),
        (["localhost", "::1"], {}),
        (["node0", "10.0.0.1"], {"node0": ("10.0.0.1",)}),
        (["node0", "node0.lan"], {"node0": ("10.0.0.1",), "node0.lan": ("10.0.0.1",)}),
        (["node0", "10.0.0.1"], {}),
    ],
    ids=["localhost", "resolved", "IPv6", "name and address", "two names", "not known yet"],
)
def test_two_names_of_one_machine_are_no_mismatch(
    names: list[str], addresses: dict[str, tuple[str, ...]]
) -> None:
    ranks = [
        waiting(r, came=arguments(r, 2, master_addr=name), addresses=addresses)
        for r, name in enumerate(names)
    ]
    for told in (None, {}, {"MASTER_ADDR": names[0]}, {"MASTER_ADDR": names[1]}):
        assert found(*ranks, store="rank0", told=told) == []


def test_one_name_is_one_name_whatever_it_resolves_to_on_each_host() -> None:
    resolved = {0: ("127.0.1.1",), 1: ("10.0.0.1",)}
    ranks = [
        waiting(r, came=arguments(r, 2, master_addr="node0"), addresses={"node0": resolved[r]})
        for r in range(2)
    ]
    assert found(*ranks, store="rank0") == []


def test_another_machine_is_a_mismatch_by_whatever_name_the_right_one_is_told() -> None:
    names = ["10.0.0.9", HOST, "10.0.0.9"]
    ranks = [waiting(r, came=arguments(r, master_addr=name)) for r, name in enumerate(names)]
    told = {"MASTER_ADDR": "localhost"}
    assert found(*ranks, store="rank0", told=told) == [(Category.ENV_MISMATCH, (0, 2))]


def test_stale_variables_of_one_rank_are_a_mismatch_and_its_false_rank_no_duplicate() -> None:
    alone = arguments(0, 1)
    ranks = [waiting(0), done(1, alone, entered=2), waiting(2)]
    assert found(*ranks) == [(Category.ENV_MISMATCH, (1,))]


# --------------------------------------------------------------------------- values that cannot be


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Error initializing torch.distributed using env:// rendezvous: environment variable "
            "MASTER_ADDR expected, but not set",
            "`MASTER_ADDR` is not set on rank 1",
        ),
        ("invalid literal for int() with base 10: 'abc'", "Rank 1 got 'abc' for `RANK`"),
        (
            "The port number of the C10d store is out of range: port must have value from 0 to "
            "65535 but was 123456",
            "`MASTER_PORT` is 123456 on rank 1, but ports go",
        ),
        ("[enforce fail at context.cc:27] rank < size. 3 vs 3", "`RANK` is not below `WORLD_SIZE`"),
        ("rank 3 must be smaller than 3", "`RANK` is not below `WORLD_SIZE`"),
    ],
)
def test_a_value_that_cannot_work_is_said(text: str, cause: str) -> None:
    finding = the_one(waiting(0), failed(1, text, "ValueError"), waiting(2))
    assert (finding.category, finding.ranks, finding.waiting) == (
        Category.ENV_INVALID,
        (1,),
        (0, 2),
    )
    assert finding.cause.startswith(cause)
    assert "(it)" not in finding.cause
    assert finding.evidence == (f"rank 1: {text}",)


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("rank = int(os.environ['RANK'])", Category.ENV_INVALID),
        ("dist.init_process_group('gloo')", Category.ENV_INVALID),
        ("return [int(cell) for cell in row]", Category.EXCEPTION_ON_ONE_RANK),
    ],
)
def test_a_number_in_the_users_data_is_no_setting(line: str, category: Category) -> None:
    text = "invalid literal for int() with base 10: 'n/a'"
    error = failed(1, text, "ValueError", error_at=(Place("load.py", 7, "read", line),))
    finding = the_one(waiting(0), error, waiting(2))
    assert (finding.category, finding.ranks) == (category, (1,))


def test_what_a_rank_is_sure_of_is_taken_as_it_says_it() -> None:
    sure = failed(
        1,
        "RANK is 9, but with WORLD_SIZE 3 ranks are 0 to 2.",
        "StageError",
        error_category="env-invalid",
        error_remedy="Set RANK=1 on this rank",
    )
    finding = the_one(waiting(0), sure, waiting(2))
    assert (finding.category, finding.ranks) == (Category.ENV_INVALID, (1,))
    assert finding.cause == "RANK is 9, but with WORLD_SIZE 3 ranks are 0 to 2"
    assert finding.remedy == "Set RANK=1 on this rank"


def test_ranks_that_say_the_same_are_one_finding() -> None:
    text = "environment variable MASTER_ADDR expected, but not set"
    assert found(waiting(0), failed(1, text), failed(2, text)) == [(Category.ENV_INVALID, (1, 2))]


# --------------------------------------------------------------------------- how many, and which


@pytest.mark.parametrize("size", [4, 5])
def test_ranks_that_all_expect_more_ranks_than_there_are_have_one_mistake(size: int) -> None:
    ranks = [waiting(r, came=arguments(r, size)) for r in range(3)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.WORLD_SIZE_MISMATCH, (0, 1, 2))
    assert finding.cause == (f"`WORLD_SIZE` is {size} on every rank, but 3 processes were started")


def test_more_ranks_than_all_of_them_expect_is_the_same_mistake() -> None:
    came = [arguments(r, 2) for r in range(3)]
    beyond = failed(2, "rank < size. 2 vs 2", arguments=came[2])
    ranks = [waiting(0, came=came[0]), waiting(1, came=came[1]), beyond]
    assert found(*ranks) == [(Category.WORLD_SIZE_MISMATCH, (0, 1, 2))]


@pytest.mark.parametrize("third", [idle(2), coming(2)], ids=["done", "busy"])
def test_a_group_of_some_of_the_processes_is_no_mistake(third: RankReport) -> None:
    came = [arguments(r, 2) for r in range(2)]
    for second in (coming(1), waiting(1, came=came[1])):
        assert found(waiting(0, came=came[0]), second, third) == []


@pytest.mark.parametrize(
    ("claims", "culprits", "said"),
    [
        ((0, 1, 1), (2,), "launched as ranks 1 and 2 both have RANK=1; rank 2 is missing"),
        ((0, 0, 2), (1,), "launched as ranks 0 and 1 both have RANK=0; rank 1 is missing"),
        ((2, 1, 2), (0,), "launched as ranks 0 and 2 both have RANK=2; rank 0 is missing"),
        (
            (0, 1, 0, 1),
            (2, 3),
            "ranks 0 and 2 both have RANK=0 and ranks 1 and 3 both have RANK=1; ranks "
            "2 and 3 are missing",
        ),
        ((0, 0, 0), (1, 2), "launched as ranks 0-2 all have RANK=0; ranks 1 and 2 are missing"),
    ],
)
def test_a_rank_that_is_claimed_twice_is_the_mistake_of_who_was_launched_as_another(
    claims: Ranks, culprits: Ranks, said: str
) -> None:
    size = len(claims)
    finding = the_one(*(waiting(r, came=arguments(own, size)) for r, own in enumerate(claims)))
    assert (finding.category, finding.ranks) == (Category.DUPLICATE_RANK, culprits)
    assert said in finding.cause
    assert f"RANK={culprits[0]} on rank {culprits[0]}" in finding.remedy


def test_ranks_that_swapped_their_numbers_are_no_mistake() -> None:
    assert found(*(waiting(r, came=arguments(2 - r)) for r in range(3))) == []


def test_nobody_is_said_to_be_absent_who_may_still_come() -> None:
    finding = the_one(coming(0), waiting(1, came=arguments(1)), waiting(2, came=arguments(1)))
    assert finding.ranks == (2,)
    assert "nobody" not in finding.cause


def test_in_a_run_of_some_ranks_each_has_the_number_of_its_place() -> None:
    came = [arguments(r, 2) for r in range(2)]
    assert found(waiting(1, came=came[0]), waiting(2, came=came[1])) == []
    finding = the_one(waiting(1, came=came[1]), waiting(2, came=came[1]))
    assert (finding.category, finding.ranks) == (Category.DUPLICATE_RANK, (1,))
    assert "RANK=0 on rank 1" in finding.remedy


@pytest.mark.parametrize("loser", [0, 1])
def test_the_port_that_another_rank_0_has_taken_is_told_as_a_duplicate(loser: int) -> None:
    """Whichever of the two was faster."""
    came = arguments(0, store="rank0")
    taken = failed(loser, "EADDRINUSE: address already in use", arguments=came)
    other = waiting(1 - loser, "store", came)
    ranks = sorted([taken, other], key=lambda e: e.rank)
    expected = [(Category.DUPLICATE_RANK, (1,))]
    assert found(*ranks, waiting(2), store="rank0") == expected


# -- stores that the user's code gives to the call -----------------------------------------


def given(rank: int, prefix: str, world_size: int = 3, own: int | None = None) -> InitArguments:
    return InitArguments(
        "store",
        rank if own is None else own,
        world_size,
        backend="gloo",
        store=f"TCPStore at port 29501, prefix {prefix!r}",
    )


def test_a_rank_whose_store_has_another_prefix_is_told() -> None:
    prefixes = ("job-1", "job-1", "job-default")
    ranks = [waiting(r, "process-group", given(r, p)) for r, p in enumerate(prefixes)]
    finding = the_one(*ranks, told={})
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (2,))
    assert "'job-default'" in finding.cause and "'job-1'" in finding.cause


def test_worlds_side_by_side_in_one_store_do_not_meet() -> None:
    """A trainer and its rollout, each with as many ranks as it expects."""
    worlds = [("train", 0), ("train", 1), ("rollout", 0), ("rollout", 1)]
    ranks = [
        waiting(r, "process-group", given(r, name, 2, own)) for r, (name, own) in enumerate(worlds)
    ]
    told = found(*ranks, told={})
    assert Category.ENV_MISMATCH not in [category for category, _ in told]
    assert Category.DUPLICATE_RANK not in [category for category, _ in told]
