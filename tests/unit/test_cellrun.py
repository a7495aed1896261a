"""One cell on some ranks: how it ends, as the user reads it."""

from __future__ import annotations

import pytest
from results import texts

from ddp_notebook.errors import CellFailed, CellSyntaxError
from ddp_notebook.model import (
    Category,
    CellFinished,
    CellStarted,
    Diagnosis,
    Finding,
    Output,
    OutputKind,
    RankExited,
)
from ddp_notebook.session.runs.endings import exits
from ddp_notebook.session.runs.registry import check_cell
from ddp_notebook.testing import fake_run


def finished(rank: int, outcome: str = "ok", **fields: object) -> CellFinished:
    return CellFinished(rank=rank, cell=1, outcome=outcome, **fields)  # type: ignore[arg-type]


def test_a_cell_is_done_when_every_rank_finished_it() -> None:
    run = fake_run(1, (0, 1))
    run.take([CellStarted(rank=0, cell=1), finished(0)])
    assert run.pending == (1,)
    run.take([finished(1)])
    assert run.done
    assert run.result().error is None


def test_events_of_another_cell_do_not_count() -> None:
    run = fake_run(2, (0,))
    run.take([finished(0), Output(rank=0, cell=1, what=OutputKind.STDOUT, text="old")])
    assert run.pending == (0,)
    assert run.result().outputs == ()


def test_the_end_of_an_earlier_scripts_process_is_not_of_a_rank_in_this_one() -> None:
    run = fake_run(2, (0, 1), "train.py")
    run.take([RankExited(rank=1, pid=9, exit_code=-9, cell=1)])
    assert run.pending == (0, 1)
    run.take([RankExited(rank=1, pid=10, exit_code=-9, cell=2)])
    assert run.pending == (0,)


def test_a_dead_rank_ends_its_part_of_the_cell_and_is_named_with_its_signal() -> None:
    run = fake_run(1, (0, 1))
    run.take([finished(0), RankExited(rank=1, pid=9, exit_code=-9, last_words="step 4\n")])
    error = run.result().error
    assert isinstance(error, CellFailed)
    assert error.ranks == (1,)
    assert str(error) == (
        "rank 1 died, killed by SIGKILL (its log ends: step 4); "
        "bring back with %ddp_restart --ranks 1; rank 0 finished."
    )


def test_equal_errors_are_told_once() -> None:
    run = fake_run(1, (0, 1, 2))
    same = {"ename": "ValueError", "evalue": "bad\nmore", "line": 3}
    run.take([finished(0), finished(1, "error", **same), finished(2, "error", **same)])
    error = run.result().error
    assert str(error) == "ranks 1 and 2 raised ValueError: bad (cell line 3); rank 0 finished."
    assert isinstance(error, CellFailed)
    error.shown = True  # the tracebacks stand above
    brief = "CellFailed: ranks 1 and 2 raised ValueError (cell line 3); rank 0 finished."
    assert error._render_traceback_() == [brief]


def test_a_lost_peer_is_told_once_though_its_port_differs() -> None:
    run = fake_run(1, (0, 1, 2))
    lost = "[/a/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:{}. GLHF"
    ends = [
        (rank, {"ename": "RuntimeError", "evalue": lost.format(2000 + rank)}) for rank in (0, 1)
    ]
    run.take([finished(2), *(finished(rank, "error", **end) for rank, end in ends)])
    assert str(run.result().error) == (
        "ranks 0 and 1 raised RuntimeError: [/a/gloo/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]. GLHF; rank 2 finished."
    )


def test_what_still_runs_is_neither_finished_nor_failed() -> None:
    run = fake_run(1, (0, 1, 2))
    run.take([finished(0), finished(1, "error", ename="ValueError", evalue="bad")])
    assert str(run.error()) == "rank 1 raised ValueError: bad; rank 0 finished."
    stands = run.standing()
    assert (stands.error, stands.pending) == (None, (2,))


def test_what_stands_is_told_once_and_the_end_tells_all() -> None:
    run = fake_run(1, (0,))
    run.take([Output(rank=0, cell=1, what=OutputKind.STDOUT, text="one\n")])
    assert texts(run.standing()) == "one\n"
    assert texts(run.standing()) == ""
    run.take([Output(rank=0, cell=1, what=OutputKind.STDOUT, text="two\n"), finished(0)])
    assert texts(run.standing()) == "two\n"
    assert texts(run.result()) == run.events.written(0) == "one\ntwo\n"


def test_a_killed_rank_is_not_said_to_have_finished() -> None:
    run = fake_run(1, (0, 1, 2, 3))
    run.take((finished(0), RankExited(rank=2, pid=7, exit_code=-9), finished(3, "error")))
    assert exits(run.events) == {"finished": (0,), "died": (2,), "raised": (3,)}


def test_a_run_is_called_by_its_prompt_or_its_script() -> None:
    assert [fake_run(3, (0,)).title, fake_run(3, (0,), number=9).heading] == ["cell 3", "Cell 9"]
    assert fake_run(3, (0,), "train.py", 9).heading == "train.py"


def test_a_cell_without_await_is_plain() -> None:
    assert check_cell("x = 1\n", str) is False
    assert check_cell("import asyncio\nawait asyncio.sleep(0)\n", str) is True


def test_a_syntax_error_is_found_before_any_rank_runs_on_the_notebooks_own_line() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_cell("x = 1\nif x:\n    y = = 2\n", str)
    assert str(caught.value) == (
        "invalid syntax (cell line 4); no rank ran the cell\n    y = = 2\n        ^"
    )


def test_what_the_guard_refused_on_innocent_ranks_does_not_stand_above_the_finding() -> None:
    run = fake_run(1, (0, 1, 2))
    for rank, name in enumerate(("Mismatch", "KeyError")):
        run.take([Output(rank=rank, cell=1, what=OutputKind.ERROR, text=f"{name}: text")])
        run.take([finished(rank, "error", ename=name, evalue="text")])
    nothing_found = run.events.with_tracebacks(Diagnosis(()))
    assert [raised.ranks for raised in nothing_found.tracebacks] == [(0,), (1,)]
    finding = Finding(Category.OP_MISMATCH, (2,), "rank 2 has op=MAX", "Use the same op=.")
    (raised,) = run.events.with_tracebacks(Diagnosis((finding,))).tracebacks
    assert raised.ranks == (1,)
