"""What is said of ranks that raised, died or wait where no rule says more."""

from __future__ import annotations

import pytest
from msgspec import structs
from traces import report, with_facts

from ddp_notebook.diagnosis import deaths, diagnose_run, failures
from ddp_notebook.diagnosis.failures import UNEXPLAINED_AFTER_S
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    CellFinished,
    Place,
    Probe,
    RankExited,
    RankReport,
    RankState,
    Stage,
    Status,
)

PATH = (Place("train.py", 9, "main"), Place("utils.py", 3, "load", "return x['key7']"))


def end(rank: int, evalue: str = "'key7'", outcome: str = "error") -> CellFinished:
    return CellFinished(
        rank=rank, cell=1, outcome=outcome, ename="KeyError", evalue=evalue, path=PATH
    )


def test_ranks_that_raised_the_same_on_the_same_line_are_one_finding() -> None:
    (same, other) = failures.raised([end(0), end(2), end(1, "'y'")], (0, 1, 2, 3))
    assert (same.category, same.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (0, 2))
    assert same.cause == "Ranks 0,2 raised KeyError: 'key7' at utils.py:3 in load"
    assert same.evidence == (
        "ranks 0,2: train.py:9 in main → utils.py:3 in load: return x['key7']",
    )
    assert other.ranks == (1,)


def test_what_every_rank_raised_is_not_said_to_be_of_one_rank() -> None:
    (finding,) = failures.raised([end(0), end(1)], (0, 1))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION, (0, 1))


def test_a_closed_connection_is_the_word_of_the_rank_that_was_left() -> None:
    gone = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    (finding,) = failures.raised([end(0, gone), end(1, outcome="ok")], (0, 1))
    assert (finding.category, finding.ranks) == (Category.EARLY_EXIT, (1,))
    assert finding.waiting == (0,) and "utils.py:3" in finding.evidence[0]
    several = [end(0, gone), end(1, outcome="ok"), end(2, outcome="ok")]
    (finding,) = failures.raised(several, (0, 1, 2))
    assert (finding.category, finding.ranks) == (Category.UNDECIDED, ())
    of_user = [end(0, "[Errno 104] Connection reset by peer"), end(1, outcome="ok")]
    (finding,) = failures.raised(of_user, (0, 1))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (0,))


def test_a_rank_that_lost_the_store_of_one_that_raised_carries_no_error_of_its_own() -> None:
    """Every rank failed, and one alone raised what has to be corrected."""
    store = "recvValue failed on SocketImpl(fd=14): Connection was likely closed. Did the remote …"
    lost = structs.replace(end(1, store), ename="DistNetworkError")
    (finding,) = failures.raised([end(0), lost], (0, 1))
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (0,))
    assert finding.waiting == (1,) and "DistNetworkError" in finding.evidence[-1]
    both = failures.raised([lost, structs.replace(lost, rank=0)], (0, 1))
    assert [each.ranks for each in both] == [(0, 1)], "whose store it was is not known"


def test_an_exception_without_message_is_named_once_and_a_huge_one_is_cut() -> None:
    (empty,) = failures.raised([end(0, "")], (0, 1))
    assert empty.cause == "Rank 0 raised KeyError at utils.py:3 in load"
    (huge,) = failures.raised([end(0, "y" * 10_000)], (0, 1))
    assert len(huge.cause) < 400 and huge.cause.endswith("… at utils.py:3 in load")


def test_a_group_that_was_destroyed_is_made_again() -> None:
    (finding,) = failures.raised(
        [end(0, "Default process group has not been initialized, please make sure to call it")],
        (0,),
    )
    assert "`%ddp_abort` makes the process group of `%ddp_init` again" in finding.remedy


def test_an_interrupt_is_no_finding() -> None:
    assert failures.raised([end(0, outcome="interrupted")], (0,)) == ()
    text = failures.interrupted([end(0, outcome="interrupted"), end(1)])
    assert text == "No problem was found before rank 0 was interrupted."
    assert failures.interrupted([end(0, outcome="ok")]) == ""


def test_a_rank_that_waits_on_after_others_were_interrupted_is_told_how_to_get_free() -> None:
    """The straggler of before was repeated: "busy, not stuck: wait for them"."""
    ends = [end(1, outcome="interrupted"), end(2, outcome="interrupted")]
    case = Case((waits(0), *(RankReport(rank, Activity.FAILED) for rank in (1, 2))))
    finding = failures.left_by_interrupted(ends, case)
    assert finding is not None and (finding.ranks, finding.waiting) == ((1, 2), (0,))
    assert finding.category == Category.STRAGGLER
    assert finding.sentence == (
        "Ranks 1-2 were interrupted at utils.py:3 in load; rank 0 is still waiting"
    )
    nowhere = failures.left_by_interrupted([structs.replace(each, path=()) for each in ends], case)
    assert nowhere is not None and nowhere.category == Category.EARLY_EXIT
    assert nowhere.sentence == "Ranks 1-2 were interrupted; rank 0 is still waiting"
    assert finding.commands == ("%ddp_abort",)
    assert failures.left_by_interrupted([end(1)], case) is None
    busy = Case((waits(0), RankReport(1, Activity.BUSY)))
    assert failures.left_by_interrupted(ends, busy) is None
    assert failures.left_by_interrupted(ends, Case((RankReport(0),))) is None


