"""Rank 1 waits for a file that rank 0 writes too late: after a call that waits for rank 1."""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank = int(os.environ["RANK"])
folder = Path(os.environ.get("DDP_FAULT_FOLDER") or tempfile.gettempdir())
ready = folder / "dataset.ready"

if rank == 0 and not FAULTY:
    ready.touch()
if rank == 1:
    while not ready.exists():
        time.sleep(0.05)

dist.init_process_group("gloo")
if rank == 0:
    ready.touch()
dist.all_reduce(torch.ones(1))
if rank == 0:
    ready.unlink()
dist.destroy_process_group()
