"""Findings from evidence: who is blamed, who only waits, and who is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.diagnosis.majority import vote
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Diagnosis,
    InitArguments,
    Probe,
    RankReport,
    StoreFile,
    codec,
)
from ddp_notebook.model.ddp import Fingerprint, TensorInfo

TOLD = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3"}


def arguments(own: int, /, **other: Any) -> InitArguments:
    """What a rank comes with that does everything right."""
    right: dict[str, Any] = {
        "rank": own,
        "world_size": 3,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "backend": "gloo",
        "timeout_s": 60.0,
    }
    return InitArguments(**{**right, **other})


def waiting(rank: int, inside: str = "rendezvous", **other: Any) -> RankReport:
    """A rank that waits in setup, with the right arguments unless others are given."""
    came = arguments(rank, **other.pop("came", {}))
    fields: dict[str, Any] = {
        "activity": Activity.WAITING,
        "inside": inside,
        "entered": 1,
        "arguments": came,
        "probe": Probe("127.0.0.1:29500", "open"),
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
    }
    return report(rank, **{**fields, **other})


def failed(rank: int, text: str, **other: Any) -> RankReport:
    """A rank whose setup raised."""
    return waiting(
        rank, "", activity=Activity.FAILED, error_type="RuntimeError", error_text=text, **other
    )


def diagnose(*ranks: RankReport, host: int | None = None) -> Any:
    """What is found."""
    told = {**TOLD, "WORLD_SIZE": str(len(ranks))}
    sized = [
        replace(e, arguments=replace(e.arguments, world_size=len(ranks)))
        if e.arguments.world_size == 3
        else e
        for e in ranks
    ]
    return diagnose_setup(Case(tuple(sized), told, host))


def blamed(diagnosis: Any) -> list[tuple[Category, tuple[int, ...]]]:
    """Who is blamed for what; who is only late is not."""
    return [(f.category, f.ranks) for f in diagnosis.findings if not f.passing]


def test_three_ranks_that_wait_for_each_other_in_a_healthy_set_up_are_left_alone() -> None:
    for inside in ("store", "rendezvous", "process-group", "collective"):
        assert blamed(diagnose(*(waiting(rank, inside) for rank in range(3)))) == []


def test_a_port_of_its_own_is_the_mistake_of_that_rank() -> None:
    wrong = waiting(1, "store", came={"master_port": 23457})
    found = diagnose(waiting(0), wrong, waiting(2))
    assert blamed(found) == [(Category.ENV_MISMATCH, (1,))]
    assert found.findings[0].cause == (
        "Rank 1 has `MASTER_PORT=23457`, but ranks 0 and 2 have `29500`"
    )
    fix = "Do not set `MASTER_PORT` on rank 1: the launcher has set it."
    assert found.findings[0].remedy == fix
    assert found.findings[0].waiting == (0, 2)


def test_localhost_and_the_loopback_address_are_one() -> None:
    named = waiting(
        1, came={"master_addr": "localhost"}, addresses={"localhost": ("127.0.0.1", "::1")}
    )
    plain = waiting(0, addresses={"127.0.0.1": ("127.0.0.1",)})
    assert blamed(diagnose(plain, named)) == []


def test_what_the_launcher_told_is_right_else_the_majority_else_the_stores_host() -> None:
    def right(values: dict[int, str], expected: str, first: int) -> tuple[str, tuple[int, ...]]:
        votes = vote(values, expected, first)
        return votes.value, votes.minority

    assert right({0: "a", 1: "b", 2: "b"}, "a", 0) == ("a", (1, 2))
    assert right({0: "a", 1: "b", 2: "b"}, "", 0) == ("b", (0,))
    assert right({0: "a", 1: "b"}, "", 1) == ("b", (0,))
    assert right({1: "a", 2: "b"}, "", 0) == ("a", (2,))


def test_of_two_processes_with_one_rank_the_one_that_was_launched_as_another_is_to_blame() -> None:
    found = diagnose(waiting(0), waiting(1), waiting(2, came={"rank": 1}))
    assert blamed(found) == [(Category.DUPLICATE_RANK, (2,))]
    assert "rank 2 is missing" in found.findings[0].cause


def test_ranks_that_are_all_counted_from_one_share_the_mistake() -> None:
    found = diagnose(*(waiting(rank, "store", came={"rank": rank + 1}) for rank in range(3)))
    assert blamed(found) == [(Category.ENV_INVALID, (0, 1, 2))]
    assert "no process has RANK=0" in found.findings[0].cause


def test_of_ranks_counted_from_one_the_last_fails_and_is_not_blamed_alone() -> None:
    last = failed(2, "rank < size. 3 vs 3", came={"rank": 3})
    found = diagnose(*(waiting(rank, "store", came={"rank": rank + 1}) for rank in range(2)), last)
    assert blamed(found) == [(Category.ENV_INVALID, (0, 1, 2))]


def test_one_rank_beyond_the_last_is_to_blame_alone() -> None:
    found = diagnose(waiting(0, "store"), waiting(1, "store"), waiting(2, came={"rank": 3}))
    assert blamed(found) == [(Category.ENV_INVALID, (2,))]


def test_a_port_of_zero_is_no_port() -> None:
    found = diagnose(*(waiting(rank, "store", came={"master_port": 0}) for rank in range(3)))
    assert blamed(found) == [(Category.ENV_INVALID, (0, 1, 2))]


def test_a_second_rank_zero_that_cannot_have_the_port_is_a_duplicate() -> None:
    second = failed(1, "EADDRINUSE: address already in use", came={"rank": 0})
    assert blamed(diagnose(waiting(0), second, waiting(2)))[0] == (Category.DUPLICATE_RANK, (1,))
    assert len(blamed(diagnose(waiting(0), second, waiting(2)))) == 1


def test_all_ranks_that_expect_too_many_share_the_mistake() -> None:
    ranks = [waiting(rank, came={"world_size": 5}) for rank in range(3)]
    assert blamed(diagnose(*ranks)) == [(Category.WORLD_SIZE_MISMATCH, (0, 1, 2))]


def test_who_never_came_is_missing_only_when_it_is_done() -> None:
    idle = RankReport(1, Activity.IDLE)
    assert blamed(diagnose(waiting(0, "store"), idle)) == [(Category.MISSING_RANK, (1,))]
    busy = RankReport(1, Activity.BUSY, doing="train.py, line 12")
    found = diagnose(waiting(0, "store"), busy)
    assert blamed(found) == []
    assert found.findings[0].category is Category.STRAGGLER
    assert not found.wrong


def test_a_rank_that_only_timed_out_or_lost_its_connection_is_a_victim() -> None:
    for text in (
        "Timed out after 9 seconds waiting for clients. 1/2 clients joined.",
        "Connection closed by peer [127.0.0.1]:18827",
        "rank 1 did not join within 60 s.",
    ):
        assert blamed(diagnose(failed(0, text), waiting(1))) == [], text


def test_who_has_the_shorter_time_out_gave_up_first() -> None:
    gave_up = failed(0, "Timed out after 4 seconds", came={"timeout_s": 3.0})
    assert blamed(diagnose(gave_up, waiting(1))) == [(Category.ENV_MISMATCH, (0,))]


def test_nobody_is_unreachable_while_the_store_is_not_known_to_be_open() -> None:
    refused = Probe("127.0.0.1:29500", "refused", "refused")
    shut_out = waiting(1, "store", probe=refused)
    starting = waiting(0, "store", probe=refused, came={"hosts_store": True})
    assert blamed(diagnose(starting, shut_out, host=0)) == []
    opened = waiting(0, "store", came={"hosts_store": True})
    assert blamed(diagnose(opened, shut_out, host=0)) == [(Category.UNREACHABLE_MASTER, (1,))]


def test_a_file_of_an_earlier_run_is_known_by_addresses_that_are_there_twice() -> None:
    came = {"method": "file", "path": "/shared/meeting", "master_port": None, "master_addr": ""}
    file = StoreFile("/shared/meeting", True, claims={"0": 2, "1": 2})
    ranks = [waiting(rank, "process-group", came=came, file=file) for rank in range(2)]
    assert blamed(diagnose(*ranks)) == [(Category.STALE_STORE, (0, 1))]
    once = replace(file, claims={"0": 1, "1": 1})
    assert blamed(diagnose(*(replace(e, file=once) for e in ranks))) == []


def test_two_ranks_that_wait_for_a_file_and_for_each_other_are_stuck() -> None:
    poller = report(1, Activity.BUSY, doing="prepare.py, line 9", polls_for="/data/ready")
    assert blamed(diagnose(waiting(0), poller)) == [(Category.FILESYSTEM, (1,))]
    writer = RankReport(2, Activity.BUSY, doing="download.py, line 3")
    assert blamed(diagnose(waiting(0), poller, writer)) == []


def test_errors_are_told_apart_by_what_they_say() -> None:
    for text, category in (
        ("Unable to find address for: bond1", Category.WRONG_INTERFACE),
        ("environment variable MASTER_ADDR expected, but not set", Category.ENV_INVALID),
        ("trying to initialize the default process group twice!", Category.DOUBLE_INIT),
        ("DefaultCPUAllocator: can't allocate memory", Category.OOM_ON_ONE_RANK),
        ("no free port in the range 29500-29502", Category.PORT_EXHAUSTED),
        ("[Errno 24] Too many open files: '/data/a'", Category.RESOURCE_STARVED),
        ("[Errno 13] Permission denied: '/shared/meeting'", Category.FILESYSTEM),
        ("division by zero", Category.EXCEPTION_ON_ONE_RANK),
    ):
        assert blamed(diagnose(waiting(0), failed(1, text))) == [(category, (1,))], text


def test_another_model_is_the_odd_ranks() -> None:
    same = Fingerprint((TensorInfo("weight", (4, 8), "float32"),))
    other = Fingerprint((TensorInfo("weight", (5, 8), "float32"),))
    ranks = [waiting(rank, "ddp", model=other if rank == 1 else same) for rank in range(3)]
    assert blamed(diagnose(*ranks)) == [(Category.PARAM_MISMATCH, (1,))]


phases = st.sampled_from(
    [
        lambda r: waiting(r, "store"),
        lambda r: waiting(r, "rendezvous"),
        lambda r: waiting(r, "process-group", runnable=True),
        lambda r: RankReport(r, Activity.BUSY, doing="about to begin"),
        lambda r: RankReport(r, Activity.BUSY, doing="train.py, line 3"),
        lambda r: RankReport(
            r, Activity.IDLE, entered=1, left=1, initialized=True, arguments=arguments(r)
        ),
        lambda r: RankReport(r, Activity.SILENT),
        lambda r: RankReport(r, Activity.HELD),
    ]
)


@given(st.lists(phases, min_size=1, max_size=8))
def test_a_healthy_set_up_gets_no_finding_in_whatever_phases_its_ranks_are(makers: Any) -> None:
    assert blamed(diagnose(*(make(rank) for rank, make in enumerate(makers)))) == []


@given(st.integers(3, 8), st.data())
def test_one_wrong_port_among_many_is_blamed_on_its_rank_alone(size: int, data: Any) -> None:
    odd = data.draw(st.integers(0, size - 1))
    ranks = [waiting(r, came={"master_port": 23457} if r == odd else {}) for r in range(size)]
    assert blamed(diagnose(*ranks)) == [(Category.ENV_MISMATCH, (odd,))]


def test_evidence_and_diagnosis_survive_being_written_as_json() -> None:
    evidence = waiting(
        1, model=Fingerprint((TensorInfo("a", (1,), "float32"),)), addresses={"x": ("1.2.3.4",)}
    )
    assert codec.decode(RankReport, codec.encode(evidence)) == evidence
    found = diagnose(waiting(0, "store"), RankReport(1, Activity.IDLE))
    read = codec.decode(Diagnosis, found.to_json())
    # That a cause is a whole sentence stands beside it, as the sentence.
    titled = tuple(replace(finding, titled=True) for finding in read.findings)
    assert replace(read, findings=titled) == found


GAVE_UP = "Timed out after 5 seconds waiting for clients. 1/2 clients joined."
REFUSED = "The client socket has timed out after 4000ms while trying to connect to (a, 1)."


def test_who_calls_only_when_the_others_timeout_is_over_came_too_late() -> None:
    short = {"timeout_s": 4.0}
    first = failed(0, GAVE_UP, came=short, called_ns=1_000_000_000)
    late = failed(1, REFUSED, came=short, called_ns=10_000_000_000)
    found = diagnose(first, late)
    assert blamed(found) == [(Category.STRAGGLER, (1,))]
    assert "after rank 0 had given up (4 s)" in found.findings[0].cause
    busy = RankReport(1, Activity.BUSY, doing="train.py, line 12")
    assert blamed(diagnose(first, busy)) == [(Category.STRAGGLER, (1,))]


def test_no_rank_came_too_late_where_time_does_not_explain_all() -> None:
    short = {"timeout_s": 4.0}
    first = failed(0, GAVE_UP, came=short, called_ns=1_000_000_000)
    in_time = failed(1, REFUSED, came=short, called_ns=1_500_000_000)
    assert blamed(diagnose(first, in_time)) == []
    late = replace(in_time, called_ns=10_000_000_000)
    assert Category.STRAGGLER not in dict(
        blamed(diagnose(first, late, RankReport(2, Activity.IDLE)))
    )
    elsewhere = with_facts(late, host="node1")
    assert blamed(diagnose(with_facts(first, host="node0"), elsewhere)) == []
