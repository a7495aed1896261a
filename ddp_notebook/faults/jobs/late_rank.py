"""Rank 1 loads its data for ten seconds before it calls init_process_group."""

import os
import time

import torch
import torch.distributed as dist

FAULTY = os.environ.get("DDP_FAULT") == "1"


def load_the_data() -> None:
    time.sleep(float(os.environ.get("DDP_FAULT_SECONDS", "10")))


if FAULTY and os.environ["RANK"] == "1":
    load_the_data()

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
