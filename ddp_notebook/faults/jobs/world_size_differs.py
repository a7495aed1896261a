"""Rank 0 counts one rank less than the others: setup succeeds, and the all_reduce hangs."""

import os

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if FAULTY and rank == 0:
    world_size -= 1

dist.init_process_group("gloo", rank=rank, world_size=world_size)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
