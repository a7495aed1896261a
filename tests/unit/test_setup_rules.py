"""Why set-up does not get on: each mistake with its culprits, and nothing where all is well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_notebook.analysis.odd import odd_ones
from ddp_notebook.analysis.setup_rules import diagnose, doing
from ddp_notebook.model import (
    Activity,
    Category,
    Diagnosis,
    Finding,
    InitArguments,
    Place,
    Probe,
    RankEvidence,
    Ranks,
    SetupCase,
    StoreFile,
    diagnosis_from_json,
    evidence_from_json,
    evidence_to_json,
)
from ddp_notebook.model.wrap import Fingerprint, TensorInfo

HOST, PORT = "127.0.0.1", 29500
IN_SETUP = ("store", "rendezvous", "process-group")


# --------------------------------------------------------------------------- ranks, as found


def arguments(rank: int, world_size: int = 3, store: str = "session", **more: Any) -> InitArguments:
    """With what a rank of a healthy job comes."""
    made = InitArguments(
        "env",
        rank,
        world_size,
        HOST,
        PORT,
        backend="gloo",
        timeout_s=60.0,
        hosts_store=store == "rank0" and rank == 0,
        raw={"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(PORT)},
    )
    return replace(made, **more)


def coming(rank: int, **more: Any) -> RankEvidence:
    """It runs code of its own and has not called init_process_group."""
    made = RankEvidence(rank, Activity.BUSY, doing="load (train.py, line 7)", main_cpu_s=2.0)
    return replace(made, **more)


def waiting(
    rank: int, inside: str = "rendezvous", came: InitArguments | None = None, **more: Any
) -> RankEvidence:
    """It waits in set-up, its store reached."""
    came = came or arguments(rank)
    target = f"{came.master_addr}:{came.master_port}"
    in_the_group = inside in ("collective", "ddp")
    made = RankEvidence(
        rank,
        Activity.WAITING,
        inside,
        entered=1,
        left=int(in_the_group),
        initialized=in_the_group,
        arguments=came,
        probe=Probe(target, "open"),
        addresses={came.master_addr: (came.master_addr,)},
        versions={"torch": "2.9.0", "python": "3.12.1"},
    )
    return replace(made, **more)


def knocking(rank: int, came: InitArguments | None = None, state: str = "refused") -> RankEvidence:
    """It knocks where nobody opens."""
    came = came or arguments(rank)
    probe = Probe(f"{came.master_addr}:{came.master_port}", state, "Connection refused")
    return waiting(rank, "store", came, probe=probe)


def done(rank: int, came: InitArguments | None = None, **more: Any) -> RankEvidence:
    """Its set-up is complete."""
    made = waiting(rank, "collective", came)
    return replace(made, activity=Activity.IDLE, inside="", **more)


def idle(rank: int, **more: Any) -> RankEvidence:
    """It runs nothing and never came."""
    return replace(RankEvidence(rank, Activity.IDLE), **more)


def failed(rank: int, text: str, kind: str = "RuntimeError", **more: Any) -> RankEvidence:
    """What it ran raised an error, after it had called init_process_group."""
    made = RankEvidence(
        rank,
        Activity.FAILED,
        entered=1,
        arguments=arguments(rank),
        error_type=kind,
        error_text=text,
    )
    return replace(made, **more)


TOLD = {"MASTER_ADDR": HOST, "MASTER_PORT": str(PORT)}


def case(
    *ranks: RankEvidence,
    store: str = "session",
    told: Mapping[str, str] | None = None,
    store_alive: bool = True,
) -> SetupCase:
    """A job of these ranks."""
    told = {**TOLD, "WORLD_SIZE": str(len(ranks))} if told is None else told
    return SetupCase(ranks, told, 0 if store == "rank0" else None, store_alive)


def found(*ranks: RankEvidence, **more: Any) -> list[tuple[Category, Ranks]]:
    """What is wrong with a job of these ranks: categories and culprits, without what passes."""
    return [(f.category, f.ranks) for f in diagnose(case(*ranks, **more)).findings if not f.passing]


def the_one(*ranks: RankEvidence, **more: Any) -> Finding:
    """The only finding that does not pass."""
    (finding,) = [f for f in diagnose(case(*ranks, **more)).findings if not f.passing]
    assert finding.cause
    assert finding.remedy
    assert "\n" not in finding.cause + finding.remedy
    return finding


# --------------------------------------------------------------------------- all is well


@st.composite
def healthy(draw: st.DrawFn, smallest: int = 1) -> tuple[list[RankEvidence], str]:
    """Ranks of a healthy set-up at one moment, and who hosts the store.

    Each is somewhere on the same way, no further than the others' being late allows.
    """
    size = draw(st.integers(smallest, 6))
    store = draw(st.sampled_from(["session", "rank0"]))
    tried_before = draw(st.booleans())  # a set-up of ours notes its call twice
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
            ranks.append(replace(knocking(rank, came), **known))
        elif place in (1, 2, 3):
            ranks.append(waiting(rank, IN_SETUP[place - 1], came, **known))
        else:
            ranks.append(done(rank, came, **known))
    return ranks, store


@given(healthy())
def test_a_healthy_set_up_has_no_finding_but_who_is_late(
    job: tuple[list[RankEvidence], str],
) -> None:
    ranks, store = job
    diagnosis = diagnose(case(*ranks, store=store))
    assert not diagnosis.wrong, diagnosis
    late = {e.rank for e in ranks if e.activity is Activity.BUSY}
    some_wait = any(e.activity is Activity.WAITING for e in ranks)
    assert {r for f in diagnosis.findings for r in f.ranks} == (late if some_wait else set())


@given(healthy(smallest=3), st.data())
def test_the_rank_whose_port_was_changed_is_the_culprit_and_no_other(
    job: tuple[list[RankEvidence], str], data: st.DataObject
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
    assert diagnose(case(idle(0), idle(1))).findings == ()
    assert diagnose(case(coming(0), idle(1), done(2))).findings == ()


def test_a_rank_that_is_late_is_named_and_not_blamed() -> None:
    diagnosis = diagnose(case(waiting(0), coming(1), waiting(2)))
    (late,) = diagnosis.findings
    assert (late.category, late.ranks, late.waiting) == (Category.STRAGGLER, (1,), (0, 2))
    assert late.passing
    assert not diagnosis.wrong
    assert "load (train.py, line 7)" in late.cause
    assert diagnosis.doing is not None
    assert diagnosis.doing[1] == "busy: load (train.py, line 7)"


def test_a_rank_that_is_held_is_nobodys_mistake_and_the_remedy_steps_it_on() -> None:
    held = RankEvidence(1, Activity.HELD)
    (finding,) = diagnose(case(waiting(0), held, waiting(2))).findings
    assert (finding.category, finding.ranks, finding.passing) == (Category.STRAGGLER, (1,), True)
    assert finding.remedy == "%ddp_step --ranks 1"


def test_a_rank_that_does_not_answer_proves_nothing() -> None:
    assert found(waiting(0), RankEvidence(1, Activity.SILENT), waiting(2)) == []


def test_ranks_that_meet_again_with_other_values_are_compared_with_those_that_do_too() -> None:
    again = arguments(0, 2, backend="mpi", master_port=PORT + 1)
    ahead = waiting(0, "rendezvous", again, entered=2, left=1)
    behind = replace(coming(1), entered=1, left=1, arguments=arguments(1, 2))
    assert found(ahead, behind) == []
    (late,) = diagnose(case(ahead, behind)).findings
    assert late.ranks == (1,)


# --------------------------------------------------------------------------- values that differ


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"master_port": 23457}, "MASTER_PORT is 23457 on rank 1, but 29500 on ranks 0,2"),
        ({"master_addr": "10.0.0.9"}, "MASTER_ADDR is 10.0.0.9 on rank 1, but 127.0.0.1 on "),
        ({"world_size": 4}, "WORLD_SIZE is 4 on rank 1, but 3 on ranks 0,2"),
        ({"backend": "nccl"}, "backend is nccl on rank 1, but gloo on ranks 0,2"),
        ({"method": "tcp"}, "init_method is tcp on rank 1, but env on ranks 0,2"),
    ],
)
def test_a_value_that_differs_is_said_with_both_and_what_to_set(
    change: dict[str, Any], cause: str
) -> None:
    ranks = [waiting(0), waiting(1, came=replace(arguments(1), **change)), waiting(2)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (1,))
    assert finding.cause.startswith(cause)
    assert finding.remedy.startswith("Set ")
    assert len(finding.evidence) == 3


def test_files_that_differ_are_a_mismatch() -> None:
    came = [InitArguments("file", r, 2, path=f"/tmp/{r}", backend="gloo") for r in range(2)]
    finding = the_one(*(waiting(r, came=came[r]) for r in range(2)), told={})
    assert finding.cause == "the file is /tmp/1 on rank 1, but /tmp/0 on rank 0"


def test_every_rank_with_a_port_of_its_own_is_one_mistake_against_the_stores_host() -> None:
    came = [arguments(r, store="rank0", master_port=40000 + r) for r in range(3)]
    ranks = [waiting(0, "store", came[0]), knocking(1, came[1]), knocking(2, came[2])]
    finding = the_one(*ranks, store="rank0")
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (1, 2))
    assert "40001 on rank 1, 40002 on rank 2, but 40000 on rank 0" in finding.cause


def test_where_the_session_hosts_the_store_every_port_of_its_own_is_wrong() -> None:
    ranks = [knocking(r, arguments(r, master_port=40000 + r)) for r in range(3)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (0, 1, 2))
    assert finding.cause.endswith("but 29500 where the session's store is")
    assert finding.remedy == "Set MASTER_PORT=29500 on ranks 0-2."


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
    assert odd_ones(values, told, host) == expected


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
            "MASTER_ADDR is not set",
        ),
        ("invalid literal for int() with base 10: 'abc'", "'abc' is given where a number must be"),
        (
            "The port number of the C10d store is out of range: port must have value from 0 to "
            "65535 but was 123456",
            "MASTER_PORT is 123456: ports are 1 to 65535",
        ),
        ("[enforce fail at context.cc:27] rank < size. 3 vs 3", "RANK is not below WORLD_SIZE"),
        ("rank 3 must be smaller than 3", "RANK is not below WORLD_SIZE"),
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
    assert finding.cause == f"The ranks expect {size} ranks, but there are 3 processes"


def test_more_ranks_than_all_of_them_expect_is_the_same_mistake() -> None:
    came = [arguments(r, 2) for r in range(3)]
    beyond = failed(2, "rank < size. 2 vs 2", arguments=came[2])
    ranks = [waiting(0, came=came[0]), waiting(1, came=came[1]), beyond]
    assert found(*ranks) == [(Category.WORLD_SIZE_MISMATCH, (0, 1, 2))]


@pytest.mark.parametrize("third", [idle(2), coming(2)], ids=["done", "busy"])
def test_a_group_of_some_of_the_processes_is_no_mistake(third: RankEvidence) -> None:
    came = [arguments(r, 2) for r in range(2)]
    for second in (coming(1), waiting(1, came=came[1])):
        assert found(waiting(0, came=came[0]), second, third) == []


@pytest.mark.parametrize(
    ("claims", "culprits", "said"),
    [
        ((0, 1, 1), (2,), "launched as ranks 1-2 both say RANK=1; nobody is rank 2"),
        ((0, 0, 2), (1,), "launched as ranks 0-1 both say RANK=0; nobody is rank 1"),
        ((2, 1, 2), (0,), "launched as ranks 0,2 both say RANK=2; nobody is rank 0"),
        ((0, 0, 0), (1, 2), "launched as ranks 0-2 all say RANK=0; nobody is rank 1-2"),
    ],
)
def test_a_rank_that_is_claimed_twice_is_the_mistake_of_who_was_launched_as_another(
    claims: Ranks, culprits: Ranks, said: str
) -> None:
    finding = the_one(*(waiting(r, came=arguments(claim)) for r, claim in enumerate(claims)))
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


# --------------------------------------------------------------------------- errors, and victims


ERRORS = {
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
    "false, code: -98, name: EADDRINUSE, message: address already in use": Category.PORT_IN_USE,
    "Port 29500 on 127.0.0.1 is in use by pid 7 (python train.py).": Category.PORT_IN_USE,
    "no free port in the range 40000-40002": Category.PORT_EXHAUSTED,
    "found no available ports": Category.PORT_EXHAUSTED,
    "Unable to find address for: bogus0": Category.WRONG_INTERFACE,
    "trying to initialize the default process group twice!": Category.DOUBLE_INIT,
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes": (
        Category.OOM_ON_ONE_RANK
    ),
    "[Errno 13] Permission denied: '/data/point'": Category.FILESYSTEM,
    "DDP expects same model across all ranks, but Rank 1 has 3 params": Category.PARAM_MISMATCH,
    "No backend type associated with device type cuda": Category.BACKEND_DEVICE_MISMATCH,
    "division by zero": Category.EXCEPTION_ON_ONE_RANK,
}


@pytest.mark.parametrize(("text", "category"), ERRORS.items())
def test_an_error_is_known_by_its_words(text: str, category: Category) -> None:
    finding = the_one(waiting(0), failed(1, text), waiting(2))
    assert (finding.category, finding.ranks, finding.waiting) == (category, (1,), (0, 2))


def test_an_error_of_many_lines_has_a_cause_of_one() -> None:
    finding = the_one(waiting(0), failed(1, "no free port in 1-3\nTraceback:\n  more"), waiting(2))
    assert finding.cause == "found no free port where it may look in 1-3"
    assert the_one(waiting(0), failed(1, "There is no free port"), waiting(2)).cause == (
        "found no free port where it may look"
    )


def test_who_holds_a_port_is_evidence() -> None:
    held = failed(0, "EADDRINUSE", holder=" by pid 7 (python train.py)")
    assert (
        the_one(held, waiting(1), waiting(2)).evidence[-1]
        == "the port is held by pid 7 (python train.py)"
    )


def test_an_error_that_nobody_waits_for_is_the_users_own() -> None:
    assert found(*(failed(rank, "division by zero") for rank in range(3))) == []


VICTIMS = (
    "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "wait timeout after 60000ms, keys: /default_pg/0//1//cpu",
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:45678",
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv",
    "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    "failed to recv, got 0 bytes",
    "Broken pipe",
    "Rank 1 did not join within 60 s.",
    "given up (%ddp_abort)",
)


@pytest.mark.parametrize("text", VICTIMS)
def test_a_victim_is_never_blamed(text: str) -> None:
    assert found(failed(0, text), coming(1), waiting(2)) == []
    cause = failed(1, "ZeroDivisionError: division by zero")
    assert found(failed(0, text), cause, waiting(2)) == [(Category.EXCEPTION_ON_ONE_RANK, (1,))]


def test_a_rank_with_a_shorter_time_out_than_the_others_gave_up_too_early() -> None:
    hasty = arguments(0, timeout_s=3.0)
    early = failed(0, "Timed out after 3 seconds waiting for clients", arguments=hasty)
    finding = the_one(early, coming(1), waiting(2))
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (0,))
    assert finding.cause == "waits 3 s, other ranks up to 60 s: it gave up first"


@pytest.mark.parametrize("text", [t for t in VICTIMS if "imed" not in t and "within" not in t])
def test_a_closed_connection_is_no_matter_of_time_outs(text: str) -> None:
    if "timeout" not in text:
        hasty = arguments(0, timeout_s=3.0)
        assert found(failed(0, text, arguments=hasty), coming(1), waiting(2)) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (RankEvidence(1, Activity.DEAD, exit_code=-9), Category.RANK_DIED),
        (idle(1), Category.MISSING_RANK),
    ],
)
def test_who_gave_up_on_a_rank_that_will_not_come_is_a_victim(
    other: RankEvidence, expected: Category
) -> None:
    early = failed(0, "Timed out after 3 seconds", arguments=arguments(0, timeout_s=3.0))
    assert found(early, other, waiting(2)) == [(expected, (1,))]


# --------------------------------------------------------------------------- the store


def test_an_address_where_nobody_answers_is_every_ranks_mistake() -> None:
    came = [arguments(r, master_addr="203.0.113.7") for r in range(3)]
    finding = the_one(*(knocking(r, came[r], "timeout") for r in range(3)))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "nobody answers at 203.0.113.7:29500" in finding.cause
    assert "(127.0.0.1:29500)" in finding.remedy


def test_a_name_that_does_not_resolve_is_said() -> None:
    came = [arguments(r, master_addr="no-such-host.invalid") for r in range(3)]
    ranks = [
        replace(knocking(r, came[r], "unresolved"), addresses={"no-such-host.invalid": ()})
        for r in range(3)
    ]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert finding.cause == "MASTER_ADDR 'no-such-host.invalid' does not resolve"


@pytest.mark.parametrize("state", ["refused", "timeout", "unresolved"])
@pytest.mark.parametrize("store", ["session", "rank0"])
def test_who_knocks_at_a_wrong_address_has_one_mistake_and_not_two(store: str, state: str) -> None:
    bad = knocking(1, arguments(1, master_addr="10.0.0.9"), state)
    ranks = [waiting(0, came=arguments(0, store=store)), bad, waiting(2)]
    assert found(*ranks, store=store) == [(Category.ENV_MISMATCH, (1,))]


def test_ranks_that_knock_in_vain_because_the_host_is_elsewhere_are_victims() -> None:
    host = waiting(0, "store", arguments(0, store="rank0", master_port=PORT + 1))
    ranks = [host, knocking(1), knocking(2)]
    assert found(*ranks, store="rank0") == [(Category.ENV_MISMATCH, (0,))]


@pytest.mark.parametrize(
    "host",
    [
        coming(0),
        RankEvidence(0, Activity.HELD),
        RankEvidence(0, Activity.SILENT),
        knocking(0, arguments(0, store="rank0")),
    ],
    ids=["busy", "held", "silent", "about to listen"],
)
def test_who_knocks_before_the_store_is_open_only_waits(host: RankEvidence) -> None:
    assert found(host, knocking(1), knocking(2), store="rank0") == []


def test_ranks_that_are_shut_out_of_an_open_store_are_found() -> None:
    host = waiting(0, "store", arguments(0, store="rank0"))
    shut_out = knocking(1, state="timeout")
    assert found(host, shut_out, coming(2), store="rank0") == [(Category.UNREACHABLE_MASTER, (1,))]


def test_a_store_that_rank_0_takes_for_somebody_elses_is_opened_by_nobody() -> None:
    ranks = [knocking(r, arguments(r)) for r in range(3)]
    assert found(*ranks, store="rank0") == [(Category.UNREACHABLE_MASTER, (0, 1, 2))]


def test_a_name_that_stops_resolving_after_the_store_was_reached_is_no_matter() -> None:
    gone = waiting(1, "collective", probe=Probe("node0:1", "unresolved", "try again"))
    assert found(waiting(0, "collective"), gone, coming(2)) == []


def test_ranks_that_the_resolver_lets_wait_are_named_with_those_that_it_has_answered() -> None:
    told = Probe("typo:1", "unresolved", "Name or service not known")
    asks = replace(told, state="resolving", detail="")
    typo = {rank: arguments(rank, master_addr="typo") for rank in range(3)}
    ranks = [waiting(r, "store", typo[r], probe=told if r == 1 else asks) for r in range(3)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert finding.evidence[1:] == (
        "rank 1: typo:1: Name or service not known",
        "rank 2: typo:1: the resolver has not answered yet",
    )
    elsewhere = replace(ranks[2], host="b")
    assert the_one(*ranks[:2], elsewhere).ranks == (0, 1), "another host has another resolver"
    assert found(*(replace(e, probe=asks) for e in ranks)) == [], "it may only be slow"


def test_loopback_as_master_of_two_hosts_is_said() -> None:
    host = waiting(0, "store", arguments(0, 2, "rank0"), host="a")
    other = replace(knocking(1, arguments(1, 2)), host="b")
    finding = the_one(host, other, store="rank0")
    assert (finding.category, finding.ranks) == (Category.HOSTNAME_LOOPBACK, (1,))


def test_a_store_of_the_session_that_is_gone_is_no_ranks_mistake() -> None:
    ranks = [knocking(r) for r in range(3)]
    finding = the_one(*ranks, store_alive=False)
    assert (finding.category, finding.ranks) == (Category.STORE_GONE, ())
    assert finding.remedy == "%ddp_init opens it again."


def test_a_host_that_leaves_before_the_others_came_takes_the_store_with_it() -> None:
    host = idle(0, entered=1, left=1, arguments=arguments(0, store="rank0"))
    assert found(host, knocking(1), knocking(2), store="rank0") == [(Category.STORE_GONE, (0,))]


def in_a_file(rank: int, claims: Mapping[str, int], as_rank: int | None = None) -> RankEvidence:
    came = InitArguments("file", rank if as_rank is None else as_rank, 2, path="/tmp/point")
    return waiting(rank, "process-group", came, file=StoreFile("/tmp/point", True, claims=claims))


def test_a_file_with_the_addresses_of_an_earlier_run_is_stale_for_all() -> None:
    for claims in ({"0": 2, "1": 2}, {"0": 1, "1": 2}, {"0": 1, "1": 1, "2": 1}):
        finding = the_one(*(in_a_file(r, claims) for r in range(2)))
        assert (finding.category, finding.ranks) == (Category.STALE_STORE, (0, 1))


def test_a_file_with_one_address_per_rank_is_fresh() -> None:
    for claims in ({}, {"0": 1}, {"0": 1, "1": 1}):
        assert found(*(in_a_file(r, claims) for r in range(2))) == []


def test_a_rank_that_two_claim_in_a_file_makes_it_no_stale_one() -> None:
    ranks = [in_a_file(r, {"0": 2}, as_rank=0) for r in range(2)]
    assert found(*ranks) == [(Category.DUPLICATE_RANK, (1,))]


# --------------------------------------------------------------------------- who is not there


@pytest.mark.parametrize("inside", IN_SETUP)
def test_a_rank_that_is_done_without_having_come_is_missing(inside: str) -> None:
    finding = the_one(waiting(0, inside), idle(1), waiting(2, inside))
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (1,))
    assert finding.waiting == (0, 2)


def test_a_rank_that_came_once_and_is_done_is_missing_when_the_others_meet_again() -> None:
    ranks = [waiting(0, entered=2, left=1), done(1), waiting(2, entered=2, left=1)]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (1,))
    assert "again" in finding.cause


def test_a_rank_that_has_its_group_is_not_missing() -> None:
    assert found(waiting(0, "process-group"), *(idle(r, initialized=True) for r in (1, 2))) == []


@pytest.mark.parametrize(
    ("exit_code", "category"),
    [(1, Category.RANK_DIED), (-9, Category.RANK_DIED), (0, Category.EARLY_EXIT)],
)
def test_a_process_that_ended_while_others_wait_is_named_with_how_it_ended(
    exit_code: int, category: Category
) -> None:
    gone = RankEvidence(1, Activity.DEAD, exit_code=exit_code, last_words="a\nSegmentation fault")
    finding = the_one(waiting(0), gone, waiting(2))
    assert (finding.category, finding.ranks) == (category, (1,))
    assert f"(exit code {exit_code})" in finding.cause
    assert finding.evidence == ("Segmentation fault",)
    assert "%ddp_restart --ranks 1" in finding.remedy


def test_a_dead_rank_that_others_wait_for_in_a_call_of_their_own_is_not_just_restarted() -> None:
    gone = RankEvidence(1, Activity.DEAD, exit_code=-9)
    at = (Place("train.py", 3),)
    finding = the_one(waiting(0, path=at), gone, waiting(2, path=at))
    assert finding.remedy.endswith("%ddp_abort")


@pytest.mark.parametrize("inside", ["collective", "ddp"])
def test_a_rank_that_is_done_while_others_wait_in_a_collective_left_early(inside: str) -> None:
    assert found(waiting(0, inside), done(1), waiting(2, inside)) == [(Category.EARLY_EXIT, (1,))]
    assert found(waiting(0, inside), coming(1, entered=1, left=1), waiting(2, inside)) == []


def test_a_rank_that_waits_for_a_file_nobody_wrote_is_found() -> None:
    polling = coming(1, polls_for="/tmp/ready")
    finding = the_one(waiting(0), polling, waiting(2))
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, (1,))
    assert "/tmp/ready" in finding.cause


@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.SILENT])
def test_a_file_that_a_rank_may_still_write_is_waited_for_with_reason(activity: Activity) -> None:
    polling = coming(1, polls_for="/tmp/ready")
    assert found(waiting(0), polling, RankEvidence(2, activity)) == []


# --------------------------------------------------------------------------- models, versions


LAYER = (TensorInfo("first.weight", (4, 8), "float32"), TensorInfo("first.bias", (4,), "float32"))


@pytest.mark.parametrize(
    "other",
    [
        (*LAYER, TensorInfo("third.weight", (2, 2), "float32")),
        LAYER[:1],
        (TensorInfo("first.weight", (5, 8), "float32"), LAYER[1]),
        (TensorInfo("first.weight", (4, 8), "float16"), LAYER[1]),
        LAYER[::-1],
    ],
    ids=["more", "fewer", "shape", "dtype", "order"],
)
def test_models_that_differ_are_said_with_where(other: tuple[TensorInfo, ...]) -> None:
    models = (LAYER, other, LAYER)
    finding = the_one(
        *(waiting(r, "ddp", model=Fingerprint(model)) for r, model in enumerate(models))
    )
    assert (finding.category, finding.ranks) == (Category.PARAM_MISMATCH, (1,))
    assert "rank 1" in finding.cause


def test_models_that_are_the_same_or_not_built_yet_are_no_finding() -> None:
    ranks = [
        waiting(0, "ddp", model=Fingerprint(LAYER)),
        coming(1),
        waiting(2, "ddp", model=Fingerprint(LAYER)),
    ]
    assert found(*ranks) == []


def test_another_torch_on_one_rank_is_found_but_a_patch_of_python_is_none() -> None:
    def with_versions(torch: str, python: str) -> list[RankEvidence]:
        other = {"torch": torch, "python": python}
        return [waiting(0), waiting(1, versions=other), waiting(2)]

    assert found(*with_versions("1.13.0", "3.12.1")) == [(Category.VERSION_MISMATCH, (1,))]
    assert found(*with_versions("2.9.0", "3.11.9")) == [(Category.VERSION_MISMATCH, (1,))]
    assert found(*with_versions("2.9.0", "3.12.4")) == []


# --------------------------------------------------------------------------- the whole


def test_what_does_not_pass_comes_first_and_what_explains_the_rest_alone() -> None:
    bad = knocking(1, arguments(1, master_port=PORT + 1))
    diagnosis = diagnose(case(waiting(0), bad, coming(2)))
    assert [(f.category, f.ranks) for f in diagnosis.findings] == [
        (Category.ENV_MISMATCH, (1,)),
        (Category.STRAGGLER, (2,)),
    ]
    assert diagnosis.headline.startswith("Rank 1: MASTER_PORT is 29501 on rank 1")
    assert diagnosis.world_size == 3


def test_two_ranks_with_a_mistake_each_are_two_findings() -> None:
    ranks = [waiting(0), failed(1, "Unable to find address for: x0"), failed(2, "boom")]
    assert found(*ranks) == [
        (Category.WRONG_INTERFACE, (1,)),
        (Category.EXCEPTION_ON_ONE_RANK, (2,)),
    ]


@pytest.mark.parametrize("activity", list(Activity))
def test_every_rank_is_said_to_do_something(activity: Activity) -> None:
    for more in ({}, {"doing": "x", "inside": "store", "error_text": "\n", "error_type": "E"}):
        text = doing(RankEvidence(0, activity, **more))  # type: ignore[arg-type]
        assert text
        assert "\n" not in text


def test_a_long_error_is_seen_to_be_cut() -> None:
    assert doing(failed(0, "e" * 160)) == f"failed: {'e' * 160}"
    assert doing(failed(0, "e" * 161)) == f"failed: {'e' * 159}…"


# --------------------------------------------------------------------------- as JSON


RANK = st.integers(0, 7)
RANK_SETS = st.sets(RANK).map(lambda ranks: tuple(sorted(ranks)))
FINDINGS = st.builds(
    Finding,
    category=st.sampled_from(Category),
    ranks=RANK_SETS,
    cause=st.text(),
    remedy=st.text(),
    waiting=RANK_SETS,
    evidence=st.lists(st.text()).map(tuple),
    passing=st.booleans(),
)
DIAGNOSES = st.builds(
    Diagnosis,
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    doing=st.dictionaries(RANK, st.text()),
    world_size=RANK,
)
TENSORS = st.builds(
    TensorInfo, st.text(), st.lists(RANK, max_size=3).map(tuple), st.just("float32")
)
WORDS = st.dictionaries(st.text(), st.text(), max_size=3)
EVIDENCE = st.builds(
    RankEvidence,
    rank=RANK,
    activity=st.sampled_from(Activity),
    inside=st.sampled_from(["", *IN_SETUP]),
    entered=RANK,
    arguments=st.builds(InitArguments, rank=st.none() | RANK, path=st.text(), raw=WORDS),
    probe=st.builds(Probe, state=st.sampled_from(["open", "refused"]), detail=st.text()),
    file=st.builds(StoreFile, exists=st.booleans(), claims=st.dictionaries(st.text(), RANK)),
    addresses=st.dictionaries(st.text(), st.lists(st.text(), max_size=2).map(tuple), max_size=2),
    exit_code=st.none() | st.integers(-64, 255),
    model=st.none() | st.builds(Fingerprint, st.lists(TENSORS, max_size=3).map(tuple)),
)


@given(DIAGNOSES)
def test_a_diagnosis_can_be_written_as_json_and_read_back(diagnosis: Diagnosis) -> None:
    wire = json.loads(json.dumps(diagnosis.to_json()))
    assert diagnosis_from_json(wire) == diagnosis
    assert json.loads(str(diagnosis)) == wire
    assert wire["headline"] == diagnosis.headline


@given(EVIDENCE)
def test_evidence_can_be_written_as_json_and_read_back(evidence: RankEvidence) -> None:
    assert evidence_from_json(json.loads(json.dumps(evidence_to_json(evidence)))) == evidence
