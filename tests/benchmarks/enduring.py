"""A session that is used for long: do memory, descriptors and threads of its processes stay flat?

    python tests/benchmarks/enduring.py [--cells 10000] [--starts 300] [--aborts 100]

Each kind of use is measured after its first tenth, when everything that is loaded once is loaded,
and at its end.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from kernels import Kernel
from rows import Row, table
from support import RUN_TAG

MOST_GROWTH = 1.05
CELL = "%%ddp\nx = torch.ones(4)\ndist.all_reduce(x)\nprint(x.sum().item())"
HANG = "%%ddp\nif rank == 0:\n    dist.all_reduce(torch.ones(1))"

Numbers = Mapping[str, float]


def numbers(kernel: Kernel, *, ranks: bool) -> Numbers:
    """What the session's processes hold now, by process and by what; of ranks, the first."""
    pids = kernel.pids()
    processes = {"kernel": kernel.pid, "fork server": pids.fork_server}
    if ranks:  # the same processes from the first measurement to the last
        processes |= {"controller": pids.controller, "store": pids.store, "rank 0": pids.ranks[0]}
    found: dict[str, float] = {}
    for name, pid in processes.items():
        process = psutil.Process(pid)
        found[f"{name}: memory (USS)"] = process.memory_full_info().uss
        found[f"{name}: descriptors"] = process.num_fds()
        found[f"{name}: threads"] = process.num_threads()
    return found


def use(kernel: Kernel, name: str, times: int, do: Callable[[], None], *, ranks: bool) -> list[Row]:
    """Do something many times; a row for each process and what it holds."""
    settled = max(1, times // 10)
    for _ in range(settled):
        do()
    before = numbers(kernel, ranks=ranks)
    for _ in range(times - settled):
        do()
    after = numbers(kernel, ranks=ranks)
    rows = []
    for what, value in after.items():
        ratio = value / before[what]
        shown = f"{value / 2**20:.1f} MB" if "memory" in what else f"{value:.0f}"
        first = f"{before[what] / 2**20:.1f} MB" if "memory" in what else f"{before[what]:.0f}"
        against = f"{first} after the first {settled}"
        met = ratio <= MOST_GROWTH
        rows.append(Row(f"{times} {name}, {what}", shown, against, ratio, "at most 1.05x", met))
    return rows


def main() -> int:
    """Use one session for long; 0 when everything is flat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--aborts", type=int, default=100)
    wanted = parser.parse_args()
    os.environ[RUN_TAG] = uuid.uuid4().hex
    with Kernel() as kernel:
        kernel.init(2)

        def cell() -> None:
            assert "8" in kernel.run_well(CELL).text

        def start() -> None:
            kernel.run_well("%ddp_shutdown\n%ddp_init --world-size 2")

        def abort() -> None:
            kernel.run(HANG)
            kernel.run_well("%ddp_abort")

        rows = use(kernel, "cells", wanted.cells, cell, ranks=True)
        rows += use(kernel, "aborts", wanted.aborts, abort, ranks=True)
        rows += use(kernel, "starts", wanted.starts, start, ranks=False)
    print(table(rows))
    return int(any(not row.met for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
