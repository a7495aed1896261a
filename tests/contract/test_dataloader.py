"""Workers of a DataLoader that are stuck after the fork are found; slow ones are waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from results import rank_pids
from support import eventually

from ddp_notebook.errors import Stuck
from ddp_notebook.model import Category, Finding, Ranks
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)

DATA = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, Dataset
lock, pool = threading.Lock(), ThreadPoolExecutor(1)
pool.submit(time.time).result()
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        {item}
        return torch.full((2,), float(i))
{before}
for x in DataLoader(Data(), batch_size=2, num_workers=2{options}):
    dist.all_reduce(x)
"""
STUCK = {
    "a lock that one rank held when its workers were forked": (
        DATA.format(item="with lock: pass", before="if rank == 1: lock.acquire()", options=""),
        (1,),
    ),
    "the same on every rank": (
        DATA.format(item="with lock: pass", before="lock.acquire()", options=""),
        (0, 1),
    ),
    "a pool of threads that did not come along": (
        DATA.format(
            item="pool.submit(time.time).result() if rank == 0 else None", before="", options=""
        ),
        (0,),
    ),
    "after some batches, with workers that stay": (
        DATA.format(
            item="if i == 7 and rank == 1: lock.acquire(); lock.acquire()",
            before="",
            options=", persistent_workers=True",
        ),
        (1,),
    ),
}
SLOW = {
    "workers that sleep, or wait for a lock for a while": DATA.format(
        item="time.sleep(1.5) if i < 4 else lock.acquire(timeout=1.5)",
        before="lock.acquire()",
        options="",
    ),
    "workers that compute": DATA.format(
        item="[time.process_time() for _ in range(2_000_000 if i < 2 else 1)]",
        before="",
        options="",
    ),
    "a lock that a thread of the worker's own releases": DATA.format(
        item="with lock: (threading.Timer(2, lock.release).start() if i < 2 else None)\n"
        "        if i < 2: lock.acquire(); lock.acquire(); lock.release()",
        before="",
        options="",
    ),
}


@pytest.fixture
def ranks(ranks2: Session) -> Iterator[Session]:
    """Two ranks with a variable to lose, free before and after."""
    ranks2.run_cell("kept = 'kept'").raise_for_error()
    yield ranks2
    if not ranks2.record.snapshot.ready:
        ranks2.abort()


def workers_of(session: Session) -> list[psutil.Process]:
    """The processes that the ranks have forked; not the one that multiprocessing keeps."""
    found = []
    for state in session.record.snapshot.ranks:
        for child in psutil.Process(state.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found.append(child)
    return found


def found(
    session: Session,
    source: str,
    ranks: Ranks,
    category: Category = Category.DATALOADER_DEADLOCK,
) -> Finding:
    """Run a cell that hangs; its finding. Then it is given up, and nothing is lost."""
    result = session.run_cell(source)
    assert isinstance(result.error, Stuck), result.error
    assert result.diagnosis is not None
    (finding,) = result.diagnosis.findings
    assert (finding.category, finding.ranks) == (category, ranks), finding
    assert not result.diagnosis.notes, "its collectives are recorded to the end"
    pids = rank_pids(session)
    session.abort()
    assert rank_pids(session) == pids
    assert session.pull("kept") == dict.fromkeys(range(2), "kept")
    session.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 2").raise_for_error()
    return finding


@pytest.mark.parametrize("name", STUCK)
def test_stuck_workers_are_named_with_their_line_and_nothing_is_lost(
    ranks: Session, name: str
) -> None:
    source, culprits = STUCK[name]
    finding = found(ranks, source, culprits)
    assert "worker" in finding.cause and "in __getitem__" in str(finding.evidence)
    assert set(finding.waiting) == {0, 1} - set(culprits)
    eventually(lambda: not workers_of(ranks), 10, "the workers are gone")


@pytest.mark.parametrize("name", SLOW)
def test_slow_workers_are_waited_for(ranks: Session, name: str) -> None:
    result = ranks.run_cell(SLOW[name])
    result.raise_for_error()
    assert result.diagnosis is None


def test_workers_that_do_not_come_from_a_fork_are_sent_no_signal(
    ranks: Session, tmp_path: Path
) -> None:
    (tmp_path / "stuck_data.py").write_text(
        "import threading\n"
        "class Data(list):\n"
        "    def __getitem__(self, i):\n"
        "        lock = threading.Lock()\n"
        "        lock.acquire()\n"
        "        lock.acquire()\n"
    )
    finding = found(
        ranks,
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from stuck_data import Data\n"
        "from torch.utils.data import DataLoader\n"
        "if rank == 0:\n"
        "    list(DataLoader(Data([1, 2]), num_workers=1, multiprocessing_context='spawn'))\n"
        "dist.barrier()",
        (0,),
    )
    assert "forked" not in str(finding.evidence)
    # Its queues have names in the system, until the traceback that holds them is collected.
    ranks.run_cell("import gc\ngc.collect()").raise_for_error()


def test_a_worker_that_is_stopped_goes_on_when_it_is_let(ranks: Session) -> None:
    source = DATA.format(
        item="time.sleep(0.5)", before="", options=", persistent_workers=True"
    ).replace("Data(), batch_size=2", "Data()")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(ranks.run_cell(source)))
    thread.start()
    eventually(lambda: len(workers_of(ranks)) == 4, 20, "the workers")
    mine = ranks.record.snapshot.ranks[0].pid
    stopped = [worker for worker in workers_of(ranks) if worker.ppid() == mine]
    for worker in stopped:
        os.kill(worker.pid, signal.SIGSTOP)
    try:
        thread.join(30)
        assert results and isinstance(results[0].error, Stuck), results
        finding = results[0].diagnosis.findings[0]
        assert (finding.category, finding.ranks) == (Category.DATALOADER_DEADLOCK, (0,))
        assert all(str(worker.pid) in finding.remedy for worker in stopped if worker.is_running())
    finally:
        for worker in stopped:
            os.kill(worker.pid, signal.SIGCONT)
    eventually(lambda: ranks.record.snapshot.ready, 30, "the cell ends")


def test_a_worker_that_was_killed_for_want_of_shared_memory_is_told(ranks: Session) -> None:
    """torch raises that in a handler of SIGCHLD, at whatever line the rank is: in ours, too."""
    # Before the first batch: one that is under way would break off, which is another error.
    bus = "if rank == 1 and i == 0: import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    source = DATA.format(item=bus, before="", options="")
    finding = found(ranks, source, (1,), Category.DATALOADER_SHM)
    assert "/dev/shm" in finding.cause and finding.waiting == (0,)
