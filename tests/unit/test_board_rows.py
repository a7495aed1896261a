"""The board's rows: what ranks do, who waits for whom, which is the culprit; and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from saved_runs import snapshots
from traces import all_reduce, places

from ddp_notebook.board import model
from ddp_notebook.board.source import _raised_in
from ddp_notebook.model import (
    Category,
    CellFinished,
    Collective,
    Collectives,
    Decision,
    Diagnosis,
    Finding,
    LineStopped,
    Loading,
    Phase,
    Place,
    RankExited,
    RankSpawned,
    RankState,
    Role,
    Side,
    Snapshot,
    Stage,
    Status,
    parse_ranks,
)
from ddp_notebook.model.fold import fold_rank
from ddp_notebook.views import board as board_view
from ddp_notebook.views import markup
from ddp_notebook.views.board_rows import BoardFacts, board_of, board_rows
from ddp_notebook.views.stack_tree import locations, pending_locations
from ddp_notebook.views.step_rows import collectives_at

S = 1_000_000_000


def running(rank: int, **more: object) -> RankState:
    """A rank in a cell."""
    fields = {"status": Status.RUNNING, "stage": Stage.VERIFIED, "heard_ns": 10 * S, "cell": 3}
    return replace(RankState(rank), **{**fields, **more})  # type: ignore[arg-type]


def issued(rank: int, number: int = 0, phase: Phase = Phase.ISSUED) -> Collective:
    """An all_reduce that a rank issued at 5 s."""
    made = all_reduce(6, path=places(9, (6, "step"), file="cell 3"))
    done_ns = 6 * S if phase is Phase.DONE else 0
    return replace(
        made, rank=rank, number=number, slot=number, issued_ns=5 * S, phase=phase, done_ns=done_ns
    )


def facts(world_size: int = 4, without: int = 2, **more: object) -> BoardFacts:
    """All but one rank wait in an all_reduce; that one computes."""
    ranks = tuple(running(rank) for rank in range(world_size))
    of = {rank: (issued(rank),) for rank in range(world_size) if rank != without}
    everyone = tuple(range(world_size))
    fields = {
        "snapshot": Snapshot(ranks=ranks, taken_ns=11 * S),
        "collectives": Collectives(of, {"default": everyone}),
        "pending": everyone,
    }
    return BoardFacts(**{**fields, **more})  # type: ignore[arg-type]


def blames(*ranks: int, passing: bool = False, waiting: tuple[int, ...] = ()) -> Diagnosis:
    """A diagnosis with one finding."""
    finding = Finding(Category.STRAGGLER, ranks, "is late", "wait", waiting, passing=passing)
    return Diagnosis((finding,), None, 4)


def test_who_waits_is_shown_with_whom_it_waits_for_and_since_when() -> None:
    drawn = board_rows(facts())
    assert [row.ranks for row in drawn] == [(0,), (1,), (2,), (3,)]
    assert [row.role for row in drawn] == [Role.WAITING, Role.WAITING, Role.RUNNING, Role.WAITING]
    assert [row.waits_for for row in drawn] == [(2,), (2,), (), (2,)]
    assert drawn[0].since_ns == 5 * S
    assert (
        "all_reduce of float32 [4]" in drawn[0].text and "cell 3, line 6, in step" in drawn[0].text
    )


def test_ranks_in_the_same_place_share_a_row_from_eight_on() -> None:
    drawn = board_rows(facts(world_size=64, without=7))
    assert [row.ranks for row in drawn] == [tuple(r for r in range(64) if r != 7), (7,)]
    assert drawn[0].waits_for == (7,)


def test_of_eight_ranks_those_refused_for_one_cause_share_a_row_and_the_culprit_is_seen() -> None:
    innocent = (0, 1, 2, 3, 4, 6, 7)
    sides = (Side((5,), "all_reduce", "int64 [3]"), Side(innocent, "all_reduce", "float32 [3]"))
    finding = Finding(Category.DTYPE_MISMATCH, (5,), "dtypes differ", "convert", sides=sides)
    words = "Mismatch: Collective 6 does not match: rank {} called all_reduce of float32 [3]"
    ranks = tuple(idle(rank, raised=words.format(rank), refused=True) for rank in range(8))
    known = BoardFacts(
        Snapshot(ranks, taken_ns=10 * S),
        diagnosis=Diagnosis((finding,)),
    )
    rest, culprit = board_rows(known)
    assert (rest.ranks, culprit.ranks) == (innocent, (5,))
    assert rest.text == "all_reduce float32 [3]"
    assert model.board_json(board_of(known), 0)["rows"][0]["text"] == rest.text
    assert "rank 5 called all_reduce" in culprit.text


def test_a_finding_says_the_culprit_and_who_waits() -> None:
    for pending in ((0, 1, 2, 3), ()):  # also of ranks of which no collective is known
        wrong = board_rows(facts(diagnosis=blames(2, waiting=(0, 1, 3)), pending=pending))
        waiting = Role.WAITING
        assert [row.role for row in wrong] == [waiting, waiting, Role.CULPRIT, waiting]
    late = board_rows(facts(diagnosis=blames(2, passing=True)))
    assert late[2].role is Role.LATE


def test_the_headline_over_a_finding_calls_no_rank_ready_or_running_that_waits() -> None:
    ranks = (*(running(rank) for rank in (0, 1, 3)), running(2, status=Status.READY))
    ended = {2: (issued(2, phase=Phase.DONE),)}
    of = {**{rank: (issued(rank, 1),) for rank in (0, 1, 3)}, **ended}
    stuck = facts(
        snapshot=Snapshot(ranks=tuple(sorted(ranks, key=lambda s: s.rank)), taken_ns=11 * S),
        collectives=Collectives(of, {"default": (0, 1, 2, 3)}),
        pending=(0, 1, 3),
        members=(0, 1, 2, 3),
    )
    assert board_of(stuck).headline.endswith("rank 2 finished; ranks 0, 1 and 3 running")
    found = replace(stuck, diagnosis=blames(2, waiting=(0, 1, 3)))
    assert board_of(found).headline.endswith("rank 2 finished; ranks 0, 1 and 3 waiting")


def test_a_rank_that_raised_has_its_error_beside_the_word_for_it() -> None:
    raised = running(1, status=Status.READY, raised="KeyError: 'x'")
    snapshot = Snapshot(ranks=(running(0, status=Status.READY), raised))
    rows = model.board_json(board_of(BoardFacts(snapshot)), 0)["rows"]
    assert [row["text"] for row in rows] == ["", "KeyError: 'x'"]


def test_silence_is_no_health_and_death_needs_no_age() -> None:
    states = (running(0, heard_ns=5 * S), running(1, status=Status.DEAD, heard_ns=S, exit_code=-9))
    silent, dead = board_rows(BoardFacts(Snapshot(ranks=states, taken_ns=11 * S)))
    assert (silent.role, silent.heard_ns) == (Role.SILENT, 5 * S)
    assert (dead.role, dead.heard_ns) == (Role.DEAD, 0)
    assert "SIGKILL" in dead.text


def test_a_paused_rank_waits_for_nobody() -> None:
    of = {0: (issued(0, phase=Phase.HELD),), 1: (issued(1),)}
    snapshot = Snapshot(ranks=(running(0), running(1)), taken_ns=11 * S)
    paused, waits = board_rows(BoardFacts(snapshot, Collectives(of, {"default": (0, 1)}), (0, 1)))
    assert (paused.role, paused.waits_for) == (Role.PAUSED, ())
    assert (waits.role, waits.waits_for) == (Role.WAITING, (0,))


def test_a_rank_at_a_line_is_paused_there_and_can_be_stepped() -> None:
    stop = LineStopped(
        rank=2, heard_ns=7 * S, cell=3, stop=1, file="cell 3", line=4, function="f",
        why="breakpoint 1", first=4, source=("x = 1",)
    )  # fmt: skip
    board = board_of(facts(stops={2: stop}))
    row = board.rows[2]
    assert (row.role, row.since_ns) == (Role.PAUSED, 7 * S)
    assert row.text == "cell 3, line 4, in f: x = 1 (breakpoint 1)"
    assert board.headline.endswith("ranks 0, 1 and 3 running; rank 2 paused")
    made = {each.name: each for each in model.actions(board.rows, True, True, at_lines=True)}
    lines = ("continue", "step", "into", "out")
    assert [made[name].magic for name in lines if not made[name].why_not] == [
        *("%ddp_step --to end", "%ddp_step", "%ddp_step --into", "%ddp_step --out"),
    ]


def test_the_lines_where_ranks_are_come_with_those_around_them() -> None:
    source = "\n".join(f"line {n}" for n in range(1, 12))
    (one,) = pending_locations(facts(sources={"cell 3": source}))
    assert (one.ranks, one.call_site, one.line) == ((0, 1, 3), "cell 3, line 6, in step", 6)
    assert one.callers == ("cell 3, line 9",)
    assert one.lines == tuple((n, f"line {n}") for n in range(4, 9))


def test_of_code_that_is_not_at_hand_the_line_alone_is_shown() -> None:
    place = replace(places(7)[0], text="loss.backward()")
    (one,) = locations({0: (place,), 1: (place,)}, {})
    assert one.ranks == (0, 1) and one.lines == ((7, "loss.backward()"),)


def test_the_past_has_what_was_issued_by_then_and_not_done_yet() -> None:
    of = {0: (issued(0, phase=Phase.DONE), replace(issued(0, 1), issued_ns=8 * S))}
    now = Collectives(of, {"default": (0,)})
    assert collectives_at(now, 4 * S).of[0] == ()
    (then,) = collectives_at(now, 5 * S + 1).of[0]
    assert then.phase is Phase.ISSUED
    assert collectives_at(now, 9 * S).of == of


@settings(max_examples=60, deadline=None)
@given(snapshots(3))
def test_any_state_becomes_json_of_bounded_size_that_does_not_change_by_itself(
    snapshot: Snapshot,
) -> None:
    drawn = board_rows(BoardFacts(snapshot))
    assert sorted(rank for row in drawn for rank in row.ranks) == [0, 1, 2]
    made = model.board_json(board_of(BoardFacts(snapshot)), 7)
    assert json.loads(json.dumps(made)) == made
    assert len(json.dumps(made)) < 200_000
    for row in made["rows"]:
        assert set(parse_ranks(row["ranks"], 3)) <= {0, 1, 2}
        assert "\x1b" not in row["text"] and "\n" not in row["text"]


def test_a_thousand_ranks_that_all_do_something_else_are_cut_and_said() -> None:
    states = tuple(running(rank, doing=f"line {rank}") for rank in range(1000))
    snapshot = Snapshot(ranks=states, taken_ns=11 * S)
    made = model.board_json(board_of(BoardFacts(snapshot)), 0)
    assert len(made["rows"]) == model.MOST_ROWS
    assert made["left_out"] == "128-999"


def test_a_finding_has_its_remedy_and_the_magics_in_it() -> None:
    finding = Finding(
        Category.RANK_DIED,
        (1,),
        "died <script>alert(1)</script> \x1b[31mred",
        "Bring it back: %ddp_restart --ranks 1, or see %ddp_why.",
        evidence=tuple(f"fact {n}" for n in range(100)),
        commands=("%ddp_restart --ranks 1", "%ddp_why"),
        patch="-a\x1b[31m\n+    b",
    )
    (made,) = model.findings_json(Diagnosis((finding,), None, 2))
    assert made["magics"] == ["%ddp_restart --ranks 1", "%ddp_why"]
    assert made["patch"] == ["-a", "+    b"]
    assert made["sentence"] == "Rank 1: died <script>alert(1)</script> red"
    assert len(made["evidence"]) == model.MOST_EVIDENCE
    assert model.findings_json(None) == []


def test_a_finding_has_a_column_for_each_group_of_ranks_with_its_code() -> None:
    code = "if rank == 0:\n    dist.barrier()\ndist.all_reduce(x)"
    finding = Finding(
        Category.CONDITIONAL_COLLECTIVE,
        (0,),
        "rank 0 alone calls barrier",
        "Move it.",
        sides=(
            Side((1, 2), "all_reduce", "float32 [1]", Place("cell 3", 3), state="wait"),
            Side((0,), "barrier", "", Place("cell 3", 2), state="waits"),
        ),
        decides=Decision(Place("cell 3", 1), "only rank 0 enters"),
    ).with_code({"cell 3": code})
    (made,) = model.findings_json(Diagnosis((finding,), None, 3))
    assert made["columns"] == [
        {
            "who": "rank 0",
            "site": "cell 3, line 2",
            "lines": [
                [1, "if rank == 0:", "decides", "only rank 0 enters"],
                [2, "    dist.barrier()", "at", "waits here"],
            ],
        },
        {
            "who": "ranks 1 and 2",
            "site": "cell 3, line 3",
            "lines": [[3, "dist.all_reduce(x)", "at", "wait here"]],
        },
    ]


def buttons(*states: RankState, in_run: bool = False) -> dict[str, model.Action]:
    """The buttons for ranks in these states."""
    drawn = board_rows(BoardFacts(Snapshot(ranks=states, taken_ns=11 * S)))
    return {each.name: each for each in model.actions(drawn, True, in_run)}


def test_buttons_say_what_they_do_and_why_they_cannot() -> None:
    ready = buttons(running(0, status=Status.READY))
    assert ready["step"].why_not and ready["abort"].why_not
    assert ready["restart"].why_not == model.CHOOSE_RANKS
    assert not ready["why"].why_not and not ready["where"].why_not
    assert ready["continue"].magic == "%ddp_step --to end"
    paused = buttons(running(0, status=Status.PAUSED, stage=Stage.LAUNCHED))
    assert not paused["step"].why_not and not paused["abort"].why_not
    assert paused["continue"].magic == "%ddp_step --to verified"
    dead = buttons(running(0), running(1, status=Status.DEAD), in_run=True)
    assert dead["restart"].magic == "%ddp_restart --ranks 1" and not dead["restart"].why_not
    assert dead["continue"].magic == "%ddp_step --to end"
    # Asked while torch was being loaded, they answered 20 s later, of another state.
    starts = buttons(running(0, status=Status.STARTING), running(1, status=Status.STARTING))
    assert starts["why"].why_not and starts["where"].why_not
    some = buttons(running(0, status=Status.STARTING), running(1, status=Status.READY))
    assert not some["why"].why_not and not some["where"].why_not
    nobody = model.actions((), False, False)
    assert all(each.why_not for each in nobody)
    measuring = model.actions((), True, False, measuring=True)
    assert [each.name for each in measuring if not each.why_not] == ["cancel", "why", "where"]
    places = [
        [each.name.replace("cancel", "abort") for each in made] for made in (nobody, measuring)
    ]
    assert places[0] == places[1] == list(ready), "a button never moves"


def test_for_a_thousand_ranks_that_wait_for_one_the_others_are_looked_at_once() -> None:
    class Counted(dict[int, tuple[Collective, ...]]):
        looked_at = 0

        def get(self, *key: object) -> object:  # type: ignore[override]
            self.looked_at += 1
            return super().get(*key)  # type: ignore[call-overload]

    waiting = facts(1024, without=341)
    of = Counted(waiting.collectives.of)
    (late,) = [row for row in board_rows(waiting) if row.ranks == (341,)]
    assert late.role is Role.RUNNING
    counted = replace(waiting, collectives=replace(waiting.collectives, of=of))
    assert {row.waits_for for row in board_rows(counted)} == {(341,), ()}
    assert of.looked_at <= 2 * 1024


def idle(rank: int, **more: object) -> RankState:
    """A rank that waits for a cell."""
    return running(rank, status=Status.READY, **more)


def test_ranks_that_raised_or_were_refused_or_ended_are_not_ready() -> None:
    refused = idle(1, raised="Mismatch: x", refused=True, since_ns=9 * S)
    states = (idle(0, raised="KeyError: 'x'"), refused, idle(2), running(3, status=Status.DEAD))
    snapshot = Snapshot(ranks=states, taken_ns=11 * S)
    roles = [Role.RAISED, Role.REFUSED, Role.READY, Role.DEAD]
    drawn = board_rows(BoardFacts(snapshot))
    assert [row.role for row in drawn] == roles
    assert drawn[1].since_ns == 9 * S
    # Whom a finding saw waiting has left the cell: it waits no more.
    # Where the style sheet is trusted it goes before the colours on the elements.
    # One that raised is as red where a finding names it.
    for diagnosis in (None, blames(0)):
        html = board_view.html(board_of(BoardFacts(snapshot, diagnosis=diagnosis)))
        classes = [row.split('"')[0] for row in html.split('<tr class="')[1:]]
        assert classes == ["ddp-failed", "ddp-failed", "ddp-ready", "ddp-dead"]
    found = BoardFacts(snapshot, diagnosis=blames(3, waiting=(0, 1)))
    assert [row.role for row in board_rows(found)][:2] == roles[:2]

    over = board_of(BoardFacts(replace(snapshot, ended="the ranks were shut down.")))
    assert [row.role for row in over.rows] == [Role.ENDED] * 3 + [Role.DEAD]
    text = board_view.text(over)
    assert "ready" not in text and "now" not in text and text.count("  ended") == 3
    assert f"rgb({markup.OK})" not in board_view.html(over).partition("</style>")[2]


def test_ranks_whose_start_was_interrupted_start_no_more() -> None:
    snapshot = Snapshot(ranks=(RankState(0),), taken_ns=11 * S, ended="setup did not finish.")
    (row,) = board_rows(BoardFacts(snapshot))
    assert (row.role, row.text) == (Role.ENDED, "its process was starting")


def test_a_dead_rank_is_dead_since_its_process_ended() -> None:
    state = running(0, pid=7, since_ns=S)
    dead = fold_rank(state, RankExited(rank=0, pid=7, exit_code=-9, heard_ns=10 * S))
    (row,) = board_rows(BoardFacts(Snapshot(ranks=(dead,), taken_ns=11 * S)))
    assert row.since_ns == 10 * S


def test_a_rank_that_gets_a_new_process_is_restarting_not_dead() -> None:
    dead = running(0, status=Status.DEAD, exit_code=-9, pid=7, restarting=True)
    spawned = fold_rank(dead, RankSpawned(rank=0, pid=8, device="cpu", heard_ns=11 * S))
    for state in (dead, spawned):
        made = board_of(BoardFacts(Snapshot(ranks=(state,), taken_ns=11 * S)))
        assert made.rows[0].role is Role.RUNNING and made.rows[0].word == "restarting"
        assert "restarting" in made.headline and "restarting" in board_view.text(made)
        assert "%ddp_restart" not in board_view.text(made)


def test_while_torch_is_loaded_every_view_says_so_with_a_clock() -> None:
    snapshot = Snapshot((RankState(0),), "gloo", loading=Loading(5 * S), taken_ns=17 * S)
    made = board_of(BoardFacts(snapshot))
    assert made.headline == "1 rank, gloo: torch is being loaded"
    assert made.rows[0].since_ns == 5 * S and "its process is starting" not in made.rows[0].text
    assert "Loading torch, once for all ranks: 12 s" in board_view.text(made)
    assert "<progress aria-label" in board_view.html(made), "no share that would stall"
    what = "Loading torch, once for all ranks"
    assert model.board_json(made, 0)["loading"] == {"what": what, "since_us": 5_000_000}
    hosts = {"gpu01": "reached", "gpu02": "loads torch"}
    far = board_of(BoardFacts(replace(snapshot, loading=Loading(5 * S, hosts=hosts))))
    words = "Starting hosts (gpu01 reached, gpu02 loads torch)"
    assert f"{words}: 12 s" in board_view.text(far)
    assert model.board_json(far, 0)["loading"]["what"] == words


def test_the_code_box_marks_the_line_that_raised_and_not_where_the_innocent_wait() -> None:
    raised = {1: (Place("cell 3", 7), Place("cell 3", 3, "load"))}
    path = (Place("cell 3", 9),)
    waits = Collective(0, 0, "barrier", path=path)
    finding = Finding(Category.EXCEPTION_ON_ONE_RANK, (1,), "raised KeyError", "", (0,))
    facts = BoardFacts(
        Snapshot(ranks=(RankState(0), RankState(1))),
        Collectives({0: (waits,)}),
        (0,),
        Diagnosis((finding,)),
        raised=raised,
    )
    (location,) = pending_locations(facts)
    assert (location.ranks, location.line, location.callers) == ((1,), 3, ("cell 3, line 7",))
    (without,) = pending_locations(replace(facts, diagnosis=None))
    assert (without.ranks, without.line) == ((0,), 9)


def test_how_a_dead_rank_comes_back_is_said_once_beside_its_finding() -> None:
    dead = replace(running(1), status=Status.DEAD, exit_code=-9)
    ready = replace(running(0), status=Status.READY)
    alone = facts(snapshot=Snapshot((ready, dead)), pending=())
    assert ["Rank 1 can be brought back" in note for note in board_of(alone).notes] == [True]
    found = Diagnosis((Finding(Category.RANK_DIED, (1,), "killed", "Bring it back."),), None, 2)
    assert board_of(replace(alone, diagnosis=found)).notes == ()
    busy = replace(alone, snapshot=Snapshot((running(0), dead)), diagnosis=found)
    assert "once rank 0 has left the cell" in board_of(busy).notes[0]


def test_lines_at_which_ranks_raised_are_shown_until_they_are_freed() -> None:
    end = CellFinished(rank=1, cell=1, outcome="error", path=(Place("cell 3", 5, "step", "x"),))
    run: Any = SimpleNamespace(generation=1, events=SimpleNamespace(finished={1: end}))
    assert _raised_in(run, Snapshot(generation=1)) == {1: end.path}
    assert _raised_in(run, Snapshot(generation=2)) == _raised_in(None, Snapshot()) == {}
