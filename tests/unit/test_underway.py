"""Whose ranks are taken, and waiting for a run that somebody else sees through. No process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import CellFinished, RankState, Snapshot, Status
from ddp_notebook.session import Session
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.runs.registry import Detached
from ddp_notebook.session.runs.run import CellResult, CellRun


def ready(world_size: int) -> Snapshot:
    return Snapshot(ranks=tuple(RankState(r, status=Status.READY) for r in range(world_size)))


def test_a_rank_that_is_about_to_begin_is_taken_before_it_says_so() -> None:
    assert idle_ranks(None, "%%ddp", ready(3)) == (0, 1, 2)
    with pytest.raises(UsageMistake) as caught:
        idle_ranks(None, "%%ddp", ready(3), {1: "cell 7"})
    assert str(caught.value) == (
        "Rank 1 is still in an earlier cell (cell 7). Wait for it: %ddp_wait. Get it back: "
        "%ddp_abort, or with new processes: %ddp_restart --ranks 1"
    )
    assert idle_ranks((0, 2), "%%ddp", ready(3), {1: "cell 7"}) == (0, 2)


@pytest.fixture
def session() -> Iterator[Session]:
    """A session without processes, whose three ranks are ready as far as is known."""
    made = Session()
    made.record.note(ranks=ready(3).ranks)
    yield made
    for run in made.runs:
        run.lose("The test is over.")


def take(session: Session, *ranks: int, script: str = "", detach: bool = False) -> CellRun:
    cell = len(session.runs) + 1
    return session._take(ranks, "%%ddp", lambda r: CellRun(cell, r, script), detach=detach)


def test_ranks_are_taken_until_they_have_finished_or_the_run_is_put_down(session: Session) -> None:
    run = take(session, 0, 1)
    assert take(session, 2).ranks == (2,)
    with pytest.raises(UsageMistake, match="Ranks 0-1 are still in an earlier cell"):
        take(session, 0, 1)
    run.take([CellFinished(rank=0, cell=run.cell, outcome="ok")])
    assert take(session, 0).ranks == (0,)
    session._put_down(run)
    assert take(session, 1).ranks == (1,)


def test_of_many_threads_one_gets_the_ranks(session: Session) -> None:
    together = threading.Barrier(8)
    taken, refused = [], []

    def try_it() -> None:
        together.wait(10)
        try:
            taken.append(take(session, 0, 1, 2))
        except UsageMistake as mistake:
            refused.append(mistake)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(taken), len(refused)) == (1, 7)


def test_a_script_needs_every_rank_and_nobody_beside_it(session: Session) -> None:
    cell = take(session, 0)
    with pytest.raises(UsageMistake, match=r"^Cell 1 is not over on rank 0, and train\.py needs"):
        take(session, 1, script="train.py")
    session._put_down(cell)
    take(session, 1, script="train.py")
    with pytest.raises(UsageMistake, match=r"^train\.py is not over on rank 1, and train\.py"):
        take(session, 2)


def test_runs_are_kept_while_ranks_are_in_them_or_while_they_are_the_last(session: Session) -> None:
    first, second = take(session, 0), take(session, 1)
    for run in (first, second):
        run.take([CellFinished(rank=run.ranks[0], cell=run.cell, outcome="ok")])
        session._put_down(run)
    assert session.current is second
    third = take(session, 1)
    assert session.runs == [first, third]
    assert session.current is third


def test_waiting_gives_what_the_run_gave_once_and_raises_what_it_raised(session: Session) -> None:
    run = take(session, 0)
    go = threading.Event()

    def see_through(given_up: object) -> CellResult:
        go.wait(10)
        return run.result()

    session.detached = Detached(run, see_through)
    assert session.wait(0).pending == (0,)
    assert not session.detached.told
    run.take([CellFinished(rank=0, cell=run.cell, outcome="ok")])
    go.set()
    assert session.wait(10).pending == ()
    assert session.detached.told

    def broken(given_up: object) -> CellResult:
        raise ValueError("broken")

    session.detached = Detached(run, broken)
    with pytest.raises(ValueError, match="broken"):
        session.wait(10)
