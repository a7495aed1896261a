"""On rank 1 a library has called init_process_group already."""

import os

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"


def a_library() -> None:
    """Sets up what it needs, and does not look whether it is there."""
    dist.init_process_group("gloo")


dist.init_process_group("gloo")
if FAULTY and os.environ["RANK"] == "1":
    a_library()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
