"""When a set-up is called stuck: never at the first look, never while somebody works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import shared_memory
from ddp_notebook.model import Activity, Category, InitArguments, RankEvidence, SetupCase
from ddp_notebook.session.options import InitOptions, parse_settings
from ddp_notebook.session.why import LOOK_EVERY_S, RESTLESS_FOR_S, UNDECIDED_AFTER_S, Watchman

WAITS = RankEvidence(0, Activity.WAITING, inside="store", entered=1, arguments=InitArguments())
ABSENT = RankEvidence(1, Activity.IDLE)
BUSY = RankEvidence(1, Activity.BUSY, doing="load.py:3")


class Clock:
    """A time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    """A watchman, what it sees, and its clock."""

    def __init__(self, *ranks: RankEvidence) -> None:
        self.ranks = ranks
        self.clock = Clock()
        self.watchman = Watchman(lambda: SetupCase(self.ranks), self.clock)

    def looks(self, count: int) -> Iterator[object]:
        """What each of the next looks gives."""
        for _ in range(count):
            self.clock.now_s += max(LOOK_EVERY_S, 0.6) + 0.01
            yield self.watchman.turn()

    def until(self, seconds: float) -> list[object]:
        """What is given until so much time has passed."""
        found = []
        while self.clock.now_s < seconds:
            found += [each for each in self.looks(1) if each is not None]
        return found


def test_two_looks_must_agree() -> None:
    first, second = Scene(WAITS, ABSENT).looks(2)
    assert first is None
    assert second is not None


def test_nothing_is_looked_at_before_somebody_has_waited() -> None:
    scene = Scene(WAITS, ABSENT)
    assert scene.watchman.turn() is None
    assert scene.watchman.latest.findings == ()


def test_a_rank_that_works_holds_the_verdict_back_for_ever() -> None:
    scene = Scene(WAITS, BUSY)
    assert scene.until(2 * UNDECIDED_AFTER_S) == []
    assert scene.watchman.seen_late is not None
    assert scene.watchman.seen_late.findings[0].category is Category.STRAGGLER


def test_a_change_between_two_looks_begins_anew() -> None:
    scene = Scene(WAITS, ABSENT)
    assert list(scene.looks(1)) == [None]
    scene.ranks = (WAITS, BUSY)
    assert list(scene.looks(1)) == [None]
    scene.ranks = (WAITS, ABSENT)
    assert list(scene.looks(1)) == [None]


def test_ranks_that_only_lack_a_cpu_get_time() -> None:
    scene = Scene(replace(WAITS, runnable=True), ABSENT)
    assert scene.until(RESTLESS_FOR_S) == []
    assert scene.until(RESTLESS_FOR_S + 5) != []


def test_a_long_stillness_that_no_rule_explains_is_shown_as_undecided() -> None:
    scene = Scene(WAITS, replace(WAITS, rank=1))
    assert scene.until(UNDECIDED_AFTER_S) == []
    found = scene.until(UNDECIDED_AFTER_S + 5)
    assert found
    assert found[0].findings[-1].category is Category.UNDECIDED  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- --set


def test_settings_are_written_by_rank_set_name_and_value() -> None:
    assert parse_settings(["1:MASTER_PORT=23457", "0,2-3:A="], 4) == {
        1: {"MASTER_PORT": "23457"},
        0: {"A": ""},
        2: {"A": ""},
        3: {"A": ""},
    }


@pytest.mark.parametrize("text", ["MASTER_PORT=1", "1:MASTER_PORT", "9:A=1", "x:A=1", "1:a b=2"])
def test_a_bad_setting_says_how_one_is_written(text: str) -> None:
    with pytest.raises(UsageMistake, match="--set"):
        parse_settings([text], 4)


def test_a_setting_for_a_rank_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(UsageMistake, match="--set names rank 4"):
        InitOptions(world_size=2, settings={4: {"A": "1"}})


# --------------------------------------------------------------------------- shared memory


def test_only_what_dead_processes_of_the_session_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    import os

    ours = "sem.mp-ddp_notebook-abc-xyz12345"
    for name in (ours, "sem.mp-other123", f"torch_{os.getpid()}_1_0", "torch_999999999_1_0", "x"):
        (tmp_path / name).touch()
    os.link(tmp_path / ours, tmp_path / "sem.a1b2c3")
    shared_memory.remove_orphans(["/tmp/ddp_notebook-abc"], 0.0)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"sem.mp-other123", f"torch_{os.getpid()}_1_0", "x"}
