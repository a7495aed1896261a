"""Rank 1 may not write the file through which the ranks find each other."""

import os
import tempfile
from pathlib import Path

import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(tempfile.gettempdir()) / f"rendezvous-{os.environ['MASTER_PORT']}"
rendezvous = folder / "file"


def check(path: Path) -> None:
    """Raises OSError when this rank cannot write there, as a careful script checks first."""
    with path.open("ab"):
        pass


folder.mkdir(exist_ok=True)
if FAULTY and rank == 1:
    rendezvous = Path("/proc/1/environ")  # what no process may append to
check(rendezvous)
dist.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
)
dist.destroy_process_group()
