"""A saved run as a trace: a track per rank, one axis, and nothing drawn over anything else."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from saved_runs import MS, collective, job, runs

from ddp_notebook.archive.format import SavedRun
from ddp_notebook.archive.trace import trace
from ddp_notebook.model import (
    CallFacts,
    Collectives,
    LineLeft,
    LineStopped,
    Moment,
    Phase,
    RankExited,
    Snapshot,
    Stage,
    StageFailed,
    Status,
)


def events_of(saved: SavedRun) -> list[dict[str, Any]]:
    made = trace(saved)
    json.dumps(made, allow_nan=False)
    events: list[dict[str, Any]] = made["traceEvents"]
    return events


def slices(saved: SavedRun, category: str, rank: int | None = None) -> list[dict[str, Any]]:
    return [
        e
        for e in events_of(saved)
        if e["ph"] == "X" and e["cat"] == category and rank in (None, e["pid"] - 100)
    ]


def with_collectives(*issued: Any) -> SavedRun:
    """The job where rank 0 issued these."""
    saved = job()
    assert saved.case is not None
    case = replace(saved.case, collectives=Collectives({0: issued}))
    return replace(saved, case=case)


def threads(saved: SavedRun, rank: int) -> dict[int, str]:
    return {
        e["tid"]: e["args"]["name"]
        for e in events_of(saved)
        if e["name"] == "thread_name" and e["pid"] == rank + 100
    }


def test_every_rank_has_a_track_of_its_own() -> None:
    names = {e["pid"]: e["args"]["name"] for e in events_of(job()) if e["name"] == "process_name"}
    assert names == {100: "rank 0", 101: "rank 1"}
    assert list(threads(job(), 0).values()) == ["setup and cells", "collectives"]
    assert not threads(job(), 0).keys() & threads(job(), 1).keys()


def test_a_rank_whose_process_is_not_known_has_a_track_all_the_same() -> None:
    saved = job()
    saved = replace(saved, snapshot=replace(saved.snapshot, ranks=saved.start.ranks))
    assert {e["pid"] for e in events_of(saved)} == {1, 2}


def test_stages_and_cells_are_where_they_happened_and_not_where_they_were_heard_of() -> None:
    told = [
        (e["name"], e["ts"], e["dur"])
        for category in ("setup", "cell")
        for e in slices(job(), category, rank=0)
    ]
    # The first was sent at 1,000 ms; the run was saved at 2,000.
    assert told == [("launched", 0, 100e3), ("verified", 200e3, 100e3), ("cell 2", 400e3, 600e3)]


def test_a_wall_clock_that_was_set_is_not_believed() -> None:
    saved = job()
    hour_ns = 3600 * 1000 * MS
    cells = slices(replace(saved, wall_ns=saved.wall_ns + hour_ns), "cell", rank=0)
    assert cells[0]["ts"] == 400e3  # as heard: all 10 ms later
    assert slices(replace(saved, wall_ns=saved.wall_ns - hour_ns), "cell", rank=0) == cells


def test_a_collective_says_what_it_was() -> None:
    (first, last) = slices(job(), "collective", rank=0)
    assert (first["name"], first["ts"], first["dur"]) == ("all_reduce", 400e3, 500)
    assert first["args"] == {
        "phase": "done",
        "shape": [4],
        "dtype": "float32",
        "bytes": 16,
        "tensors": 1,
        "group": "default",
        "slot": 0,
        "number": 0,
        "place": "train.py, line 10",
        "line": "dist.all_reduce(x)",
    }
    assert last["args"]["unfinished"]
    assert last["ts"] + last["dur"] == 1000e3, "drawn until the run was saved"


def test_what_overlaps_is_drawn_beside_each_other() -> None:
    saved = with_collectives(
        collective(0, 0, 1500, 1600),
        collective(0, 1, 1550, 1700),
        collective(0, 2, 1600, 1650),
        collective(0, 3, 1660, 1670),
    )
    main, *_ = threads(saved, 0)
    lanes = [e["tid"] - main for e in slices(saved, "collective")]
    assert lanes == [1, 2, 1, 1]
    assert list(threads(saved, 0).values())[1:] == ["collectives", "collectives (2)"]


def test_one_that_was_refused_is_called_so() -> None:
    refused = replace(collective(0, 0, 1500, 1501), phase=Phase.REFUSED)
    assert slices(with_collectives(refused), "collective")[0]["name"] == "all_reduce (refused)"


def test_held_time_is_a_slice_of_its_own_and_a_freed_one_ends_where_it_was_freed() -> None:
    held = replace(collective(0, 0, 900, 950), call=CallFacts(held_ns=800 * MS))
    saved = with_collectives(held, collective(0, 1, 960, None))
    died = Moment(970 * MS, RankExited(rank=0, pid=100, exit_code=-9, heard_ns=970 * MS))
    saved = replace(saved, moments=(*saved.moments, died))
    (paused,) = slices(saved, "paused")
    took, freed = slices(saved, "collective")
    assert (paused["dur"], took["dur"], freed["dur"]) == (800_000, 50_000, 10_000)
    assert paused["tid"] == took["tid"] and paused["ts"] + paused["dur"] == took["ts"]
    assert freed["name"] == "all_reduce (freed)" and "unfinished" not in freed["args"]


def test_a_pause_at_a_line_is_a_slice_inside_its_cell() -> None:
    saved = job()
    place = {"file": "cell 2", "line": 3, "function": "<module>"}
    stopped = LineStopped(rank=0, cell=5, stop=1, why="breakpoint()", **place)
    left = LineLeft(rank=0, cell=5, stop=1)
    told = (Moment(1500 * MS, stopped), Moment(1800 * MS, left))
    saved = replace(saved, moments=(*saved.moments, *told))
    (paused,) = slices(saved, "paused")
    (cell,) = slices(saved, "cell", rank=0)
    assert (paused["name"], paused["dur"]) == ("line 3 (paused)", 300_000)
    assert paused["tid"] == cell["tid"]
    assert cell["ts"] < paused["ts"] < cell["ts"] + cell["dur"]
    assert paused["args"] == {"place": "cell 2, line 3", "why": "breakpoint()"}
    assert [(each.began_ns, each.ended_ns) for each in saved.pauses] == [(1500 * MS, 1800 * MS)]
    assert not replace(saved, run=6).pauses


def test_arrows_join_the_ranks_parts_of_one_collective() -> None:
    arrows = [e for e in events_of(job(4)) if e.get("cat") == "meets"]
    by_id: dict[int, list[Any]] = defaultdict(list)
    for e in arrows:
        by_id[e["id"]].append((e["ph"], e["pid"]))
    # The last was issued by rank 0 alone.
    assert list(by_id.values()) == [[("s", 100), ("f", 101)]] * 3
    inside = {(e["tid"], e["ts"]) for e in slices(job(4), "collective")}
    assert all((e["tid"], e["ts"]) in inside for e in arrows)


def test_a_group_made_anew_counts_anew_and_does_not_meet_the_old_one() -> None:
    saved = job()
    assert saved.case is not None
    twice = {
        rank: (collective(rank, 0, 1500, 1501), collective(rank, 0, 1600, 1601))
        for rank in range(2)
    }
    case = replace(saved.case, collectives=Collectives(twice))
    arrows = [e for e in events_of(replace(saved, case=case)) if e.get("cat") == "meets"]
    assert [(e["ph"], e["ts"]) for e in arrows] == [
        ("s", 500e3),
        ("f", 500e3),
        ("s", 600e3),
        ("f", 600e3),
    ]


def test_a_death_ends_what_the_rank_did_and_is_marked() -> None:
    saved = job()
    died = Moment(1_800 * MS, RankExited(rank=1, pid=101, exit_code=-9))
    saved = replace(saved, moments=(*saved.moments, died))
    (cell,) = slices(saved, "cell", rank=1)
    assert cell["ts"] + cell["dur"] == 800e3
    assert cell["args"]["outcome"] == "killed by SIGKILL"
    (mark,) = [e for e in events_of(saved) if e["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["pid"]) == ("killed by SIGKILL", 800e3, 101)


def test_a_stage_that_failed_is_marked() -> None:
    saved = job()
    failed = StageFailed(rank=0, stage=Stage.STORE, cause="nobody answers", remedy="")
    saved = replace(saved, moments=(Moment(1_050 * MS, failed), *saved.moments))
    marks = [e for e in events_of(saved) if e["ph"] == "i"]
    assert marks[0]["name"] == "store failed"
    assert marks[0]["args"] == {"cause": "nobody answers"}


def test_a_script_has_its_name() -> None:
    (cell,) = slices(replace(job(), script="train.py"), "cell", rank=0)
    assert cell["name"] == "train.py"


def test_what_began_before_the_first_event_that_was_kept_is_drawn_from_there() -> None:
    saved = job()
    state = replace(saved.start.ranks[0], status=Status.RUNNING, cell=7)
    start: Snapshot = replace(saved.start, ranks=(state, saved.start.ranks[1]))
    (cell,) = slices(replace(saved, start=start, moments=()), "cell")
    assert (cell["name"], cell["args"]) == ("cell 7", {"unfinished": True})


def test_a_pause_that_began_while_the_run_was_saved_has_no_length() -> None:
    saved = job()
    late_ns = saved.snapshot.taken_ns + 1
    stopped = LineStopped(rank=0, cell=5, stop=1, file="train.py", line=3, function="")
    saved = replace(saved, moments=(*saved.moments, Moment(late_ns, stopped)))
    (pause,) = slices(saved, "paused")
    assert pause["dur"] == 0


@given(runs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_of_any_run_nothing_lasts_less_than_no_time(saved: SavedRun) -> None:
    events = events_of(saved)
    assert all(e["ts"] >= 0 for e in events if "ts" in e)
    assert all(e["dur"] >= 0 for e in events if "dur" in e)
    issued = sum(len(each) for each in saved.collectives.of.values())
    assert sum(e.get("cat") == "collective" for e in events) == issued
