"""Rank 1 computes at the lowest priority before it calls init_process_group."""

import os
import time

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"


def compute(seconds: float) -> None:
    """Use the CPU, for as long as it is given."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


if FAULTY and os.environ["RANK"] == "1":
    compute(float(os.environ.get("DDP_FAULT_SECONDS", "6")))

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
