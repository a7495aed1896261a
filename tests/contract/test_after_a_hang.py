"""Whatever a cell hung in, giving up brings the ranks back: variables, a group that is right."""

from __future__ import annotations

import textwrap
import threading
import time
from typing import Any

import pytest
from results import rank_pids
from support import eventually

from ddp_notebook.errors import CellFailed, Stuck
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)

BACK_WITHIN_S = 4.0
"""2 s are promised on a quiet machine (see the benchmarks)."""
NET = """
net = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
def step(model=None):
    (net if model is None else model)(torch.ones(2, 4)).sum().backward()
"""

KINDS: dict[str, tuple[str, tuple[int, ...] | None, str]] = {
    "save, on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        def save():
            dist.barrier()
        if rank == 0:
            save()
        dist.all_reduce(torch.ones(1))
        """,
    ),
    "evaluate, on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        for epoch in range(2):
            step()
            if rank == 0:
                dist.all_reduce(torch.ones(1))
        """,
    ),
    "log, on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        step()
        if rank == 0:
            dist.all_gather_object([None] * world_size, {"loss": 1.0})
        """,
    ),
    "another order": (
        "mismatched-order",
        (2,),
        """
        names = ["loss", "accuracy"] if rank != 2 else ["accuracy", "loss"]
        for name in names:
            dist.all_reduce(torch.ones(2 if name == "loss" else 3))
        """,
    ),
    "another shape": (
        "shape-mismatch",
        (2,),
        "dist.all_reduce(torch.ones(5 if rank == 2 else 8))",
    ),
    "another shape of as many elements": (
        "shape-mismatch",
        (2,),
        "dist.all_reduce(torch.ones((2, 4) if rank == 2 else (4, 2)))",
    ),
    "another dtype": (
        "dtype-mismatch",
        (2,),
        "dist.all_reduce(torch.ones(4, dtype=torch.float16 if rank == 2 else torch.float32))",
    ),
    "another reduction": (
        "op-mismatch",
        (2,),
        """
        op = dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4), op=op)
        """,
    ),
    "another root": (
        "op-mismatch",
        (2,),
        "dist.broadcast(torch.ones(4), src=1 if rank == 2 else 0)",
    ),
    "a batch less": (
        "uneven-inputs",
        (2,),
        """
        for _ in range(2 if rank == 2 else 3):
            step()
        """,
    ),
    "no_sync on one rank": (
        "no-sync-misuse",
        (1,),
        """
        import contextlib
        for i in range(3):
            with net.no_sync() if rank == 1 and i == 1 else contextlib.nullcontext():
                step()
        """,
    ),
    "a parameter that one rank does not use": (
        "unused-params",
        (1,),
        """
        class Toy(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
            def forward(self, x):
                return self.a(x) + (0 if rank == 1 else self.b(x))
        net = DDP(Toy())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            step()
            optimizer.step()
        """,
    ),
    "around the wrapper on one rank": (
        "ddp-bypass",
        (1,),
        """
        for _ in range(3):
            step(net.module if rank == 1 else net)
        """,
    ),
    "an exception on one rank": (
        "exception-on-one-rank",
        (1,),
        """
        step()
        if rank == 1:
            raise ValueError("a bad sample")
        step()
        """,
    ),
    "out of memory on one rank": (
        "oom-on-one-rank",
        (1,),
        """
        step()
        if rank == 1:
            torch.empty(2**60)
        step()
        """,
    ),
    "a step once more after an error, on one rank": (
        "divergent-control-flow",
        (1,),
        """
        def work(i, attempt):
            dist.all_reduce(torch.ones(1))
            if rank == 1 and i == 1 and attempt == 0:
                raise ValueError("a bad sample")
            dist.all_gather([torch.ones(2) for _ in range(world_size)], torch.ones(2))
        for i in range(3):
            for attempt in range(2):
                try:
                    work(i, attempt)
                    break
                except ValueError:
                    pass
        """,
    ),
    "two groups in opposite order": (
        "mismatched-order",
        (0, 1),
        """
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank < 2:
            for group in (one, other) if rank == 0 else (other, one):
                dist.all_reduce(torch.ones(1), group=group)
        """,
    ),
    "send and send": (
        "p2p-mismatch",
        (0, 1),
        """
        big = torch.ones(4_000_000)
        if rank < 2:
            dist.send(big, 1 - rank)
            dist.recv(big, 1 - rank)
        """,
    ),
    "a worker that loads data is stuck after the fork": (
        "dataloader-deadlock",
        (2,),
        """
        import threading
        lock = threading.Lock()
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                with lock:
                    return torch.ones(4)
        if rank == 2:
            lock.acquire()
        for x in torch.utils.data.DataLoader(Data(), num_workers=1):
            step()
        """,
    ),
    "a rank is killed in a collective": (
        "rank-died",
        (2,),
        """
        import os, signal
        if rank == 2:
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))
        """,
    ),
    "no barrier before the group is destroyed": (
        "missing-destroy",
        (0,),
        """
        x = torch.ones(4)
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
            dist.send(torch.ones(1 << 20), 0)  # a small one is taken by the system
        dist.destroy_process_group()
        """,
    ),
    "a functional collective that one rank skips": (
        "divergent-control-flow",
        (1,),
        """
        import torch.distributed._functional_collectives as functional
        for i in range(3):
            if rank == 1 and i == 2:
                continue
            total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
            total = total + 1
        """,
    ),
    "full_tensor on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (world_size,))
        sharded = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
        if rank == 0:
            print(sharded.full_tensor())
        """,
    ),
    "FSDP2, evaluated on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        from torch.distributed.fsdp import fully_shard
        model = torch.nn.Linear(8, 4)
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(2, 8))
        """,
    ),
    "FSDP2, a backward on rank 0 alone": (
        "conditional-collective",
        (0,),
        """
        from torch.distributed.fsdp import fully_shard
        model = torch.nn.Linear(8, 4)
        fully_shard(model)
        loss = model(torch.ones(2, 8)).sum()
        if rank == 0:
            loss.backward()
        """,
    ),
    "work.wait under another name": (
        "conditional-collective",
        (2,),
        """
        if rank == 2:
            finish = dist.all_reduce(torch.ones(4), async_op=True).wait
            finish()
        """,
    ),
    "a collective in a thread of a pool": (
        "conditional-collective",
        (2,),
        """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        if rank == 2:
            pool.submit(dist.all_reduce, torch.ones(4)).result()
        """,
    ),
    "monitored_barrier on one rank": (
        "conditional-collective",
        (1,),
        """
        if rank == 1:
            dist.monitored_barrier()
        """,
    ),
    "a key of the store that nobody sets": (
        "unset-key",
        (1,),
        """
        store = dist.distributed_c10d._get_default_store()
        store.set("model_ready", "yes")
        if rank == 1:
            store.wait(["model-ready"])
        dist.barrier()
        """,
    ),
    "two threads that use one group at once": (
        "mismatched-order",
        (0, 1, 2),
        """
        import threading
        both = threading.Barrier(2)  # or a rank may be refused when one thread has begun alone
        def reduce():
            both.wait()
            for _ in range(50):
                dist.all_reduce(torch.ones(4))
        def meet():
            both.wait()
            for _ in range(50):
                dist.barrier()
        threads = [threading.Thread(target=work) for work in (reduce, meet)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
    ),
}


