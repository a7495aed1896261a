"""Rank 1 took the branch for "nothing to do" and never calls init_process_group."""

import os
import sys

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
if FAULTY and os.environ["RANK"] == "1":
    sys.exit()

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
