"""How much memory is free, and how much a training step needs."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import nn

from ddp_notebook.bench.steps.plan import Memory
from ddp_notebook.launch.out_of_memory import container_memory
from ddp_notebook.rank.bench.steps_data import Feed
from ddp_notebook.rank.bench.steps_models import Subject
from ddp_notebook.rank.training.inputs import tensors_in

_SHARE = 0.8
"""The share of free memory that training steps may use; the rest is for other programs."""


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on `device`; on a CPU, those of its host and the rank's container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available, limit = psutil.virtual_memory().available, container_memory()
    return int(available if limit is None else min(available, limit.left))


def allowed_bytes(device: torch.device, ranks: int) -> int:
    """Bytes that the training steps of one of `ranks` ranks on this host may take on `device`."""
    sharing = ranks if device.type == "cpu" else 1
    return int(free_bytes(device) * _SHARE / sharing)


def model_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    states = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in states)


def memory(subject: Subject, feed: Feed, ranks: int, smallest: int) -> Memory:
    """The memory that steps of `subject` need, from one forward with the smallest batch.

    It counts the tensors that the forward keeps for the backward, and the same again for their
    gradients. Raises what the model raises.
    """
    inputs = feed.batch(smallest)
    parameters = {parameter.data_ptr() for parameter in subject.module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        feed.run(subject.module, inputs)
    sample = (_bytes_of(inputs) + 2 * sum(saved.values())) / smallest
    # Gradients, DDP's buckets, and the same for the separate all_reduces.
    fixed = 3 * subject.gradient_bytes()
    return Memory(allowed_bytes(subject.device, ranks), fixed, sample)


def _bytes_of(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))
