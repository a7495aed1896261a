"""When a stop counts as stuck: two looks agree, nobody works, and a moment proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from traces import report, with_facts

from ddp_notebook.diagnosis import diagnose
from ddp_notebook.model import (
    Activity,
    Awaited,
    Case,
    Category,
    Diagnosis,
    InitArguments,
    Probe,
    RankReport,
    Ranks,
)
from ddp_notebook.session.runs.stall_detector import (
    LOOK_AFTER_S,
    LOOK_EVERY_S,
    NONE_COMES_AFTER_S,
    QUEUED_AFTER_S,
    RESTLESS_FOR_S,
    UNDECIDED_AFTER_S,
    StallDetector,
    stuck,
)

STEP_S = 0.05
"""How often the loop that waits gives the stall detector a turn."""


def waiting(rank: int, port: int = 1, **more: object) -> RankReport:
    came = InitArguments("env", rank, 3, "127.0.0.1", port, timeout_s=60.0)
    made = report(
        rank, Activity.WAITING, "store", entered=1, arguments=came, probe=Probe("", "open")
    )
    return with_facts(made, **more)  # type: ignore[arg-type]


def busy(rank: int, doing: str = "train.py, line 7") -> RankReport:
    return RankReport(rank, Activity.BUSY, doing=doing)


def idle(rank: int) -> RankReport:
    return RankReport(rank, Activity.IDLE)


SURE = (waiting(0), waiting(1, port=2), waiting(2))
"""Rank 1 came with another port: no moment's picture."""
OF_A_MOMENT = (waiting(0), idle(1), waiting(2))
"""Rank 1 is missing, or has only not begun yet."""
HEALTHY = (waiting(0), waiting(1), waiting(2))


