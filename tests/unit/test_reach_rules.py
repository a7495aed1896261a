"""Ranks of several hosts that meet in the store and do not reach each other: who is to blame."""

from __future__ import annotations

from typing import Any

import pytest
from traces import report

from ddp_notebook.cluster.questions import with_reach
from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Finding,
    InitArguments,
    Probe,
    RankReport,
    Ranks,
    codec,
)
from ddp_notebook.rank.calls import CannotAnswer, Reached, Targets

STORE = "10.0.0.1:29500"
NO_ANSWER = "no answer within 0.3 s"
MESH = "Gloo connectFullMesh failed with [pair.cc:152] timed out: Connection refused, [127.0.0.1]"


def listens_at(rank: int, host: str) -> str:
    """Where a rank's gloo listens on a host; a is 10.0.0.1, b is 10.0.0.2."""
    return f"10.0.0.{ord(host) - ord('a') + 1}:{40000 + rank}"


def on(node: str, rank: int, inside: str = "process-group", **more: Any) -> RankReport:
    """A rank that waits on a host, the store reached."""
    came = InitArguments(
        "env", rank, None, "10.0.0.1", 29500, "", "gloo", 60.0, hosts_store=rank == 0
    )
    fields: dict[str, Any] = {
        "activity": Activity.WAITING,
        "inside": inside,
        "entered": 1,
        "arguments": came,
        "probe": Probe(STORE, "open"),
        "host": f"node-{node}",
        "network": f"boot net:[{ord(node)}]",
        "listens": (listens_at(rank, node),) if inside == "process-group" else (),
        **more,
    }
    return report(rank, **fields)


def test_a_loopback_that_gloo_was_refused_at_names_the_other_host_after_its_end() -> None:
    refused = {"activity": Activity.FAILED, "inside": "", "error_text": MESH, "listens": ()}
    ended = on("a", 0, activity=Activity.IDLE, listens=())
    (finding,) = diagnose_setup(Case((ended, on("b", 1, **refused)))).findings
    assert (finding.category, finding.ranks) == (Category.HOSTNAME_LOOPBACK, (0,))
    assert finding.cause.startswith("Rank 0 listens at 127.x of node-a")
    third = on("c", 2, activity=Activity.IDLE, listens=())
    found = diagnose_setup(Case((ended, on("b", 1, **refused), third))).findings
    assert Category.HOSTNAME_LOOPBACK not in [f.category for f in found], "of two hosts either"


def reaching(host: str, rank: int, **others: str) -> RankReport:
    """It tried the others: ``a1="timeout"`` is rank 1 on host a."""
    probes = tuple(
        Probe(listens_at(int(name[1:]), name[0]), state, NO_ANSWER if state == "timeout" else "")
        for name, state in others.items()
    )
    return on(host, rank, reach=probes)


def found(*ranks: RankReport) -> list[tuple[Category, Ranks]]:
    case = Case(ranks, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, 0)
    return [(f.category, f.ranks) for f in diagnose_setup(case).findings if not f.passing]


def the_one(*ranks: RankReport) -> Finding:
    (finding,) = diagnose_setup(Case(ranks, {}, 0)).findings
    assert finding.cause
    assert finding.remedy
    assert "\n" not in finding.cause + finding.remedy
    return finding


# --------------------------------------------------------------------------- a firewall


def test_two_hosts_of_which_neither_reaches_the_other_are_both_behind_a_firewall() -> None:
    finding = the_one(
        reaching("a", 0, b1="timeout", a2="open"),
        reaching("b", 1, a0="timeout", a2="timeout"),
        reaching("a", 2, a0="open", b1="timeout"),
    )
    assert (finding.category, finding.ranks) == (Category.FIREWALL, (0, 1, 2))
    assert "The store answers" in finding.cause
    assert "from each other's host" in finding.cause
    assert f"rank 0 -> rank 1: {listens_at(1, 'b')}: {NO_ANSWER}" in finding.evidence
    assert len(finding.evidence) == 4


def test_one_host_that_is_not_reached_and_reaches_the_other_is_behind_the_firewall() -> None:
    finding = the_one(
        reaching("a", 0, b1="timeout"),
        reaching("b", 1, a0="open", a2="open"),
        reaching("a", 2, b1="timeout"),
    )
    assert finding.ranks == (1,)
    assert finding.cause.endswith("ranks 0,2 get no answer from rank 1: something drops it")


def test_the_one_host_of_three_that_reaches_nobody_and_is_reached_by_nobody_is_to_blame() -> None:
    assert found(
        reaching("a", 0, b1="open", c2="timeout"),
        reaching("b", 1, a0="open", c2="timeout"),
        reaching("c", 2, a0="timeout", b1="timeout"),
    ) == [(Category.FIREWALL, (2,))]


def test_where_no_one_host_explains_it_all_that_are_not_reached_are_found() -> None:
    assert found(
        reaching("a", 0, b1="timeout", c2="timeout"),
        reaching("b", 1, a0="open", c2="timeout"),
        reaching("c", 2, a0="open", b1="timeout"),
    ) == [(Category.FIREWALL, (1, 2))]


@pytest.mark.parametrize("state", ["open", "refused", "unresolved"])
def test_only_silence_is_a_firewall(state: str) -> None:
    assert found(reaching("a", 0, b1=state), reaching("b", 1, a0=state)) == []


def test_silence_on_one_host_proves_no_firewall() -> None:
    assert found(reaching("a", 0, a1="timeout"), reaching("a", 1, a0="timeout")) == []


