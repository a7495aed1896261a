"""A script of two ranks: the CPU time of training steps with DDP, by hand, FSDP2 and a pipeline.

    torchrun --nproc-per-node 2 kinds_of_steps.py --out FOLDER

Each rank writes what a step of each kind takes of its main thread's time, the median in us.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

WARM, COUNTED = 20, 80
WIDTH, LAYERS, BATCH = 128, 8, 64
Step = Callable[[], object]


def layers(count: int = LAYERS) -> torch.nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def trained(model: torch.nn.Module, then: Step = lambda: None) -> Step:
    """Forward, backward, `then`, step."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        then()
        optimizer.step()

    return step


def by_hand() -> Step:
    """Gradients that the user's code averages, one after the other."""
    model = layers()

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return trained(model, average)


def sharded() -> Step:
    """FSDP2, each layer a unit."""
    model = layers()
    for layer in model:
        fully_shard(layer)
    return trained(fully_shard(model))


def pipelined() -> Step:
    """Two stages, 1F1B, four micro-batches."""
    part, rank = layers(LAYERS // 2), dist.get_rank()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.AdamW(part.parameters())
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        _ = schedule.step(target=target) if rank else schedule.step(batch)
        optimizer.step()

    return step


KINDS: dict[str, Callable[[], Step]] = {
    "ddp": lambda: trained(DistributedDataParallel(layers())),
    "by_hand": by_hand,
    "sharded": sharded,
    "pipelined": pipelined,
}


def median_us(step: Step) -> float:
    """CPU time of the main thread: how long others run meanwhile does not count."""
    for _ in range(WARM):
        step()
    times = []
    for _ in range(COUNTED):
        began = time.thread_time_ns()
        step()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1e3


def main() -> None:
    """One kind after the other, all ranks together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: median_us(make()) for name, make in KINDS.items()}
    dist.barrier()
    folder = Path(sys.argv[sys.argv.index("--out") + 1])
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
