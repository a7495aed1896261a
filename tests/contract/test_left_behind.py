"""Whatever is killed, and whenever: nothing of ours survives it, and the next start works at once.

`DDP_NOTEBOOK_ROUNDS` is how often each is tried; `DDP_NOTEBOOK_SEED` chooses other moments.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from kernels import Kernel
from support import (
    GONE_WITHIN_S,
    ROUNDS,
    SEED,
    Leftovers,
    Pids,
    clear_away,
    eventually,
    is_alive,
    leftovers,
    our_processes,
    session_folders,
)

from ddp_notebook.launch.timeouts import scaled_for_load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 30 * ROUNDS)]

START_WITHIN_S = 20.0
"""A start "at once" on a loaded machine: what is left of an earlier session would time out."""
TOLD_WITHIN_S = 2.0

SUM = "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
TRAINING = """%%ddp
import subprocess
from multiprocessing import shared_memory
from torch.utils.data import DataLoader, TensorDataset

subprocess.Popen(["sleep", "1000"])
memory = shared_memory.SharedMemory(create=True, size=4096)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    for x, y in DataLoader(data, batch_size=8, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        print("step", step)
"""
"""Trains without end, and uses what a user may: a subprocess, workers, shared memory."""

STARTS = """
import os, subprocess, sys, time
own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(os.open({mark!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"%d " % os.getpid())
        time.sleep(1000)
    os._exit(0)
os.write(os.open({mark!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"%d " % own.pid)
time.sleep(1000)
"""

Attempt = Callable[[random.Random], None]
Record = Callable[[str, object], None]


# --------------------------------------------------------------------------- how it is tried


@pytest.fixture(scope="module")
def kernel(nothing_left_behind_by_the_module: None) -> Iterator[Kernel]:
    """One kernel after the other: where one round ended, the next must be able to start."""
    with Kernel() as kernel:
        yield kernel
        start_at_once(kernel)


@pytest.fixture(autouse=True)
def nothing_left_behind(kernel: Kernel) -> None:
    """Each round looks for itself, while a kernel lives; the module's check comes at the end."""


def in_rounds(kernel: Kernel, attempt: Attempt, record_property: Record) -> None:
    """Try `attempt` in each round, each with moments of its own.

    A failed round is cleared away and does not keep the others from being tried.
    """
    print(f"seed {SEED}")
    record_property("seed", SEED)
    failures: list[str] = []
    for number in range(ROUNDS):
        before = leftovers()
        try:
            attempt(random.Random(f"{SEED}/{number}"))
        except Exception as error:  # noqa: BLE001  # any failure is this round's alone
            failures.append(f"round {number + 1}: {type(error).__name__}: {error}")
            print(failures[-1], flush=True)
            kernel.close(now=True)
            clear_away(leftovers().beyond(before))
            kernel.start()
    record_property("rounds", f"{ROUNDS - len(failures)} of {ROUNDS}")
    assert not failures, f"seed {SEED}\n" + "\n".join(failures)


def start_at_once(kernel: Kernel) -> Pids:
    """Start two ranks, which must not take long; their processes."""
    took_s = kernel.init(2)
    assert took_s < scaled_for_load(START_WITHIN_S), f"the start took {took_s:.1f} s"
    kernel.run_well(SUM)
    return kernel.pids()


def running_session(kernel: Kernel) -> Pids:
    """The session that runs, or a new one."""
    kernel.run_well("%load_ext ddp_notebook")
    running = kernel.ask("get_ipython()._ddp_notebook_magics.session.running")
    return kernel.pids() if running else start_at_once(kernel)


def shut_down(kernel: Kernel) -> None:
    """After `%ddp_shutdown` only the fork server may be left, after `%unload_ext` nothing."""
    kernel.run("%ddp_shutdown")
    try:
        assert_nothing_left(kernel, also=fork_server_of(kernel))
        kernel.run("%unload_ext ddp_notebook")
        assert_nothing_left(kernel)
    except AssertionError:
        kernel.close(now=True)
        clear_away(leftovers())
        kernel.start()
        raise


def train_until_a_random_moment(kernel: Kernel, rng: random.Random) -> str:
    """Send the training cell and let it run a while; its message id."""
    message = kernel.send(TRAINING)
    kernel.wait_for_text(message, "step")
    kernel.read_for(rng.uniform(0.0, 1.0))
    return message


def fork_server_of(kernel: Kernel) -> int:
    """The process of the warm fork server, 0 for none."""
    pool = "get_ipython()._ddp_notebook_magics.session.pool"
    return kernel.ask(f"{pool}.fork_server.pid if {pool}.fork_server else 0")


def assert_nothing_left(kernel: Kernel | None = None, also: int = 0) -> None:
    """In time, nothing of the test run lives but `kernel` and `also`, and no file is there."""
    left = Leftovers()

    def nothing() -> bool:
        nonlocal left
        now = leftovers()
        left = replace(now, processes=frozenset(p for p in now.processes if p[0] not in spared))
        return not left

    spared = {kernel.pid if kernel is not None else 0, also}
    try:
        eventually(nothing, GONE_WITHIN_S)
    except AssertionError:
        raise AssertionError(f"left after {GONE_WITHIN_S:g} s:\n{left}") from None


def with_descendants(pid: int) -> set[int]:
    """`pid` and every process it started, however deep."""
    root = psutil.Process(pid)
    return {pid, *(p.pid for p in root.children(recursive=True))}


def kill_and_hear(kernel: Kernel, message: str, pid: int) -> str:
    """Kill a process of the session under a running cell; what the cell's error says."""
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    reply = kernel.finish(message, GONE_WITHIN_S)
    assert reply.status == "error", f"the cell ended with {reply.status}"
    told_after_s = reply.ended_at - killed_at
    assert told_after_s < scaled_for_load(TOLD_WITHIN_S), (
        f"told after {told_after_s:.1f} s: {reply.evalue}"
    )
    return reply.evalue


# --------------------------------------------------------------------------- the kernel ends


def test_a_kernel_killed_while_it_starts_ranks_leaves_nothing(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        kernel.send("%load_ext ddp_notebook")
        kernel.send("%ddp_init --world-size 2")
        kernel.send(TRAINING)
        kernel.read_for(rng.uniform(0.0, 4.0))
        kernel.kill()
        assert_nothing_left()
        kernel.close(now=True)
        kernel.start()

    in_rounds(kernel, attempt, record_property)


def test_a_kernel_killed_beside_another_leaves_nothing_and_the_other_alone(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        server = kernel.warm()
        before = {process.pid for process in our_processes()}
        with Kernel() as other:
            other.send("%load_ext ddp_notebook")
            other.send("%ddp_init --world-size 2")
            message = other.send(TRAINING)
            if rng.random() < 0.5:
                other.wait_for_text(message, "step")
            other.read_for(rng.uniform(0.0, 1.5))
            beside = {process.pid for process in our_processes()} - before
            other.kill()
            eventually(lambda: not any(map(is_alive, beside)), what=f"the end of {beside}")
        assert {process.pid for process in our_processes()} == before
        assert kernel.warm() == server

    in_rounds(kernel, attempt, record_property)
    start_at_once(kernel)
    shut_down(kernel)


def test_what_a_kernel_and_its_fork_server_leave_together_the_next_load_takes_away(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        pids = start_at_once(kernel)
        kernel.read_for(rng.uniform(0.0, 0.5))
        os.kill(pids.fork_server, signal.SIGSTOP)  # it cannot tidy up after the kernel
        kernel.kill()
        os.kill(pids.fork_server, signal.SIGKILL)
        eventually(lambda: not our_processes(), what="the end of all processes")
        assert [str(folder) for folder in session_folders()] == [pids.folder]
        kernel.close(now=True)
        kernel.start()
        kernel.run_well("%load_ext ddp_notebook")
        eventually(lambda: not session_folders(), what="the end of the old folder")

    in_rounds(kernel, attempt, record_property)


def test_a_kernel_killed_in_mid_cell_leaves_nothing(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        start_at_once(kernel)
        train_until_a_random_moment(kernel, rng)
        kernel.kill()
        assert_nothing_left()
        kernel.close(now=True)
        kernel.start()

    in_rounds(kernel, attempt, record_property)


def test_what_a_script_starts_in_sessions_of_its_own_ends_with_its_run_and_with_the_kernel(
    kernel: Kernel, tmp_path: Path
) -> None:
    """As a launcher's ranks; and a daemon, whose parent has ended."""
    script, mark = tmp_path / "starts.py", tmp_path / "pids"
    script.write_text(STARTS.format(mark=str(mark)))
    running_session(kernel)
    for end in (lambda: kernel.run("%ddp_abort"), kernel.kill):
        kernel.run(f"%ddp_run --detach {script}")
        eventually(lambda: mark.exists() and len(mark.read_text().split()) == 4, 20)
        pids = list(map(int, mark.read_text().split()))
        assert all(map(is_alive, pids))
        end()
        eventually(lambda pids=pids: not any(map(is_alive, pids)), what="what it started is gone")
        mark.unlink()
    kernel.close(now=True)
    kernel.start()


@pytest.mark.parametrize("now", [True, False], ids=["at once", "politely"])
def test_a_kernel_restarted_in_mid_cell_leaves_nothing(
    kernel: Kernel, now: bool, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        start_at_once(kernel)
        train_until_a_random_moment(kernel, rng)
        kernel.restart(now=now)
        assert_nothing_left(kernel)

    in_rounds(kernel, attempt, record_property)


def test_a_kernel_shut_down_in_mid_cell_leaves_nothing(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        start_at_once(kernel)
        train_until_a_random_moment(kernel, rng)
        kernel.close()
        assert_nothing_left()
        kernel.start()

    in_rounds(kernel, attempt, record_property)


# --------------------------------------------------------------------------- the kernel lives on


def test_a_killed_rank_is_named_and_comes_back_while_the_others_keep_their_variables(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        pids = running_session(kernel)
        victim = rng.randrange(2)
        kept = rng.randrange(10**9)
        kernel.run_well(f"%%ddp\nkept = {kept}")
        message = train_until_a_random_moment(kernel, rng)
        family = with_descendants(pids.ranks[victim])
        said = kill_and_hear(kernel, message, pids.ranks[victim])
        assert f"rank {victim} died, killed by SIGKILL" in said
        assert f"%ddp_restart --ranks {victim}" in said
        kernel.run_well(f"%ddp_restart --ranks {victim}")
        eventually(lambda: not any(map(is_alive, family)), what=f"the end of {family}")
        reply = kernel.run_well(
            "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item(), globals().get('kept'))"
        )
        assert f"── rank {1 - victim} ──\n2.0 {kept}" in reply.text
        assert f"── rank {victim} ──\n2.0 None" in reply.text
        after = kernel.pids()
        assert after.ranks[1 - victim] == pids.ranks[1 - victim]
        assert after.ranks[victim] != pids.ranks[victim]

    in_rounds(kernel, attempt, record_property)
    shut_down(kernel)


@pytest.mark.parametrize("victim", ["fork server", "controller"])
def test_a_killed_process_of_the_session_is_named_and_takes_everything_with_it(
    kernel: Kernel, victim: str, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        pids = start_at_once(kernel)
        message = train_until_a_random_moment(kernel, rng)
        said = kill_and_hear(kernel, message, getattr(pids, victim.replace(" ", "_")))
        assert victim in said
        assert "%ddp_init" in said
        assert_nothing_left(kernel)

    in_rounds(kernel, attempt, record_property)


def test_a_killed_store_process_disturbs_no_cell_and_a_restart_opens_the_store_again(
    kernel: Kernel, record_property: Record
) -> None:
    def attempt(rng: random.Random) -> None:
        pids = running_session(kernel)
        message = kernel.send(
            "%%ddp\nimport time\nfor step in range(100):\n"
            "    x = torch.ones(1)\n    dist.all_reduce(x)\n"
            "    print('step', step)\n    time.sleep(0.01)"
        )
        kernel.wait_for_text(message, "step")
        kernel.read_for(rng.uniform(0.0, 0.5))
        os.kill(pids.store, signal.SIGKILL)
        reply = kernel.finish(message)
        assert reply.status == "ok", reply.evalue
        assert "step 99" in reply.text
        victim = rng.randrange(2)
        kernel.run_well(f"%ddp_restart --ranks {victim}")
        kernel.run_well(SUM)
        again = kernel.pids()
        assert again.store != pids.store
        assert again.ranks[1 - victim] == pids.ranks[1 - victim]

    in_rounds(kernel, attempt, record_property)
    shut_down(kernel)