class Watch:
    """A stall detector whose time passes when it is told to."""

    def __init__(self, *ranks: RankReport) -> None:
        self.ranks = ranks
        self.now_s = 100.0
        self.looks = 0
        self.moved: Callable[[], object] = lambda: None
        self.detector = StallDetector(self._look, lambda: self.now_s, lambda: self.moved())

    def _look(self) -> Case:
        self.looks += 1
        return Case(self.ranks)

    def pass_s(self, seconds: float) -> Diagnosis | None:
        """Let time pass, giving turns; what is said, if anything is."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += STEP_S
            if (said := self.detector.turn()) is not None:
                return said
        return None

    def look(self) -> Diagnosis | None:
        """Let time pass until the next look; what it gives."""
        before = self.looks
        while self.looks == before:
            self.now_s += STEP_S
            if (said := self.detector.turn()) is not None:
                return said
        return None


def said(diagnosis: Diagnosis | None) -> tuple[Category, Ranks]:
    assert diagnosis is not None
    return diagnosis.findings[0].category, diagnosis.findings[0].ranks


def test_nobody_is_looked_at_before_somebody_may_have_waited() -> None:
    watch = Watch(*SURE)
    assert watch.detector.turn() is None
    watch.pass_s(LOOK_AFTER_S - 2 * STEP_S)
    assert watch.looks == 0


def test_a_mistake_is_said_when_two_looks_agree_on_it_and_within_two_seconds() -> None:
    watch = Watch(*SURE)
    began_s = watch.now_s
    assert said(watch.pass_s(60)) == (Category.ENV_MISMATCH, (1,))
    assert watch.looks == 2
    assert watch.now_s - began_s < LOOK_AFTER_S + LOOK_EVERY_S + 4 * STEP_S < 2


def test_ranks_that_get_on_slowly_are_not_said_to_stand_still() -> None:
    watch = Watch(*HEALTHY)
    watch.moved = lambda: watch.now_s // 1.5  # a collective on the same line each 1.5 s
    assert watch.pass_s(4 * UNDECIDED_AFTER_S) is None
    watch.moved = lambda: 0
    assert watch.pass_s(0.9 * UNDECIDED_AFTER_S) is None
    assert said(watch.pass_s(UNDECIDED_AFTER_S)) == (Category.UNDECIDED, ())


def test_between_looks_the_ranks_are_left_alone() -> None:
    watch = Watch(*HEALTHY)
    watch.pass_s(5)
    assert watch.looks <= (5 - LOOK_AFTER_S) / LOOK_EVERY_S + 1


def test_two_looks_that_see_different_mistakes_do_not_agree() -> None:
    watch = Watch(*SURE)
    assert watch.look() is None
    watch.ranks = (waiting(0), waiting(1), waiting(2, port=2))
    assert watch.look() is None
    assert said(watch.look()) == (Category.ENV_MISMATCH, (2,))


def test_a_look_at_which_all_is_well_begins_the_count_anew() -> None:
    watch = Watch(*SURE)
    assert watch.look() is None
    watch.ranks = HEALTHY
    assert watch.look() is None
    watch.ranks = SURE
    assert watch.look() is None
    assert watch.look() is not None


def test_a_rank_that_works_holds_the_word_back_whatever_else_is_wrong() -> None:
    watch = Watch(waiting(0), waiting(1, port=2), busy(2))
    assert watch.pass_s(10 * UNDECIDED_AFTER_S) is None
    assert watch.detector.latest.wrong, "who asks is told"
    watch.ranks = SURE
    assert said(watch.pass_s(5)) == (Category.ENV_MISMATCH, (1,))


def test_a_rank_that_polls_for_a_file_does_not_work() -> None:
    polling = with_facts(busy(1), polls_for="/tmp/ready")
    watch = Watch(waiting(0), polling, waiting(2))
    assert said(watch.pass_s(5)) == (Category.FILESYSTEM, (1,))


def test_who_was_late_is_remembered_after_it_came() -> None:
    watch = Watch(waiting(0), busy(1), waiting(2))
    assert watch.pass_s(5) is None
    watch.ranks = HEALTHY
    assert watch.pass_s(5) is None
    assert said(watch.detector.seen_late) == (Category.STRAGGLER, (1,))
    assert watch.detector.latest.findings == ()


def test_what_may_be_a_moments_picture_waits_while_ranks_lack_a_cpu() -> None:
    restless = tuple(with_facts(e, runnable=e.activity is Activity.WAITING) for e in OF_A_MOMENT)
    watch = Watch(*restless)
    assert watch.pass_s(RESTLESS_FOR_S - 1) is None
    assert said(watch.pass_s(5)) == (Category.MISSING_RANK, (1,)), "no excuse for ever"


def test_ranks_that_lack_no_cpu_need_no_such_patience() -> None:
    watch = Watch(*OF_A_MOMENT)
    assert said(watch.pass_s(2)) == (Category.MISSING_RANK, (1,))


def test_what_is_certain_is_said_also_where_ranks_lack_a_cpu() -> None:
    watch = Watch(*(with_facts(e, runnable=True) for e in SURE))
    assert said(watch.pass_s(2)) == (Category.ENV_MISMATCH, (1,))


def test_the_patience_begins_anew_when_the_ranks_got_on_meanwhile() -> None:
    restless = tuple(with_facts(e, runnable=e.activity is Activity.WAITING) for e in OF_A_MOMENT)
    watch = Watch(*restless)
    assert watch.pass_s(RESTLESS_FOR_S - 1) is None
    watch.ranks = HEALTHY
    assert watch.look() is None
    watch.ranks = restless
    assert watch.pass_s(RESTLESS_FOR_S - 1) is None


def test_a_long_stillness_that_no_rule_explains_is_shown_as_it_is() -> None:
    watch = Watch(*HEALTHY)
    assert watch.pass_s(UNDECIDED_AFTER_S - 1) is None
    diagnosis = watch.pass_s(5)
    assert said(diagnosis) == (Category.UNDECIDED, ())
    assert diagnosis is not None
    (finding,) = diagnosis.findings
    assert finding.waiting == (0, 1, 2)
    assert len(diagnosis.doing or {}) == 3
    assert "%ddp_abort" in finding.remedy


def test_ranks_whose_gpus_have_much_to_compute_before_a_collective_are_waited_for_longer() -> None:
    queued = tuple(replace(e, awaits=Awaited(gpu=True)) for e in HEALTHY)
    watch = Watch(*queued)
    assert watch.pass_s(QUEUED_AFTER_S - 1) is None
    assert said(watch.pass_s(5)) == (Category.UNDECIDED, ())


@pytest.mark.parametrize(
    "moved",
    [
        waiting(1, inside="rendezvous"),
        waiting(1, doing="rendezvous: waits for rank 2"),
        replace(waiting(1), activity=Activity.IDLE, inside="", left=1),
    ],
    ids=["the stage", "the place", "the activity"],
)
def test_any_change_begins_the_stillness_anew(moved: RankReport) -> None:
    watch = Watch(*HEALTHY)
    assert watch.pass_s(UNDECIDED_AFTER_S - 1) is None
    watch.ranks = (waiting(0), moved, waiting(2))
    assert watch.pass_s(UNDECIDED_AFTER_S - 1) is None
    assert watch.pass_s(5) is not None


@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.HELD])
def test_while_a_rank_works_or_is_held_a_stillness_is_nothing(activity: Activity) -> None:
    watch = Watch(waiting(0), RankReport(1, activity, doing="x"), waiting(2))
    assert watch.pass_s(5 * UNDECIDED_AFTER_S) is None


def test_where_none_of_those_that_others_wait_for_can_come_it_is_shown_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 make a group that rank 2, which has finished, does not make."""
    monkeypatch.setattr(diagnose, "RUN", {})  # as of a stall that no rule explains
    done = replace(idle(2), entered=1, left=1, initialized=True)
    making = replace(done, activity=Activity.WAITING, inside="process-group")
    inside = (replace(making, rank=0), replace(making, rank=1))
    watch = Watch(*inside, done)
    assert said(watch.pass_s(NONE_COMES_AFTER_S + 2)) == (Category.UNDECIDED, ())
    for may_come in (busy(2), replace(done, activity=Activity.SILENT)):
        assert Watch(*inside, may_come).pass_s(NONE_COMES_AFTER_S + 2) is None
    runs = with_facts(making, rank=1, runnable=True)
    assert Watch(inside[0], runs, done).pass_s(NONE_COMES_AFTER_S + 2) is None


