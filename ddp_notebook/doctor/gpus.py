"""Checks of GPUs: which there are, and whether ranks can have them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_notebook.launch.devices import Gpu, plan_devices
from ddp_notebook.model import agree, counted, format_bytes
from ddp_notebook.model.doctor import Check

_LITTLE_FREE = 0.1
"""Less than this share of a GPU's memory free: another process uses it."""


def check_visible_devices(value: str | None, gpus: Sequence[Gpu], usable: int | None) -> Check:
    """CUDA_VISIBLE_DEVICES, if it is set, names GPUs that exist, each once.

    `usable` is how many torch can use, None where it was not asked. `gpus` may be empty although
    torch can use some: a container may lack the driver's management library.
    """
    name = "CUDA_VISIBLE_DEVICES"
    if value is None:
        return Check.ok(name, "not set: all GPUs, if there are any")
    named = [part.strip() for part in value.split(",") if part.strip() not in ("", "-1")]
    if not named:
        return Check.ok(name, f"{value!r} hides all GPUs")
    indices = ", ".join(gpu.index for gpu in gpus) or "none"
    remedy = f"Name each GPU once, of those there are ({indices}), or unset it."
    indexed = [_find(part, gpus) for part in named]
    twice = sorted(_repeated([index for index in indexed if index]) or _repeated(named))
    if twice:
        return Check.failure(
            name, f"{value} names GPU {twice[0]} twice: CUDA then has none", remedy
        )
    unknown = [part for part, gpu in zip(named, indexed, strict=True) if gpu is None]
    if unknown and (gpus or usable == 0):
        return Check.failure(
            name,
            f"{value} names GPU {unknown[0]}, but there is: {indices}; CUDA ignores it and all "
            "after it",
            remedy,
        )
    return Check.ok(name, value)


def _find(named: str, gpus: Sequence[Gpu]) -> str | None:
    """The index of the GPU that `named` means: an index, or the beginning of a UUID."""
    if named.startswith("MIG-"):
        return named  # a part of a GPU, which is not listed
    for gpu in gpus:
        if named == gpu.index or (named.startswith("GPU-") and gpu.uuid.startswith(named)):
            return gpu.index
    return None


def _repeated(named: Sequence[str]) -> set[str]:
    return {part for part in named if named.count(part) > 1}


def check_devices(
    world_size: int, backend: str, pool: Sequence[str], facts: Mapping[str, Any]
) -> Check:
    """Which rank would get which device. `pool` is the GPUs for ranks, `facts` is torch's."""
    name = "devices"
    trouble = _torch_trouble(facts) if pool else ""
    on_cpus = f"%ddp_init --world-size {world_size} --device cpu"
    if backend == "nccl" and len(pool) < world_size:
        return _too_few_for_nccl(name, world_size, len(pool), on_cpus)
    plan = plan_devices(world_size, "auto", backend, (), pool)
    on_gpus = plan.device != "cpu"
    if trouble and on_gpus:
        return Check.failure(
            name,
            f"ranks would be given GPUs, and {trouble}",
            f"Ranks on CPUs: {on_cpus}. For GPUs: install torch for CUDA from pytorch.org",
        )
    if not on_gpus:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        have = counted(len(pool), "GPU")
        why = f"there {agree(pool, 'is', 'are')} {have}" if pool else "no GPU is visible"
        return Check.ok(name, f"{ranks} on CPUs with gloo: {why}")
    shown = ", ".join(f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(pool[:world_size]))
    return Check.ok(name, f"{shown}; {plan.backend}")


def _too_few_for_nccl(name: str, world_size: int, gpus: int, on_cpus: str) -> Check:
    if not gpus:
        return Check.failure(
            name, "nccl needs a GPU per rank, and no GPU is visible", f"Use gloo: {on_cpus}"
        )
    return Check.failure(
        name,
        f"nccl needs a GPU per rank: {world_size} ranks, {gpus} GPU{'s' if gpus > 1 else ''}",
        f"%ddp_init --world-size {gpus} --backend nccl, or share GPUs with gloo: "
        f"%ddp_init --world-size {world_size} --device cuda",
    )


def _torch_trouble(facts: Mapping[str, Any]) -> str:
    """Why this torch cannot use the GPUs; empty when it can, or when that is not known."""
    if not facts.get("torch"):
        return ""  # another check says so
    if not facts.get("cuda_build"):
        return f"torch {facts['torch']} was built without CUDA"
    if facts.get("devices") == 0:
        return f"torch cannot use one ({facts.get('cuda_error') or 'it finds none'})"
    return ""


def check_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Check, ...]:
    """The GPUs have free memory, and CUDA numbers them as the driver does."""
    return tuple(_gpu_checks(gpus, environment)) if gpus else ()


def _gpu_checks(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Iterator[Check]:
    full = [g for g in gpus if g.total_bytes - g.used_bytes < _LITTLE_FREE * g.total_bytes]
    if full:
        first = full[0]
        yield Check.warning(
            "GPU memory",
            f"GPU {', '.join(gpu.index for gpu in full)} nearly full: "
            f"{format_bytes(first.used_bytes)} of {format_bytes(first.total_bytes)} in use",
            "nvidia-smi shows which process uses it. Leave it out: %ddp_init --gpus "
            + (",".join(gpu.index for gpu in gpus if gpu not in full) or "…"),
        )
    else:
        yield Check.ok("GPU memory", f"GPU {', '.join(gpu.index for gpu in gpus)}: there is room")
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield Check.warning(
            "GPU numbers",
            f"{', '.join(names)}: CUDA numbers the fastest 0, nvidia-smi by slot, so --gpus may "
            "mean another one than you expect",
            f"Before {sys.executable} starts: export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
