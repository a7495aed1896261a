"""Rank 1 may not write the file through which the ranks find each other."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(os.environ.get("DDP_FAULT_FOLDER") or tempfile.gettempdir())
rendezvous = folder / "rendezvous"


def check(path: Path) -> None:
    """Raises OSError when this rank cannot write there, as a careful script checks first."""
    with path.open("ab"):
        pass


if FAULTY and rank == 1:
    rendezvous = Path("/proc/1/environ")  # what no process may append to
check(rendezvous)
dist.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
)
dist.all_reduce(torch.ones(1))  # no rank leaves while another still connects to it
dist.destroy_process_group()
