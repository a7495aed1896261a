"""An earlier run was killed and left its file; this run uses the same one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(os.environ.get("DDP_FAULT_FOLDER") or tempfile.gettempdir())
rendezvous = folder / "rendezvous"
ready = rendezvous.with_suffix(".ready")
EARLIER_RUN = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
store = dist.FileStore(sys.argv[1], 2)
address = bytearray(store.get("default_pg/0//cpu//0/0"))
start = address.find(bytes([127, 0, 0, 1]))
if start > 1:
    address[start - 2 : start] = bytes([0, 1])  # a port where no process listens
address = bytes(address)
for rank in range(int(sys.argv[2])):
    store.set(f"default_pg/0//cpu//0/{rank}", address)
os._exit(1)  # as if killed: the file stays
"""

if rank == 0:
    if FAULTY:
        command = [sys.executable, "-c", EARLIER_RUN, str(rendezvous), str(world_size)]
        subprocess.run(command, check=False)
    ready.touch()
while not ready.exists():
    time.sleep(0.05)

dist.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
if rank == 0:
    ready.unlink(missing_ok=True)
    rendezvous.unlink(missing_ok=True)
