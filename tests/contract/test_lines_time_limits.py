"""Timeouts of groups while ranks are paused at lines: none fires, or the table says which will."""

from __future__ import annotations

import time
from pathlib import Path

import results
from support import eventually

from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session import Session
from ddp_notebook.session.runs.endings import CellResult

LIMIT_S = 2.0
MAKE = f"import datetime, torch\npg = dist.new_group(timeout=datetime.timedelta(seconds={LIMIT_S}))"
"""A group of the user's that gives up soon."""
MEET = """
a, b = torch.ones(1), torch.zeros(1)
{pause}
if rank == 0:
    works = [dist.isend(a, 1, group=pg), dist.all_reduce(a, group=pg, async_op=True)]
else:
    works = [dist.irecv(b, 0, group=pg), dist.all_reduce(a, group=pg, async_op=True)]
for work in works:
    work.wait()
dist.barrier(pg)
print("met", a.item(), pg.ddp_notebook_group.limit_s)
"""
NOW = (
    "print(pg.ddp_notebook_inner._get_backend(torch.device('cpu')).options._timeout.total_seconds(),"
    " pg.ddp_notebook_group.limit_s)"
)


def texts(result: CellResult) -> str:
    """What the ranks printed; those that printed the same, once."""
    assert result.error is None, result.error
    return results.texts(result)


def outlast(session: Session) -> None:
    """Wait until the group would have given up twice; rank 0 is paused, rank 1 waits."""
    run = session.runs.all[-1]
    assert sorted(run.stops) == [0], run.stops
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() - began_s > 1.5 * LIMIT_S)
    assert not run.done


def test_a_group_outlives_a_pause_and_has_its_time_out_again_then(
    ranks2: Session, tmp_path: Path
) -> None:
    """Sends and receives, too: gloo's have the timeout with which their group was made."""
    ranks2.run_cell(MAKE)
    ranks2.run_cell(MEET.format(pause="if rank == 0: breakpoint()"))
    outlast(ranks2)
    ranks2.step(to="end")
    assert texts(ranks2.wait()) == "met 2.0 0.0\n"
    assert texts(ranks2.run_cell(NOW)) == f"{LIMIT_S} {LIMIT_S}\n"
    # A breakpoint of another rank's arms this one; one that only logs does not.
    script = tmp_path / "meets.py"
    script.write_text("def stop():\n    pass\n")
    ranks2.breakpoints.add(f"{script}:2", Breakpoint(0, ranks=(0,), log="passed"))
    assert texts(ranks2.run_cell(NOW)) == f"{LIMIT_S} {LIMIT_S}\n"
    ranks2.breakpoints.add(f"{script}:2", Breakpoint(0, ranks=(0,)))
    assert texts(ranks2.run_cell(NOW)) == "86400.0 0.0\n"
    ranks2.breakpoints.clear()
    assert texts(ranks2.run_cell(NOW)) == f"{LIMIT_S} {LIMIT_S}\n"


def test_what_was_issued_before_a_pause_is_told_to_give_up(ranks2: Session, tmp_path: Path) -> None:
    """What says nothing of `breakpoint()` is not known before: rank 1's wait cannot be changed."""
    stops = "import sys\n\ndef stop():\n    sys.breakpointhook()\n"
    (tmp_path / "stops_in_library.py").write_text(stops)
    load = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport stops_in_library\n"
    ranks2.run_cell(MAKE.replace(f"={LIMIT_S}", "=90"))
    stop = f"{load}if rank == 0:\n    stops_in_library.stop()\n"
    result = ranks2.run_cell(f"{stop}dist.all_reduce(torch.ones(1), group=pg)")
    assert result.steps is not None
    (waiting,) = [row for row in result.steps.rows if row.state == "waiting"]
    assert "its group's timeout (90 s) ends it in " in waiting.text
    ranks2.step(to="end")
    assert texts(ranks2.wait()) == ""


def test_a_breakpoint_in_a_module_arms_all_ranks_that_import_it_and_all_once_it_stops_one(
    ranks2: Session, tmp_path: Path
) -> None:
    (tmp_path / "says_breakpoint.py").write_text("def stop():\n    breakpoint()\n")
    (tmp_path / "stops_unseen.py").write_text("import sys\nstop = sys.breakpointhook\n")
    ranks2.run_cell(f"{MAKE}\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})")
    ranks2.run_cell(
        f"import says_breakpoint\n{MEET.format(pause='rank or says_breakpoint.stop()')}"
    )
    assert sorted(ranks2.runs.all[-1].stops) == [0]
    ranks2.step(to="end")
    assert texts(ranks2.wait()) == "met 2.0 0.0\n"
    assert texts(ranks2.run_cell(NOW)) == "86400.0 0.0\n"  # it may be called again
    assert texts(ranks2.run_cell("del sys.modules['says_breakpoint']")) == ""
    assert texts(ranks2.run_cell(NOW)) == f"{LIMIT_S} {LIMIT_S}\n"
    gate = tmp_path / "gate"
    waits = (
        f"import os, time\nwhile rank and not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    )
    pause = f"import stops_unseen\nrank or stops_unseen.stop()\n{waits}"
    ranks2.run_cell(MEET.format(pause=pause), detach=True)
    run = ranks2.runs.all[-1]
    eventually(lambda: 0 in run.stops)
    eventually(lambda: ranks2.runs.all[-1]._armed)
    gate.touch()
    assert sorted(ranks2.runs.all[-1].stops) == [0]
    ranks2.step(to="end")
    assert texts(ranks2.wait()) == "met 2.0 0.0\n"
