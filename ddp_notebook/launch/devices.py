"""Which GPUs there are, and which rank gets which: decided before any rank starts.

Found through nvidia-smi, so that neither the notebook nor the fork server touches CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_notebook.errors import UsageMistake

_NVIDIA_SMI_TIMEOUT_S = 10


@dataclass(frozen=True)
class DevicePlan:
    """What the ranks run on."""

    device: str
    """cpu, or cuda:0: a rank sees its own GPU alone, so it is number 0 on every rank."""
    backend: str
    labels: tuple[str, ...]
    """Per rank, for the board: ``cpu``, ``cuda:0 (GPU 3)``."""
    environment: tuple[dict[str, str], ...]
    notes: tuple[str, ...]


def visible_gpus() -> tuple[str, ...]:
    """The GPUs a rank may be given: as CUDA_VISIBLE_DEVICES says, or nvidia-smi numbers them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    return tuple(line.strip() for line in nvidia_smi("index"))


def nvidia_smi(what: str) -> list[str]:
    """A line for each GPU with what is asked of it, sizes in MiB; none without nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        told = subprocess.run(
            [command, f"--query-gpu={what}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in told.stdout.splitlines() if line.strip()]


def plan_devices(
    world_size: int, device: str, backend: str, gpus: Sequence[str], available: Sequence[str]
) -> DevicePlan:
    """Decide device and backend, and say what was decided instead of what one might expect.

    `device` is auto, cpu or cuda; `backend` auto, gloo or nccl; `gpus` what the user
    listed, `available` what there is. Raises UsageMistake for what cannot be.
    """
    unknown = [gpu for gpu in gpus if gpu not in available]
    if unknown:
        there = ", ".join(available) if available else "none"
        raise UsageMistake(
            f"--gpus names GPU {unknown[0]}, but the GPUs here are: {there}. "
            + ("Leave --gpus out." if not available else f"Try --gpus {','.join(available)}")
        )
    pool = list(gpus or available)
    wants_cuda = device == "cuda" or backend == "nccl" or bool(gpus)
    if device == "cpu" and backend == "nccl":
        raise UsageMistake(
            "NCCL moves data between GPUs only, so --backend nccl cannot go with --device cpu. "
            f"Type: %ddp_init --world-size {world_size} --backend gloo --device cpu"
        )
    if wants_cuda and not pool:
        asked = "--backend nccl" if backend == "nccl" else "--device cuda"
        raise UsageMistake(
            f"{asked} needs GPUs, and none is visible here (nvidia-smi and CUDA_VISIBLE_DEVICES). "
            f"The ranks can run on CPUs: %ddp_init --world-size {world_size} --backend gloo"
        )
    if device == "cpu" or not pool:
        note = "" if device == "cpu" else "No GPU is visible: the ranks run on CPUs, with gloo."
        return _on_cpus(world_size, note)
    if world_size > len(pool):
        return _too_few_gpus(world_size, pool, wants_cuda, backend)
    chosen = "cpu:gloo,cuda:nccl" if backend == "auto" else backend
    return _on_gpus(chosen, pool[:world_size], ())


def _on_cpus(world_size: int, note: str) -> DevicePlan:
    return DevicePlan(
        device="cpu",
        backend="gloo",
        labels=("cpu",) * world_size,
        environment=tuple({} for _ in range(world_size)),
        notes=(note,) if note else (),
    )


def _on_gpus(backend: str, pins: Sequence[str], notes: tuple[str, ...]) -> DevicePlan:
    return DevicePlan(
        device="cuda:0",
        backend=backend,
        labels=tuple(f"cuda:0 (GPU {gpu})" for gpu in pins),
        environment=tuple({"CUDA_VISIBLE_DEVICES": gpu} for gpu in pins),
        notes=notes,
    )


def _too_few_gpus(
    world_size: int, pool: Sequence[str], wants_cuda: bool, backend: str
) -> DevicePlan:
    have = f"{len(pool)} GPU{'s' if len(pool) > 1 else ''}"
    if not wants_cuda:
        return _on_cpus(
            world_size,
            f"{world_size} ranks but {have}: the ranks run on CPUs, with gloo. "
            f"One rank per GPU: %ddp_init --world-size {len(pool)}. "
            f"Several ranks on a GPU: %ddp_init --world-size {world_size} --device cuda",
        )
    if backend == "nccl":
        raise UsageMistake(
            f"{world_size} ranks but {have}: NCCL wants a GPU of its own for every rank. "
            f"Type %ddp_init --world-size {len(pool)} --backend nccl, or --backend gloo to share."
        )
    pins = [pool[rank % len(pool)] for rank in range(world_size)]
    note = f"{world_size} ranks share {have}, so the backend is gloo: NCCL wants one GPU per rank."
    return _on_gpus("gloo", pins, (note,))
