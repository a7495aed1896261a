"""What became of the ranks of a run, and who is only late; setup keeps its own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import DDP, found, lost, same, the_one
from traces import (
    BUSY,
    DESTROYED,
    all_reduce,
    backward,
    barrier,
    died,
    places,
    play,
    raised,
    with_facts,
)

from ddp_notebook.diagnosis import diagnose_run, diagnose_setup
from ddp_notebook.model import Activity, Case, Category, Phase, RankReport

# -- fate ----------------------------------------------------------------------------------


def test_a_rank_that_was_killed() -> None:
    case = play(same(3, [*DDP, *[backward()] * 6], r2=[*DDP, *[backward()] * 3]), {2: died(-9)})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.RANK_DIED, (2,))
    assert "SIGKILL" in finding.cause
    assert finding.waiting == (0, 1)
    assert found(lost(case, 0, 1)) == [("rank-died", (2,))]
    assert the_one(lost(case, 0, 1)).waiting == (0, 1)


def test_ranks_that_the_launcher_ended_after_the_first_are_victims() -> None:
    case = play(same(3, [*[backward()] * 6], r2=[*[backward()] * 3]), {2: died(-9)})
    ended = [replace(died(-15), rank=rank) for rank in (0, 1)]
    assert found(replace(case, ranks=(*ended, case.ranks[2]))) == [("rank-died", (2,))]


def test_a_rank_that_got_a_sigterm_before_the_others_lost_it_is_the_first() -> None:
    """ "Nothing has moved for 30 s, and the cause is not known"."""
    case = play(same(3, [*[backward()] * 6], r2=[*[backward()] * 3]), {2: died(-15)})
    assert found(case) == [("rank-died", (2,))]
    assert found(lost(case, 0)) == [("rank-died", (2,))]
    assert found(lost(case, 0, 1)) == [("rank-died", (2,))]


def test_who_a_launcher_ended_after_another_lost_a_rank_that_left_is_no_culprit() -> None:
    case = play(same(4, [*[backward()] * 6], r3=[*[backward()] * 3]), {3: died(0)})
    case = lost(case, 0)
    ended = [replace(died(-15), rank=rank) for rank in (1, 2)]
    case = replace(case, ranks=(case.ranks[0], *ended, case.ranks[3]))
    assert all(not {1, 2} & set(ranks) for _, ranks in found(case))


def test_who_was_aborted_inside_a_collective_that_a_dead_rank_had_left_is_a_victim() -> None:
    case = play(same(3, [*[backward()] * 6], r2=[*[backward()] * 3]), {2: died(3)})
    aborted = [replace(died(-6), rank=rank) for rank in (0, 1)]
    assert found(replace(case, ranks=(*aborted, case.ranks[2]))) == [("rank-died", (2,))]


def test_a_rank_that_was_killed_in_the_middle_of_a_collective() -> None:
    case = play(same(3, [backward()] * 3))
    of = {
        rank: (*own[:-1], replace(own[-1], phase=Phase.ISSUED if rank == 2 else Phase.FAILED))
        for rank, own in case.collectives.of.items()
    }
    lost_it = [replace(raised("Connection closed by peer"), rank=rank) for rank in (0, 1)]
    ranks = (*lost_it, replace(died(-9), rank=2))
    case = replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))
    assert found(case) == [("rank-died", (2,))]
    assert the_one(case).waiting == (0, 1)


def test_an_exception_before_a_collective() -> None:
    want, part = all_reduce(11, shape=(), reduce_op="MAX"), all_reduce(14, shape=(8,))
    case = play(same(3, [want, part, part], r2=[want]), {2: raised("cannot form 5 parts")})
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (2,))
    assert finding.waiting == (0, 1)
    assert any("are waiting in `all_reduce` at train.py" in line for line in finding.evidence)
    assert found(lost(case, 0, 1)) == [("exception-on-one-rank", (2,))]
    assert found(lost(case, 0, 1, text="Timed out waiting 1800000ms for recv")) == [
        ("exception-on-one-rank", (2,))
    ]


def test_out_of_memory_on_one_rank() -> None:
    error = raised("DefaultCPUAllocator: can't allocate memory: 8 GB", "RuntimeError")
    case = play(same(2, [backward(), backward()], r1=[backward()]), {1: error})
    assert found(case) == [("oom-on-one-rank", (1,))]


def test_an_error_on_every_rank_keeps_nobody_waiting() -> None:
    case = play(same(2, [backward()]), {0: raised("a bug"), 1: raised("a bug")})
    assert found(case) == []


def test_a_rank_that_finished_early_and_one_that_left_the_group() -> None:
    program = [all_reduce(5), all_reduce(9), barrier(12)]
    case = play(same(3, program, r1=program[:1]))
    assert found(case) == [("early-exit", (1,))]
    case = play(same(3, program, r1=program[:1]), {1: DESTROYED})
    assert found(case) == [("missing-destroy", (1,))]
    code = "\n" * 8 + "if rank != 1:\n    pass\ndist.all_reduce(x)\n"
    assert found(case, {"train.py": code}) == [("missing-destroy", (1,))]


LEAVES = "\n\nif not trials:\n    sys.exit(0)\nx()\n\n\n\n\n\nsys.exit(0)\n"


@pytest.mark.parametrize(
    ("line", "told"), [(4, "early-exit"), (11, "missing-destroy"), (0, "missing-destroy")]
)
def test_a_rank_that_left_by_an_exit_on_a_condition(line: int, told: str) -> None:
    """Not by the last line of its script, as all ranks will."""
    program = [all_reduce(5), all_reduce(9), barrier(12)]
    left = with_facts(DESTROYED, left_at=places(line) if line else ())
    case = play(same(3, program, r1=program[:1]), {1: left})
    finding = the_one(case, {"train.py": LEAVES})
    assert (finding.category, finding.ranks) == (told, (1,))
    by_exit = "Rank 1 left by `sys.exit()`" in finding.cause
    assert by_exit == any("behind `if not trials" in line for line in finding.evidence)
    assert by_exit == (told == "early-exit")


def test_a_rank_that_was_not_asked_to_run_the_cell() -> None:
    case = play({0: [all_reduce(5)], 1: [all_reduce(5)], 2: []})
    running = tuple(replace(e, run=4) for e in case.ranks[:2])
    finding = the_one(replace(case, ranks=(*running, replace(case.ranks[2], run=3))))
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (2,))


# -- who is only late ----------------------------------------------------------------------


def test_a_busy_rank_is_late_and_nothing_is_wrong() -> None:
    working = with_facts(BUSY, path=places((40, "load")), main_cpu_s=3.0)
    case = play(same(3, [*DDP, backward(), backward()], r1=[*DDP, backward()]), {1: working})
    diagnosis = diagnose_run(case)
    assert not diagnosis.wrong
    (finding,) = diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.STRAGGLER, (1,))
    assert finding.passing
    assert finding.waiting == (0, 2)
    assert finding.cause.startswith("Rank 1 has not yet called `backward`: it is busy at train.py")
    assert finding.cause.endswith("in load")


def test_a_rank_that_is_held_is_waited_for() -> None:
    held = replace(BUSY, activity=Activity.HELD)
    diagnosis = diagnose_run(play(same(2, [backward()] * 2, r1=[backward()]), {1: held}))
    assert [(f.category, f.passing) for f in diagnosis.findings] == [(Category.STRAGGLER, True)]


def test_who_waits_for_a_rank_that_is_gone_is_stuck_however_busy_another_is() -> None:
    case = play({0: [backward()] * 3, 1: [backward()] * 2, 2: [backward()] * 2}, {2: BUSY})
    assert found(case) == [("uneven-inputs", (1,))]


def test_a_run_that_the_user_interrupts_proves_nothing() -> None:
    case = play(same(2, [backward()] * 3, r1=[backward()]), {1: raised("", "KeyboardInterrupt")})
    interrupted = replace(raised("", "KeyboardInterrupt"), rank=0)
    assert found(replace(case, ranks=(interrupted, case.ranks[1]))) == []
    waits = RankReport(0, Activity.WAITING, "ddp", entered=1)
    for judge in (diagnose_run, diagnose_setup):
        of_one = judge(Case((waits, replace(interrupted, rank=1)), {"WORLD_SIZE": "2"}))
        assert all(f.category is not Category.EXCEPTION_ON_ONE_RANK for f in of_one.findings)


# -- setup --------------------------------------------------------------------------------


def test_a_run_in_which_nothing_was_issued_is_judged_as_a_set_up() -> None:
    never = RankReport(1, Activity.IDLE)
    waits = RankReport(0, Activity.WAITING, "store", entered=1)
    case = Case((waits, never), {"WORLD_SIZE": "2"})
    assert diagnose_run(case) == diagnose_setup(case)
    assert found(case) == [("missing-rank", (1,))]


def test_what_ranks_came_with_comes_before_what_they_did() -> None:
    case = play(same(3, [backward()] * 3, r1=[backward()] * 2))
    told = tuple(
        replace(e, arguments=replace(e.arguments, world_size=4 if e.rank == 1 else 3))
        for e in case.ranks
    )
    assert [category for category, _ in found(replace(case, ranks=told))] == ["env-mismatch"]


def test_a_further_group_is_not_the_first() -> None:
    """The barrier at the end of init_process_group is inside setup, the default group there."""
    joining = RankReport(0, Activity.WAITING, "process-group", entered=1, initialized=True)
    never = RankReport(1, Activity.IDLE)
    assert found(Case((joining, never), {"WORLD_SIZE": "2"})) == [("missing-rank", (1,))]


def test_who_waits_in_set_up_for_a_busy_rank_is_told_so() -> None:
    case = play({0: [backward()], 1: [backward()]})
    waits = RankReport(0, Activity.WAITING, "store", entered=2, left=1)
    late = replace(BUSY, rank=1, doing="load (train.py, line 7)")
    findings = diagnose_run(replace(case, ranks=(waits, late))).findings
    assert [(f.category, f.ranks, f.passing) for f in findings] == [
        (Category.STRAGGLER, (1,), True)
    ]
