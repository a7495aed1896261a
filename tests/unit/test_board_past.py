"""What a board shows of the past: each run with its finding, its lines and its collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from saved_runs import collective

from ddp_notebook.board.past import Moment, Past
from ddp_notebook.board.source import ended_badly
from ddp_notebook.model import Collectives
from ddp_notebook.session.runs.run import CellRun


def test_a_moment_has_what_was_found_then_and_not_what_was_found_later() -> None:
    past = Past()
    past.note(Moment(10, [], []))
    past.note(Moment(20, ["a hang"], ["cell 3:4"]))
    past.note(Moment(25, ["a hang"], ["cell 3:4"]))  # the same: it was found at 20
    past.note(Moment(40, [], []))
    found = {at: list(past.found_at(at).findings) for at in (5, 15, 20, 39, 41)}
    assert found == {5: [], 15: [], 20: ["a hang"], 39: ["a hang"], 41: []}
    assert past.found_at(30).at_ns == 20


def test_a_moment_of_an_earlier_run_has_the_collectives_of_that_run() -> None:
    past = Past()
    first, grown, second = (
        Collectives({0: tuple(collective(0, n, 1, 2) for n in range(count))}) for count in (1, 3, 2)
    )
    past.keep(1, 100, first)
    past.keep(1, 150, grown)
    past.keep(2, 200, second)
    assert past.collectives_at(50) == Collectives()
    assert past.collectives_at(120) is past.collectives_at(199) is grown
    assert past.collectives_at(201) is second


@pytest.mark.parametrize(
    ("outcomes", "look"),
    [(["ok", "ok"], False), (["error", "ok"], True), (["error", "interrupted"], False)],
)
def test_of_ranks_that_were_freed_no_culprit_is_named_again(
    outcomes: list[str], look: bool
) -> None:
    ends = {n: SimpleNamespace(outcome=each, trained=()) for n, each in enumerate(outcomes)}
    run = cast(CellRun, cast(Any, SimpleNamespace(finished=ends)))
    assert ended_badly(run) is look
