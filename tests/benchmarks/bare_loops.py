"""How others time all_reduce, without this package: a program for each rank.

    python bare_loops.py RANK WORLD_SIZE STORE

It reads a line of JSON from its standard input, ``{"method": ..., "sizes": [...]}``, and writes
one: seconds by size. Each method is written from its description:

bare    a loop over `dist.all_reduce` with a look at the clock around each, after a barrier and
        some warm-up; the median over iterations of the slowest rank.
param   Meta's PARAM: warm-up, a barrier, one look at the clock around all iterations, each of which
        is waited for; the mean on each rank, and the median of those over ranks.
stas00  stas00's all_reduce_bench: each trial is timed by itself and made into a rate; the mean of
        the rates.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist

WARMUP = 3


def iterations_for(size: int) -> int:
    """As many as take about a tenth of a second on a laptop."""
    return max(10, min(100, 2**26 // max(size, 1)))


def bare(size: int) -> float:
    """The median over iterations of the slowest rank, in seconds."""
    tensor, count = warmed_up(size)
    stamps = [time.perf_counter()]
    for _ in range(count):
        dist.all_reduce(tensor)
        stamps.append(time.perf_counter())
    slowest = torch.tensor([end - start for start, end in pairwise(stamps)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def param(size: int) -> float:
    """The median over ranks of each rank's mean, in seconds."""
    tensor, count = warmed_up(size)
    started = time.monotonic()
    for _ in range(count):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    mean = torch.tensor([(time.monotonic() - started) / count], dtype=torch.float64)
    means = [torch.zeros_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(means, mean)
    return statistics.median(float(each) for each in means)


def stas00(size: int) -> float:
    """The time that the mean of the trials' rates stands for, in seconds."""
    tensor, count = warmed_up(size)
    rates = []
    for _ in range(count):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        rates.append(size / (time.perf_counter() - started))
    return size / statistics.fmean(rates)


def warmed_up(size: int) -> tuple[torch.Tensor, int]:
    """A tensor of `size` bytes that was reduced some times, with all ranks at one point."""
    tensor = torch.zeros(size // 4)
    for _ in range(WARMUP):
        dist.all_reduce(tensor)
    dist.barrier()
    return tensor, iterations_for(size)


def main() -> None:
    """Answer every line until there are no more."""
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    methods = {"bare": bare, "param": param, "stas00": stas00}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        method = methods[asked["method"]]
        print(json.dumps({str(size): method(size) for size in asked["sizes"]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
