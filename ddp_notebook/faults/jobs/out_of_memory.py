"""Rank 0 has no memory left when DDP copies its parameters for the broadcast."""

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank = int(os.environ["RANK"])
LAYER = 4096  # 64 MiB of parameters


def leave_no_room(spare_bytes: int) -> tuple[int, int]:
    """Limit this process to what it has now, and a little; the limit before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + spare_bytes, before[1]))
    return before


dist.init_process_group("gloo")
model = torch.nn.Linear(LAYER, LAYER)
limit = leave_no_room(16 << 20) if FAULTY and rank == 0 else None
try:
    model = DDP(model)
finally:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, limit)
dist.destroy_process_group()