def test_silence_where_nobody_listens_any_more_proves_nothing() -> None:
    gone = on("b", 1, "collective", initialized=True, left=1)
    assert found(reaching("a", 0, b1="timeout"), gone) == []


def test_a_rank_that_does_not_reach_the_store_either_is_not_shut_out_by_this() -> None:
    dropped = Probe(STORE, "timeout", NO_ANSWER)
    other = on("b", 1, probe=dropped, reach=(Probe(listens_at(0, "a"), "timeout", NO_ANSWER),))
    assert found(on("a", 0), other) == []


def test_ranks_that_connect_across_hosts_are_asked_whom_they_reach() -> None:
    asked: list[tuple[Ranks, tuple[str, ...]]] = []

    def ask(ranks: Ranks, targets: Targets) -> dict[int, Reached | CannotAnswer]:
        asked.append((ranks, targets.targets))
        dropped = tuple(Probe(target, "timeout", NO_ANSWER) for target in targets.targets)
        return {0: Reached(dropped[1:]), 1: CannotAnswer("it ended")}

    here = [on("a", 0), on("b", 1), on("b", 2, listens=("127.0.0.1:40002",)), on("b", 3, "ddp")]
    reports = with_reach(here, ask)
    assert asked == [((0, 1, 2), (listens_at(0, "a"), listens_at(1, "b")))], "no loopback"
    assert [len(report.network.reach) for report in reports] == [1, 0, 0, 0]
    assert with_reach([on("a", 0), on("a", 1)], ask) == (on("a", 0), on("a", 1))
    assert len(asked) == 1, "ranks of one host are not"


# --------------------------------------------------------------------------- loopback


def test_a_rank_that_listens_at_loopback_alone_is_found_by_those_on_other_hosts() -> None:
    finding = the_one(
        on("a", 0, "", activity=Activity.FAILED, error_type="RuntimeError", error_text=MESH),
        on("b", 1, listens=("127.0.0.1:40001",)),
        on("a", 2),
    )
    assert (finding.category, finding.ranks) == (Category.HOSTNAME_LOOPBACK, (1,))
    assert finding.cause.startswith("Rank 1 listens at 127.0.0.1:40001 of node-b")
    assert "ranks 0,2 on other hosts" in finding.cause
    assert "`GLOO_SOCKET_IFNAME` on rank 1" in finding.remedy
    assert finding.evidence == ("rank 1 listens at 127.0.0.1:40001", f"rank 0: {MESH}")


def test_every_rank_that_says_loopback_to_another_host_is_a_culprit() -> None:
    ranks = [on(h, r, listens=(f"127.0.1.1:{40000 + r}",)) for r, h in enumerate("aba")]
    assert found(*ranks) == [(Category.HOSTNAME_LOOPBACK, (0, 1, 2))]


def test_loopback_of_the_newer_protocol_is_loopback() -> None:
    assert found(on("a", 0), on("b", 1, listens=("::1:40001",))) == [
        (Category.HOSTNAME_LOOPBACK, (1,))
    ]


@pytest.mark.parametrize(
    "other",
    [
        on("a", 1, listens=("127.0.0.1:40001",)),
        on("b", 1, listens=("127.0.0.1:40001", "10.0.0.2:40001")),
        on("b", 1, listens=()),
        on("b", 1, "collective", listens=("127.0.0.1:40001",), initialized=True, left=1),
        on("b", 1, listens=("127.0.0.1:40001",), network="", host=""),
    ],
    ids=["one host", "another address too", "not yet", "it has its group", "host not known"],
)
def test_loopback_that_no_other_host_is_told_is_right(other: RankReport) -> None:
    assert found(on("a", 0, "collective", initialized=True, left=1), other) == []


# --------------------------------------------------------------------------- the store's port


def test_a_store_that_is_open_on_its_host_and_silent_to_others_is_behind_a_firewall() -> None:
    silent = on("b", 1, "store", probe=Probe(STORE, "timeout", NO_ANSWER))
    finding = the_one(on("a", 0, "store"), silent, on("a", 2))
    assert (finding.category, finding.ranks) == (Category.UNREACHABLE_MASTER, (1,))
    assert "firewall, or no route" in finding.cause
    assert finding.remedy.startswith("Open TCP port 29500 of rank 0's host")
    assert finding.evidence == (f"rank 1: {STORE}: {NO_ANSWER}", f"rank 0: {STORE}: open")


@pytest.mark.parametrize(
    "shut_out",
    [
        on("b", 1, "store", probe=Probe(STORE, "refused", "Connection refused")),
        on("a", 1, "store", probe=Probe(STORE, "timeout", NO_ANSWER)),
    ],
    ids=["refused", "same host"],
)
def test_what_is_not_silence_between_hosts_says_nothing_of_a_firewall(
    shut_out: RankReport,
) -> None:
    finding = the_one(on("a", 0, "store"), shut_out)
    assert finding.category is Category.UNREACHABLE_MASTER
    assert "firewall" not in finding.cause


def test_hosts_of_one_name_are_two_by_their_networks() -> None:
    knocks = on("b", 1, "store", host="vm", probe=Probe("localhost:29500", "refused", "refused"))
    assert found(on("a", 0, "store", host="vm"), knocks) == [(Category.HOSTNAME_LOOPBACK, (1,))]


def test_what_a_rank_found_of_others_survives_the_wire() -> None:
    evidence = reaching("a", 0, b1="timeout", a2="open")
    assert codec.decode(RankReport, codec.encode(evidence)) == evidence
