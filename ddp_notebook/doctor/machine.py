"""Checks of the machine: memory, cores, GPUs, and what `%ddp_init` would refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.devices import Gpu, plan_devices
from ddp_notebook.model import agree, counted, format_bytes
from ddp_notebook.model.doctor import Check, Verdict
from ddp_notebook.session.preflight import RANK_BYTES, why_too_little_memory

_MIB = 2**20

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # looked at, not written to


def as_init_says(name: str, why: str, fine: str, verdict: Verdict = Verdict.FAILURE) -> Check:
    """Return the words in which `%ddp_init` refuses or fails, as a check; `fine` without any."""
    if why:
        found, _, remedy = why.partition(". ")
        return Check(name, verdict, found, remedy)
    return Check.ok(name, fine)


def check_memory(world_size: int, left_bytes: int) -> Check:
    """Memory for the ranks, of which `left_bytes` are left."""
    name = "memory"
    found = f"{format_bytes(left_bytes)} available"
    why = why_too_little_memory(world_size, left_bytes)
    if why or left_bytes >= world_size * RANK_BYTES:
        return as_init_says(name, why, found)
    needed = f"{counted(world_size, 'rank')} with a small model take about "
    fits = max(1, left_bytes // RANK_BYTES)
    remedy = "Free memory (%ddp_shutdown in other notebooks, idle kernels)"
    remedy += f", or start fewer ranks: -n {fits}" if fits < world_size else ", or add memory."
    found = f"{found}; {needed}{format_bytes(world_size * RANK_BYTES)}"
    return Check.warning(name, found, remedy)


def check_shared_memory(size: tuple[int, int] | None, nccl_wanted: bool) -> Check:
    """The shared memory of Linux, as (total, free) bytes; None where it is missing.

    DataLoader workers and NCCL pass data through it; gloo does not.
    """
    name = SHARED_MEMORY
    more = "In Docker: docker run --shm-size=2g, or --ipc=host. Otherwise: sudo mount -o "
    more += "remount,size=2g /dev/shm"
    if size is None:
        return Check.warning(
            name,
            "missing: DataLoader workers cannot start",
            "sudo mount -t tmpfs tmpfs /dev/shm",
        )
    total, free = size
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < 32 * _MIB and nccl_wanted:
        return Check.failure(
            name, f"{found}: NCCL needs more", f"{more}. What fills it: ls /dev/shm"
        )
    if free < 32 * _MIB <= total:
        return Check.warning(
            name,
            f"{found}: DataLoader workers will crash",
            "See what fills it: ls /dev/shm",
        )
    if total < 256 * _MIB:
        return Check.warning(name, f"{found}: too little for DataLoader workers", more)
    return Check.ok(name, found)


def check_cores(cores: int, world_size: int, asked: int, omp_num_threads: str | None) -> Check:
    """Cores for the threads of all ranks. `asked` is --threads-per-rank, 0 for the default.

    OMP_NUM_THREADS matters for scripts that are started here; %ddp_init sets it for its ranks.
    """
    name = "cores"
    if world_size > cores:
        return Check.warning(
            name,
            f"{world_size} ranks share {cores}: fine for learning, but timings say little",
            f"For timings: -n {cores}",
        )
    first = (omp_num_threads or "").partition(",")[0].strip()  # OpenMP allows a list
    threads = asked or (int(first) if first.isdecimal() else 1)
    if world_size * threads > cores:
        whose = "--threads-per-rank" if asked else "OMP_NUM_THREADS"
        found = f"{world_size} ranks × {threads} threads ({whose}) on {cores}: they slow each "
        found += "other down"
        return Check.warning(
            name, found, f"Use {cores // world_size} threads a rank, as %ddp_init does by default."
        )
    return Check.ok(name, f"{cores} for {counted(world_size, 'rank')}")


# --------------------------------------------------------------------------- GPUs


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
    indices = _indices(gpus) or "none"
    remedy = f"Name each GPU once, of those there are ({indices}), or unset it."
    indexed = [_find(part, gpus) for part in named]
    meant = [index or part for index, part in zip(indexed, named, strict=True)]
    twice = sorted(part for part in meant if meant.count(part) > 1)
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
    """Return the index of the GPU that `named` means: an index, or the beginning of a UUID."""
    if named.startswith("MIG-"):
        return named  # a part of a GPU, which is not listed
    for gpu in gpus:
        if named == gpu.index or (named.startswith("GPU-") and gpu.uuid.startswith(named)):
            return gpu.index
    return None


def check_devices(
    world_size: int, backend: str, pool: Sequence[str], facts: Mapping[str, Any]
) -> Check:
    """Which rank would get which device. `pool` is the GPUs for ranks, `facts` is torch's."""
    name = "devices"
    try:
        plan = plan_devices(world_size, "auto", backend, (), pool)
    except UsageMistake as mistake:
        return as_init_says(name, str(mistake), "")
    if plan.device == "cpu":
        have = counted(len(pool), "GPU")
        why = f"there {agree(pool, 'is', 'are')} {have}" if pool else "no GPU is visible"
        return Check.ok(name, f"{counted(world_size, 'rank')} on CPUs with gloo: {why}")
    if trouble := _torch_trouble(facts):
        on_cpus = f"%ddp_init --world-size {world_size} --device cpu"
        return Check.failure(
            name,
            f"ranks would be given GPUs, and {trouble}",
            f"Ranks on CPUs: {on_cpus}. For GPUs: install torch for CUDA from pytorch.org",
        )
    shown = ", ".join(f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(pool[:world_size]))
    return Check.ok(name, f"{shown}; {plan.backend}")


def _torch_trouble(facts: Mapping[str, Any]) -> str:
    """Return why this torch cannot use the GPUs; empty when it can, or when that is not known."""
    if not facts.get("torch"):
        return ""  # another check says so
    if not facts.get("cuda_build"):
        return f"torch {facts['torch']} was built without CUDA"
    if facts.get("devices") == 0:
        return f"torch cannot use one ({facts.get('cuda_error') or 'it finds none'})"
    return ""


def check_gpus(gpus: Sequence[Gpu]) -> tuple[Check, ...]:
    """The GPUs have free memory."""
    if not gpus:
        return ()
    full = [g for g in gpus if g.total_bytes - g.used_bytes < 0.1 * g.total_bytes]
    if not full:
        return (Check.ok("GPU memory", f"GPU {_indices(gpus)}: there is room"),)
    used, total = format_bytes(full[0].used_bytes), format_bytes(full[0].total_bytes)
    free = _indices([gpu for gpu in gpus if gpu not in full]).replace(" ", "")
    remedy = "nvidia-smi shows which process uses it. Leave it out: %ddp_init --gpus "
    found = f"GPU {_indices(full)} nearly full: {used} of {total} in use"
    return (Check.warning("GPU memory", found, remedy + (free or "…")),)


def _indices(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.index for gpu in gpus)
