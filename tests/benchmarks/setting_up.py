"""Setup that goes wrong, and setup that only takes its time: how often the answer is right."""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rows import Row, seconds

from ddp_notebook.errors import DDPError, SetupFailed
from ddp_notebook.faults import FAULTS, Fault
from ddp_notebook.session import InitOptions, Session

RANKS = 3
SHOWN_WITHIN_S = 2.0
WITHOUT_A_STALL = ("stale-file", "short-timeout")
"""Faults whose ranks do other things for some seconds before they stall."""
HEALTHY = """
import os, time
import torch
import torch.distributed as dist

time.sleep(float(os.environ["DELAY"]))
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(float(os.environ["DELAY"]) / 5)
dist.barrier()
dist.destroy_process_group()
"""


def rows(fault_rounds: int = 5, healthy_runs: int = 200, abandoned: int = 50) -> list[Row]:
    """All bars of setup."""
    return [
        *faults(fault_rounds),
        healthy(healthy_runs),
        abandoning(abandoned),
        at_once(20),
    ]


@contextmanager
def session(world_size: int = RANKS) -> Iterator[Session]:
    """A session on CPU ranks."""
    made = Session()
    try:
        made.init(InitOptions(world_size=world_size, device="cpu"))
        yield made
    finally:
        made.shutdown()


def faults(rounds: int) -> list[Row]:
    """Every fault of the lab: found, in time, repaired."""
    with session() as ranks:
        return [_fault(ranks, fault, rounds) for fault in FAULTS.values()]


def _fault(ranks: Session, fault: Fault, rounds: int) -> Row:
    held, times = 0, []
    for _ in range(rounds):
        started = time.monotonic()
        result = ranks.fault(fault.name)
        times.append(time.monotonic() - started)
        first = result.diagnosis.findings[0] if result.diagnosis is not None else None
        wanted = (fault.category, fault.culprits_of(RANKS))
        right = first is not None and (first.category, first.ranks) == wanted
        repaired = not ranks.repair().error and ranks.record.snapshot.ready
        held += right and repaired
    print(f"{fault.name}: {held} of {rounds}", file=sys.stderr, flush=True)
    timed = not fault.passes and fault.name not in WITHOUT_A_STALL
    return Row(
        f"fault {fault.name}: found and repaired",
        f"{held} of {rounds}, after {seconds(median(times))}",
        wanted=f"{rounds} of {rounds}" + (f", {SHOWN_WITHIN_S:g} s" if timed else ""),
        met=held == rounds and (not timed or median(times) <= SHOWN_WITHIN_S),
    )


def healthy(runs: int, sessions: int = 4, longest_s: float = 5.0) -> Row:
    """Setups with random delays, several at once on one machine: none may get a finding."""
    rng = random.Random(20)
    plans = [[rng.uniform(0, longest_s) for _ in range(RANKS)] for _ in range(runs)]
    lock = threading.Lock()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "healthy.py"
        script.write_text(HEALTHY)

        def work() -> None:
            with session() as ranks:
                while True:
                    with lock:
                        if not plans:
                            return
                        delays = plans.pop()
                    result = ranks.run_script(
                        str(script),
                        store=("session", "rank0")[len(plans) % 2],
                        settings={r: {"DELAY": f"{d:.3f}"} for r, d in enumerate(delays)},
                    )
                    if result.error is not None:
                        problems.append(str(result.error))
                        ranks.setup.make_ready()

        in_threads(sessions, work)
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    well = runs - len(problems)
    return Row(
        f"healthy setups, delays up to {longest_s:g} s, without a finding",
        f"{well} of {runs}",
        wanted=f"{runs} of {runs}",
        met=well == runs,
    )


def abandoning(tries: int) -> Row:
    """A stuck setup is given up, and the next one works, with the same ranks."""
    names = [name for name, fault in FAULTS.items() if not fault.passes]
    rng = random.Random(21)
    held, times = 0, []
    with session() as ranks:
        for _ in range(tries):
            ranks.fault(rng.choice(names))
            started = time.monotonic()
            ranks.abort()
            times.append(time.monotonic() - started)
            try:
                if not ranks.ready:
                    ranks.init(InitOptions(world_size=RANKS, device="cpu"))
                held += ranks.record.snapshot.ready
            except SetupFailed as failure:
                print(failure, file=sys.stderr, flush=True)
    slowest = max(times)
    return Row(
        "a stuck setup abandoned, the next one works",
        f"{held} of {tries}, slowest {seconds(slowest)}",
        wanted=f"{tries} of {tries}, {SHOWN_WITHIN_S:g} s",
        met=held == tries and slowest <= SHOWN_WITHIN_S,
    )


def at_once(starts: int) -> Row:
    """Many `%ddp_init` at the same moment: each gets a port of its own."""
    problems: list[str] = []

    def work() -> None:
        try:
            with session(2):
                pass
        except DDPError as problem:
            problems.append(str(problem))

    in_threads(starts, work)
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    well = starts - len(problems)
    return Row(
        f"{starts} sessions started at once",
        f"{well} of {starts}",
        wanted=f"{starts} of {starts}",
        met=well == starts,
    )


def in_threads(count: int, work: Callable[[], None]) -> None:
    """`work` on several threads at once; raises what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()
