"""Which GPUs there are, and which rank gets which: decided before any rank starts.

NVIDIA's driver is queried through NVML, so that neither the notebook nor the fork server
initializes CUDA: such a process could not fork ranks that use CUDA.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import counted

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class DevicePlan:
    """Which device and backend the ranks get."""

    device: str
    """cpu, or cuda:0: each rank sees only its own GPU, so it is number 0 there."""
    backend: str
    labels: tuple[str, ...]
    """Per rank, for the board: ``cpu``, ``cuda:0 (GPU 3)``."""
    environment: tuple[dict[str, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, as NVIDIA's driver describes it."""

    index: str
    """Its number in the order of the PCI bus, as nvidia-smi shows it."""
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    """Size of its memory; 0 if the driver does not report it."""


def gpus() -> tuple[Gpu, ...]:
    """All GPUs, whatever CUDA_VISIBLE_DEVICES says; none without NVIDIA's driver."""
    return _ask_driver(_gpus, ())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that ranks may use: indices or UUIDs from CUDA_VISIBLE_DEVICES, else all indices.

    None where there is no driver, whatever CUDA_VISIBLE_DEVICES says.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        # NVIDIA's driver, even where NVML reports no GPU; AMD's; WSL's.
        drivers = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")
        if not any(map(os.path.exists, drivers)) and not gpus():
            return ()  # it was set for another machine
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    return tuple(gpu.index for gpu in gpus())


def _ask_driver(question: Callable[[Any], Answer], without_driver: Answer) -> Answer:
    """The answer to `question`, which gets NVML: the library of the driver behind nvidia-smi."""
    import pynvml  # takes 50 ms, and only starting ranks needs it

    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or not reported
        return without_driver


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used_bytes = total_bytes = 0
    with contextlib.suppress(nvml.NVMLError):  # where it shares the system's memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used_bytes, total_bytes = memory.used, memory.total
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return Gpu(str(index), uuid, name, used_bytes, total_bytes)


def plan_devices(
    world_size: int, device: str, backend: str, gpus: Sequence[str], available: Sequence[str]
) -> DevicePlan:
    """Decide device and backend; `notes` explain unexpected choices.

    `device` is auto, cpu or cuda; `backend` auto, gloo or nccl; `gpus` what the user listed,
    `available` the existing GPUs. Raises UsageMistake for options that cannot work.
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


_OF_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    "NCCL_SET_THREAD_NAME": "1",
}
"""Unless the user has set them: torch's watchdog does not end a rank whose GPU fails or hangs,
which the user is looking at, and NCCL's threads have names by which they are told from others."""


def _on_gpus(backend: str, pins: Sequence[str], notes: tuple[str, ...]) -> DevicePlan:
    of_nccl = {name: os.environ.get(name, value) for name, value in _OF_NCCL.items()}
    return DevicePlan(
        device="cuda:0",
        backend=backend,
        labels=tuple(f"cuda:0 (GPU {gpu})" for gpu in pins),
        environment=tuple({"CUDA_VISIBLE_DEVICES": gpu, **of_nccl} for gpu in pins),
        notes=notes,
    )


def _too_few_gpus(
    world_size: int, pool: Sequence[str], wants_cuda: bool, backend: str
) -> DevicePlan:
    have = counted(len(pool), "GPU")
    if not wants_cuda:
        return _on_cpus(
            world_size,
            f"{world_size} ranks but {have}: the ranks run on CPUs, with gloo. "
            f"One rank per GPU: %ddp_init --world-size {len(pool)}. "
            f"Several ranks on a GPU: %ddp_init --world-size {world_size} --device cuda",
        )
    if backend == "nccl":
        raise UsageMistake(
            f"{world_size} ranks but {have}: NCCL needs a GPU of its own for every rank. "
            f"Type %ddp_init --world-size {len(pool)} --backend nccl, or --backend gloo to share."
        )
    pins = [pool[rank % len(pool)] for rank in range(world_size)]
    note = f"{world_size} ranks share {have}, so the backend is gloo: NCCL needs one GPU per rank."
    return _on_gpus("gloo", pins, (note,))