def test_a_rank_that_answers_nothing_and_uses_no_cpu_is_named() -> None:
    """A thread of torch's and the main one wait for each other: nobody else need wait."""
    mute = report(1, doing="train.py, line 7", process="sleeping", main_cpu_s=3.0)
    watch = Watch(idle(0), mute)
    diagnosis = watch.pass_s(UNDECIDED_AFTER_S + 5)
    assert said(diagnosis) == (Category.UNDECIDED, (1,))
    assert diagnosis is not None and "Native code" in diagnosis.findings[0].remedy


def test_a_rank_that_answers_nothing_and_works_is_waited_for() -> None:
    watch = Watch(*HEALTHY)
    for seconds in range(3 * int(UNDECIDED_AFTER_S)):
        mute = report(1, process="running", main_cpu_s=float(seconds))
        watch.ranks = (waiting(0), mute, waiting(2))
        assert watch.pass_s(1) is None


def test_ranks_that_all_do_nothing_are_not_undecided() -> None:
    assert Watch(idle(0), idle(1)).pass_s(5 * UNDECIDED_AFTER_S) is None


def test_stuck_needs_a_mistake_and_nobody_who_works() -> None:
    wrong = Diagnosis(Watch(*SURE).detector.latest.findings)
    assert not stuck(Case(SURE), wrong)
    watch = Watch(*SURE)
    watch.look()
    assert stuck(Case(SURE), watch.detector.latest)
    assert not stuck(Case((*SURE, busy(3))), watch.detector.latest)


def test_a_rank_that_is_stopped_is_named_though_no_other_waits_for_it() -> None:
    """The only one of its cell; before, it was "native code that holds Python's lock"."""
    gone = report(1, Activity.SILENT, doing="its process 7 is stopped", process="stopped", pid=7)
    watch = Watch(idle(0), gone)
    found = watch.pass_s(5)
    assert said(found) == (Category.STRAGGLER, (1,))
    assert found is not None and "kill -CONT 7" in found.findings[0].remedy
