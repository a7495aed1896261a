"""Why setup does not get on: errors and their victims, the store, and who is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from setup_cases import (
    IN_SETUP,
    PORT,
    arguments,
    coming,
    done,
    failed,
    found,
    idle,
    knocking,
    the_one,
    waiting,
)
from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.model import (
    OWN_STORE,
    Activity,
    Case,
    Category,
    InitArguments,
    Place,
    Probe,
    RankReport,
    StoreFile,
)


def test_a_connection_of_pythons_own_that_broke_is_no_other_ranks_doing() -> None:
    lost = failed(1, "[Errno 104] Connection reset by peer", "ConnectionResetError")
    assert found(waiting(0), lost, waiting(2)) == [(Category.EXCEPTION_ON_ONE_RANK, (1,))]


def test_an_address_of_no_host_is_told_by_the_rank_that_opens_the_store_there() -> None:
    ranks = [knocking(r, arguments(r, store="rank0"), "timeout") for r in range(3)]
    finding = the_one(*ranks, store="rank0")
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "not even rank 0, which opens the store there" in finding.cause
    refused = [knocking(r, arguments(r, store="rank0")) for r in range(3)]
    assert not found(*refused, store="rank0"), "it is not open yet"


# --------------------------------------------------------------------------- errors, and victims


ERRORS = {
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
    "false, code: -98, name: EADDRINUSE, message: address already in use": Category.PORT_IN_USE,
    "no free port in the range 40000-40002": Category.PORT_EXHAUSTED,
    "found no available ports": Category.PORT_EXHAUSTED,
    "DataLoader worker (pid 3002) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory.": Category.DATALOADER_SHM,
    "DataLoader worker (pid 3002) is killed by signal: Killed. ": Category.EXCEPTION_ON_ONE_RANK,
    "Unable to find address for: bogus0": Category.WRONG_INTERFACE,
    "trying to initialize the default process group twice!": Category.DOUBLE_INIT,
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes": (
        Category.OOM_ON_ONE_RANK
    ),
    "[Errno 13] Permission denied: '/data/point'": Category.FILESYSTEM,
    "DDP expects same model across all ranks, but Rank 1 has 3 params": Category.PARAM_MISMATCH,
    "No backend type associated with device type cuda": Category.BACKEND_DEVICE_MISMATCH,
    "Distributed package doesn't have NCCL built in": Category.BACKEND_DEVICE_MISMATCH,
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!": (
        Category.BACKEND_DEVICE_MISMATCH
    ),
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nLast error:\nDuplicate GPU detected : rank "
    "1 and rank 0 both on CUDA device 10": Category.GPU_MAPPING,
    "CUDA error: invalid device ordinal\nCUDA kernel errors might be": Category.GPU_MAPPING,
    "CUDA error: device-side assert triggered\nCUDA kernel": Category.EXCEPTION_ON_ONE_RANK,
    "CUDA error: uncorrectable ECC error encountered": Category.EXCEPTION_ON_ONE_RANK,
    "The NVIDIA driver on your system is too old (found version 11040).": Category.VERSION_MISMATCH,
    "no CUDA-capable device is detected": Category.BACKEND_DEVICE_MISMATCH,
    "NCCL error in: ProcessGroupNCCL.cpp:839, unhandled system error, NCCL version 2.8.3\n"
    "ncclSystemError: System call (socket, malloc, munmap, etc) failed.": Category.RESOURCE_STARVED,
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.00 GiB of "
    "which 9.00 MiB is free.": Category.OOM_ON_ONE_RANK,
    "Unknown backend type glo": Category.ENV_INVALID,
    "Global rank 0 is not part of group <ProcessGroup object at 0x7f10>": Category.SUBGROUP_MISUSE,
    "division by zero": Category.EXCEPTION_ON_ONE_RANK,
}


@pytest.mark.parametrize(("text", "category"), ERRORS.items())
def test_an_error_is_known_by_its_words(text: str, category: Category) -> None:
    finding = the_one(waiting(0), failed(1, text), waiting(2))
    assert (finding.category, finding.ranks, finding.waiting) == (category, (1,), (0, 2))


def test_what_others_hold_of_a_gpus_memory_is_said() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB "
        "of which 1.00 GiB is free. Process 4711 has 12.50 GiB memory in use. Including "
        "non-PyTorch memory, this process has 1.49 GiB memory in use."
    )
    assert the_one(waiting(0), failed(1, text), waiting(2)).cause == (
        "Rank 1 ran out of GPU memory, part of which another process uses "
        "(Process 4711 has 12.50 GiB)"
    )


def test_errors_that_differ_by_where_an_object_lies_in_memory_are_one() -> None:
    texts = (f"no batch left in <Loader object at {at}>" for at in ("0x7f1c", "0x7fee183e9c70"))
    first, second = texts
    finding = the_one(waiting(0), failed(1, first), failed(2, second))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1, 2))
    assert "no batch left in <Loader object>" in finding.cause


def test_an_error_of_ours_brings_its_category_and_remedy() -> None:
    text = "Port 29500 on 127.0.0.1 is in use by pid 7 (python train.py)."
    error = failed(1, text, error_category="port-in-use", error_remedy="Give another one.")
    finding = the_one(waiting(0), error, waiting(2))
    assert (finding.category, finding.ranks) == (Category.PORT_IN_USE, (1,))
    assert finding.waiting == (0, 2)
    assert (finding.cause, finding.remedy) == (text.rstrip("."), "Give another one.")


def test_an_error_of_many_lines_has_a_cause_of_one() -> None:
    finding = the_one(waiting(0), failed(1, "no free port in 1-3\nTraceback:\n  more"), waiting(2))
    assert finding.cause == "Rank 1 found no free port in 1-3"
    assert the_one(waiting(0), failed(1, "There is no free port"), waiting(2)).cause == (
        "Rank 1 found no free port"
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
    "aborted (%ddp_abort)",
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
    assert finding.cause == "Rank 0 gave up after 3 s, while other ranks wait up to 60 s"


@pytest.mark.parametrize("text", [t for t in VICTIMS if "imed" not in t and "within" not in t])
def test_a_closed_connection_is_no_matter_of_time_outs(text: str) -> None:
    if "timeout" not in text:
        hasty = arguments(0, timeout_s=3.0)
        assert found(failed(0, text, arguments=hasty), coming(1), waiting(2)) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (report(1, Activity.DEAD, exit_code=-9), Category.RANK_DIED),
        (idle(1), Category.MISSING_RANK),
    ],
)
def test_who_gave_up_on_a_rank_that_will_not_come_is_a_victim(
    other: RankReport, expected: Category
) -> None:
    early = failed(0, "Timed out after 3 seconds", arguments=arguments(0, timeout_s=3.0))
    assert found(early, other, waiting(2)) == [(expected, (1,))]


# --------------------------------------------------------------------------- the store


def test_an_address_where_nobody_answers_is_every_ranks_mistake() -> None:
    came = [arguments(r, master_addr="203.0.113.7") for r in range(3)]
    finding = the_one(*(knocking(r, came[r], "timeout") for r in range(3)))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "No process answers at 203.0.113.7:29500" in finding.cause
    assert "the launcher set 127.0.0.1:29500" in finding.evidence


def test_a_name_that_does_not_resolve_is_said() -> None:
    came = [arguments(r, master_addr="no-such-host.invalid") for r in range(3)]
    ranks = [
        with_facts(knocking(r, came[r], "unresolved"), addresses={"no-such-host.invalid": ()})
        for r in range(3)
    ]
    finding = the_one(*ranks)
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert finding.cause == ("`MASTER_ADDR` 'no-such-host.invalid' does not resolve on ranks 0-2")


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
        RankReport(0, Activity.HELD),
        RankReport(0, Activity.SILENT),
        knocking(0, arguments(0, store="rank0")),
    ],
    ids=["busy", "held", "silent", "about to listen"],
)
def test_who_knocks_before_the_store_is_open_only_waits(host: RankReport) -> None:
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
        "rank 2: typo:1: no answer from the resolver yet",
    )
    elsewhere = with_facts(ranks[2], host="b")
    assert the_one(*ranks[:2], elsewhere).ranks == (0, 1), "another host has another resolver"
    assert found(*(with_facts(e, probe=asks) for e in ranks)) == [], "it may only be slow"


def test_loopback_as_master_of_two_hosts_is_said() -> None:
    host = waiting(0, "store", arguments(0, 2, "rank0"), host="a")
    other = with_facts(knocking(1, arguments(1, 2)), host="b")
    finding = the_one(host, other, store="rank0")
    assert (finding.category, finding.ranks) == (Category.HOSTNAME_LOOPBACK, (1,))


def test_a_store_of_the_session_that_is_gone_is_no_ranks_mistake() -> None:
    ranks = [knocking(r) for r in range(3)]
    finding = the_one(*ranks, store_alive=False)
    assert (finding.category, finding.ranks) == (Category.STORE_GONE, ())
    assert finding.remedy == "Open it again with `%ddp_init`."


def test_a_host_that_leaves_before_the_others_came_takes_the_store_with_it() -> None:
    host = idle(0, entered=1, left=1, arguments=arguments(0, store="rank0"))
    assert found(host, knocking(1), knocking(2), store="rank0") == [(Category.STORE_GONE, (0,))]


def in_a_file(rank: int, claims: Mapping[str, int], as_rank: int | None = None) -> RankReport:
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
    gone = report(1, Activity.DEAD, exit_code=exit_code, last_words="a\nSegmentation fault")
    finding = the_one(waiting(0), gone, waiting(2))
    assert (finding.category, finding.ranks) == (category, (1,))
    how = {1: "exited with code 1", 0: "exited with code 0", -9: "was killed by SIGKILL, by"}
    assert finding.cause.startswith(f"Rank 1 {how[exit_code]}")
    assert finding.evidence[-1] == "rank 1: its log ends with: Segmentation fault"
    assert "%ddp_restart --ranks 1" in finding.remedy


def test_a_dead_rank_that_others_wait_for_in_a_call_of_their_own_is_not_just_restarted() -> None:
    gone = report(1, Activity.DEAD, exit_code=-9)
    at = (Place("train.py", 3),)
    finding = the_one(waiting(0, path=at), gone, waiting(2, path=at))
    assert finding.remedy.endswith("`%ddp_abort`.")


@pytest.mark.parametrize("inside", ["collective", "ddp"])
def test_a_rank_that_is_done_while_others_wait_in_a_collective_left_early(inside: str) -> None:
    assert found(waiting(0, inside), done(1), waiting(2, inside)) == [(Category.EARLY_EXIT, (1,))]
    assert found(waiting(0, inside), coming(1, entered=1, left=1), waiting(2, inside)) == []


def test_a_rank_that_waits_for_a_file_nobody_wrote_is_found() -> None:
    polling = coming(1, polls_for="/tmp/ready")
    finding = the_one(waiting(0), polling, waiting(2))
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, (1,))
    assert "`ready`" in finding.cause and "/tmp/ready" in finding.evidence[0]


POLLS = """\
if rank == 0:
    prepare()
