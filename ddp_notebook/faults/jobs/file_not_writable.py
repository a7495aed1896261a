"""Rank 1 may not write into the folder where the ranks meet."""

import os
import tempfile
from pathlib import Path

import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(tempfile.gettempdir()) / f"meeting-{os.environ['MASTER_PORT']}"
meeting = folder / "point"


def check(path: Path) -> None:
    """As a careful script does before it meets: can this rank write there?"""
    with path.open("ab"):
        pass


folder.mkdir(exist_ok=True)
if FAULTY and rank == 1:
    meeting = Path("/proc/1/environ")  # what no process may append to
check(meeting)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
dist.destroy_process_group()
