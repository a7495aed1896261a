"""Ranks that are paused at lines, and everything that ends that: nobody is stranded."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from kernels import Kernel
from results import rank_pids, texts
from support import GONE_WITHIN_S, eventually, is_alive, pids_of

from ddp_notebook.errors import NoSession, SessionLost
from ddp_notebook.session import InitOptions, Session

PAUSED = "kept = 5\nbreakpoint()\nfor i in range(100):\n    j = i\n"


@pytest.fixture
def session(session: Session) -> Session:
    """Two ranks that a test may end."""
    session.init(InitOptions(world_size=2, device="cpu"))
    return session


def test_a_restart_and_a_shutdown_end_paused_ranks(session: Session) -> None:
    """One rank alone is refused while others are in the cell; all of them, and the end, are not."""
    session.run_cell(PAUSED)
    session.step()
    before = rank_pids(session)
    session.abort((0,))
    session.restart((0,))
    assert rank_pids(session)[0] != before[0]
    session.abort()
    assert session.run_cell("print(kept)", ranks=(1,)).error is None
    assert session.run_cell("dist.barrier()").error is None
    session.run_cell(PAUSED)
    paused = rank_pids(session)
    began_s = time.monotonic()
    session.shutdown()
    assert time.monotonic() - began_s < GONE_WITHIN_S
    assert not any(map(is_alive, paused))
    with pytest.raises(NoSession):
        session.step()


@pytest.mark.timeout(120)
def test_a_step_ends_when_the_session_is_lost_meanwhile(session: Session) -> None:
    """It waited for ever for ranks that were gone."""
    session.run_cell("import time\nbreakpoint()\ntime.sleep(600)\n")
    session.step()

    def lose() -> None:
        eventually(lambda: not session.runs.all[-1].stops)
        os.kill(pids_of(session).controller, signal.SIGKILL)

    losing = threading.Thread(target=lose)
    losing.start()
    with pytest.raises(SessionLost, match="controller"):
        session.step()
    losing.join()


def test_an_interrupt_of_a_step_leaves_ranks_where_they_are(ranks2: Session) -> None:
    """A step over a long line: the interrupt ends the wait, and an abort the line."""
    ranks2.run_cell("kept = 6\nimport time\nbreakpoint()\ntime.sleep(600)\ny = 1\n")
    ranks2.step()

    def interrupt() -> None:
        eventually(lambda: not ranks2.runs.all[-1].stops)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    ranks2.step()
    interrupting.join()
    ranks2.abort()
    result = ranks2.run_cell("print(kept)")
    assert texts(result) == "6\n"
    assert ranks2.run_cell("dist.barrier()").error is None


def test_an_abort_frees_a_shells_ranks_and_nothing_outlives_its_kernel() -> None:
    with Kernel() as kernel:
        kernel.init(2)
        kernel.run_well(f"%%ddp\n{PAUSED}")
        kernel.run_well("%ddp_abort")
        assert "5" in kernel.run_well("%%ddp\nprint(kept)").text
        kernel.run_well(f"%%ddp\n{PAUSED}")
        kernel.run_well("%ddp_step")
        left = kernel.pids().all
        kernel.kill()
        eventually(lambda: not any(map(is_alive, left)), GONE_WITHIN_S)