def test_a_rank_that_died_is_a_finding_with_how_to_bring_it_back() -> None:
    (finding,) = deaths.died({2: RankExited(rank=2, pid=1, exit_code=-9, last_words="bye")})
    assert (finding.category, finding.ranks) == (Category.RANK_DIED, (2,))
    assert "SIGKILL" in finding.cause and finding.commands == ("%ddp_restart --ranks 2",)


def test_a_rank_that_was_killed_when_all_were_idle_is_a_finding() -> None:
    """Nothing was issued and nobody waited: a green sentence stood beside a dead rank."""
    idle = RankReport(0, Activity.IDLE)
    (finding,) = diagnose_run(Case((idle, report(1, Activity.DEAD, exit_code=-9)))).findings
    assert (finding.category, finding.ranks) == (Category.RANK_DIED, (1,))
    assert finding.commands == ("%ddp_restart --ranks 1",)


def test_a_rank_that_ended_with_code_0_when_all_were_idle_is_a_finding_but_of_a_script() -> None:
    """Its next cell was refused, "rank 1 is dead", and beside it stood: no problem found."""
    idle, ended = RankReport(0, Activity.IDLE), report(1, Activity.DEAD, exit_code=0)
    (finding,) = diagnose_run(Case((idle, ended))).findings
    assert (finding.category, finding.ranks) == (Category.EARLY_EXIT, (1,))
    assert finding.commands == ("%ddp_restart --ranks 1",)
    for case in (Case((idle, ended), script=True), Case((idle, with_facts(ended, exit_code=None)))):
        assert diagnose_run(case).proven and not diagnose_run(case).wrong


def test_a_set_up_that_failed_on_every_rank_is_told_with_its_remedy() -> None:
    state = RankState(
        0,
        Status.FAILED,
        entering=Stage.PROCESS_GROUP,
        cause="This torch was built without NCCL.",
        remedy="Use gloo.",
    )
    reports = tuple(RankReport(rank, Activity.FAILED) for rank in (0, 1))
    states = [state, RankState(1, Status.READY)]
    (finding,) = failures.failed_in_set_up(states, Case(reports))
    assert (finding.ranks, finding.remedy) == ((0,), "Use gloo.")
    assert finding.cause == (
        "Rank 0 failed in stage `process-group` of setup: This torch was built without NCCL"
    )


def waits(rank: int, **fields: object) -> RankReport:
    return report(rank, Activity.WAITING, inside="store", doing="init (a.py:3)", **fields)


def test_ranks_that_wait_for_long_are_said_to_with_what_is_known() -> None:
    probe = Probe("127.0.0.1:4000", "open")
    case = Case((waits(0, probe=probe), waits(1, probe=probe)))
    finding = failures.unexplained(case, {0: 24.0, 1: 23.0})
    assert finding is not None and finding.category is Category.UNDECIDED
    assert finding.cause == "Ranks 0-1 have been waiting for 24 s, and the cause is not known"
    assert finding.ranks == () and finding.waiting == (0, 1)
    assert any("can connect to 127.0.0.1:4000" in fact for fact in finding.evidence)


@pytest.mark.parametrize(
    ("other", "waited_s"),
    [
        (waits(1), UNEXPLAINED_AFTER_S / 2),
        (RankReport(1, Activity.BUSY), 600.0),
        (RankReport(1, Activity.HELD), 600.0),
        (waits(1, runnable=True), 600.0),
    ],
)
def test_ranks_that_may_get_on_are_no_finding_but_nothing_is_called_proved(
    other: RankReport, waited_s: float
) -> None:
    case = Case((waits(0), other))
    assert failures.unexplained(case, {0: waited_s, 1: waited_s}) is None
    said = failures.unsure(case, {0: waited_s}, "cell 3", (0, 1))
    assert said.startswith("No problem found so far: rank")


def test_ranks_that_run_nothing_and_did_not_fail_are_proof_enough() -> None:
    idle = Case((RankReport(0, Activity.IDLE), RankReport(1, Activity.IDLE)))
    assert failures.unsure(idle, {}, "cell 3", ()) == ""
    failed = Case((RankReport(0, Activity.FAILED), RankReport(1, Activity.IDLE)))
    earlier = Case((RankReport(0, Activity.FAILED, run=1), RankReport(1, Activity.IDLE, run=2)))
    assert failures.unsure(earlier, {}, "cell 3", ()) == "", "that was in an earlier cell"
    assert failures.unsure(failed, {}, "cell 3", ()) == "Rank 0 failed, and the cause is not known."