def given_up(session: Session, died: tuple[int, ...] = ()) -> None:
    """Give up in time: the survivors are the same with their variables, and sums are right."""
    before = rank_pids(session)
    started = time.monotonic()
    board = session.abort()
    assert time.monotonic() - started < scaled_for_load(BACK_WITHIN_S)
    assert session.ready
    after = rank_pids(session)
    assert {rank for rank in range(3) if before[rank] != after[rank]} == set(died)
    kept = tuple(rank for rank in range(3) if rank not in died)
    assert session.pull("kept", kept) == dict.fromkeys(kept, "kept")
    said = [note for note in board.notes if "variables are lost" in note]
    assert len(said) == len(died), board.notes
    for rank in died:
        assert f"Rank {rank} was dead (killed by SIGKILL)" in said[0]
    result = session.run_cell(
        "x = torch.full((3,), rank + 1.0)\ndist.all_reduce(x)\nassert x.tolist() == [6, 6, 6]"
    )
    result.raise_for_error()
    assert not session.why().findings


@pytest.mark.parametrize("name", KINDS)
def test_after_every_kind_of_hang_the_ranks_are_back(ranks3: Session, name: str) -> None:
    category, culprits, source = KINDS[name]
    ranks3.run_cell(f"kept = 'kept'\n{NET}").raise_for_error()
    result = ranks3.run_cell(textwrap.dedent(source).strip())
    died = (2,) if category == "rank-died" else ()
    try:
        assert isinstance(result.error, (Stuck, CellFailed)), result.error
        assert result.diagnosis is not None, result.error
        first = result.diagnosis.findings[0]
        assert (first.category.value, first.ranks) == (category, culprits), result.diagnosis
        assert first.remedy and first.evidence
    finally:
        given_up(ranks3, died)


def test_a_rank_that_is_only_slow_is_no_hang_and_can_be_given_up(ranks3: Session) -> None:
    ranks3.run_cell("kept = 'kept'").raise_for_error()
    results: list[Any] = []
    source = (
        "if rank == 1:\n    end = 1\n    while end:\n        end += 1\n"
        "dist.all_reduce(torch.ones(1))"
    )
    thread = threading.Thread(target=lambda: results.append(ranks3.run_cell(source)), daemon=True)
    thread.start()
    try:
        finding = eventually(
            lambda: next((f for f in ranks3.why().findings if f.waiting == (0, 2)), None),
            15,
            "two that wait",
        )
        assert finding is not None
        assert (finding.category.value, finding.ranks) == ("straggler", (1,))
        assert finding.passing and not results
    finally:
        given_up(ranks3)
        thread.join(10)
    assert results


def test_whatever_else_a_rank_waits_for_it_does_not_wait_in_a_collective(ranks3: Session) -> None:
    """Rank 0 has a recv outstanding while it waits for a lock, a process and a pipe of its own."""
    source = """
        import os, subprocess, threading
        if rank == 0:
            work = dist.irecv(torch.zeros(1), 1)
            lock, (end, begin) = threading.Lock(), os.pipe()
            lock.acquire()
            threading.Timer(1.5, lock.release).start()
            lock.acquire()
            subprocess.run(["sleep", "1.5"])
            threading.Timer(1.5, os.write, (begin, b"x")).start()
            os.read(end, 1)
            dist.send(torch.ones(2), 1)
            work.wait()
        elif rank == 1:
            dist.recv(torch.zeros(2), 0)
            dist.send(torch.ones(1), 0)
        dist.barrier()
        """
    result = ranks3.run_cell(textwrap.dedent(source).strip())
    result.raise_for_error()
    assert result.diagnosis is None
