"""Rank 1 has another torch, simulated: it says so, and writes keys that no rank reads."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
version = torch.__version__
keys = "now"
if FAULTY and rank == 1:
    torch.__version__ = "1.13.0"
    keys = "then"

try:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timedelta(minutes=30),
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(keys, store), rank=rank, world_size=world_size
    )
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
finally:
    torch.__version__ = version
