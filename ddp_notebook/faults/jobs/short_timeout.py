"""Rank 1 joins after five seconds; rank 0 stops waiting after three, the others would wait."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank = int(os.environ["RANK"])
timeout = timedelta(seconds=3 if FAULTY and rank == 0 else 60)

if FAULTY and rank == 1:
    time.sleep(5)

dist.init_process_group("gloo", timeout=timeout)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