else:
    while not marker.exists():
        time.sleep(0.1)
dist.all_reduce(x)
"""


@pytest.mark.parametrize(("code", "ranks"), [(POLLS, (0,)), ("\n\n\n" + POLLS[31:43], (1, 2))])
def test_who_was_to_write_the_file_for_which_the_others_wait(
    code: str, ranks: tuple[int, ...]
) -> None:
    at = (Place("train.py", 4, "", "while not marker.exists():"),)
    pollers = [
        coming(rank, polls_for="/tmp/ready", path=at, doing="train.py:4", left=1, entered=1)
        for rank in (1, 2)
    ]
    case = Case((waiting(0, "collective"), *pollers), sources={"train.py": code})
    (finding,) = diagnose_setup(case).findings
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, ranks)


def test_of_several_ranks_that_do_not_wait_for_a_file_none_is_known_to_have_to_write_it() -> None:
    """What the others wait for in a collective is the rank that waits for the file by itself."""
    at = (Place("train.py", 2, "", "while not marker.exists():"),)
    poller = coming(0, polls_for="/tmp/ready", path=at, doing="train.py:2", left=1, entered=1)
    code = "if rank == 0:\n    while not marker.exists():\n        time.sleep(0.1)\n"
    others = (waiting(1, "collective"), waiting(2, "collective"))
    (finding,) = diagnose_setup(Case((poller, *others), sources={"train.py": code})).findings
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, (0,))
    (finding,) = diagnose_setup(Case((poller, others[0]), sources={"train.py": code})).findings
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, (1,))


@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.SILENT])
def test_a_file_that_a_rank_may_still_write_is_waited_for_with_reason(activity: Activity) -> None:
    polling = coming(1, polls_for="/tmp/ready")
    assert found(waiting(0), polling, RankReport(2, activity)) == []


NO_GROUP = "Default process group has not been initialized, please make sure to call it"
ONLY_ON_ONE = "if rank == 0:\n    dist.init_process_group('gloo')\ndist.barrier()\n"


def test_ranks_that_fail_without_the_group_which_one_waits_for_never_called_for_it() -> None:
    at = (Place("train.py", 2, "", "dist.init_process_group('gloo')"),)
    ranks = (waiting(0, path=at), *(failed(r, NO_GROUP, "ValueError", entered=0) for r in (1, 2)))
    finding = diagnose_setup(Case(ranks, sources={"train.py": ONLY_ON_ONE})).findings[0]
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (1, 2))
    assert "regardless of `if rank == 0`" in finding.remedy
    assert any(fact.endswith("if rank == 0:") for fact in finding.evidence)


def test_a_rank_that_exits_before_the_call_is_missing_by_the_test_that_let_it() -> None:
    at = (Place("train.py", 3, "", "dist.init_process_group('gloo')"),)
    text = "if rank == 2:\n    sys.exit(0)\ndist.init_process_group('gloo')\n"
    ranks = (waiting(0, path=at), waiting(1, path=at), idle(2))
    finding = diagnose_setup(Case(ranks, sources={"train.py": text})).findings[0]
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (2,))
    assert "if rank == 2: sys.exit()" in finding.remedy


# --------------------------------------------------------------------------- stores of the user's


def opening(rank: int, state: str = "refused", master: bool = False, **more: Any) -> RankReport:
    """It is in a TCPStore(...) of its own."""
    own = arguments(rank, method=OWN_STORE, hosts_store=master)
    return replace(knocking(rank, own, state), **({"entered": 0} | more))


def test_a_store_that_every_rank_connects_to_and_none_opens_is_said() -> None:
    finding = the_one(*map(opening, range(3)))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "no rank opens one with `is_master=True`" in finding.cause
    assert "is_master=True" in finding.remedy


def test_a_store_that_a_busy_rank_may_still_open_is_waited_for() -> None:
    assert found(coming(0), opening(1), opening(2)) == []


def test_who_asks_at_another_port_than_the_stores_is_told_where_it_is() -> None:
    host = opening(0, "open", master=True)
    elsewhere = arguments(2, method=OWN_STORE, master_port=PORT + 1)
    finding = the_one(host, opening(1, "open"), replace(opening(2), arguments=elsewhere))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (2,))
    assert f"rank 0 opens one at 127.0.0.1:{PORT}" in finding.evidence


def test_two_ranks_that_open_one_store_are_told_apart() -> None:
    second = opening(1, "open", master=True, activity=Activity.FAILED, inside="")
    second = with_facts(second, error_type="DistNetworkError", error_text="EADDRINUSE: in use")
    finding = the_one(opening(0, "open", master=True), second, opening(2, "open"))
    assert (finding.category, finding.ranks) == (Category.PORT_IN_USE, (1,))
    assert "as rank 0 does" in finding.cause


def test_a_rank_that_ended_after_its_store_was_open_did_come_to_it() -> None:
    ended = opening(1, "open", activity=Activity.IDLE, inside="")
    finding = the_one(opening(0, "open", master=True), ended, idle(2))
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (2,))
    assert "never called `TCPStore`" in finding.cause


def test_another_program_at_the_stores_port_is_no_store() -> None:
    finding = the_one(*(knocking(rank, state="other") for rank in range(3)))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (0, 1, 2))
    assert "Another program answers" in finding.cause


def test_a_folder_that_is_not_there_for_the_file_of_the_store_is_said() -> None:
    file = StoreFile("/nowhere/store", missing_folder="/nowhere")
    came = [arguments(rank, method="file", path="/nowhere/store") for rank in range(3)]
    finding = the_one(*(waiting(a.rank or 0, "store", a, file=file) for a in came))
    assert (finding.category, finding.ranks) == (Category.FILESYSTEM, (0, 1, 2))
    assert "/nowhere" in finding.cause


def in_given(rank: int, store: str) -> RankReport:
    return waiting(rank, "process-group", InitArguments("store", rank, 3, store=store))


def test_a_store_of_one_process_joins_no_ranks() -> None:
    finding = the_one(*(in_given(rank, "HashStore") for rank in range(3)))
    assert (finding.category, finding.ranks) == (Category.ENV_INVALID, (0, 1, 2))
    assert "HashStore" in finding.cause


def test_stores_that_differ_are_a_mismatch_of_the_fewer_ranks() -> None:
    stores = "FileStore in /tmp/a", "FileStore in /tmp/a", "FileStore in /tmp/b"
    finding = the_one(*(in_given(rank, store) for rank, store in enumerate(stores)))
    assert (finding.category, finding.ranks) == (Category.ENV_MISMATCH, (2,))
    assert "/tmp/b" in finding.cause


def test_a_store_that_its_host_could_not_open_is_no_second_finding() -> None:
    text = "EADDRINUSE: address already in use"
    host = failed(0, text, "DistNetworkError", arguments=arguments(0, hosts_store=True))
    found_there = found(host, knocking(1), knocking(2), store="rank0")
    assert found_there == [(Category.PORT_IN_USE, (0,))]
