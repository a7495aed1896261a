"""The checks of GPUs, functions of facts as in `checks`: what is visible, full, or divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.doctor.checks import SHARED_MEMORY, as_init_says
from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.devices import Gpu, plan_devices
from ddp_notebook.launch.gpu_links import Links
from ddp_notebook.launch.gpu_use import process_name
from ddp_notebook.model import agree, counted, format_bytes
from ddp_notebook.model.doctor import Check

_HIDING = ("", "-1", "none", "NoDevFiles", "void")
"""Words in CUDA_VISIBLE_DEVICES that name no GPU, and are written to hide them."""


def check_visible_devices(value: str | None, gpus: Sequence[Gpu], usable: int | None) -> Check:
    """CUDA_VISIBLE_DEVICES, if it is set, names GPUs that exist, each once, and ends with them.

    `usable` is how many torch can use, None where it was not asked. `gpus` may be empty although
    torch can use some: a container may lack the driver's management library.
    """
    # https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html:
    # the list ends at the first word that names no GPU, and of parts of GPUs one is seen.
    name = "CUDA_VISIBLE_DEVICES"
    if value is None:
        return Check.ok(name, "not set: all GPUs, if there are any")
    words = [part.strip() for part in value.split(",")]
    if all(word in _HIDING for word in words):
        return Check.ok(name, f"{value!r} hides all GPUs")
    indices = _indices(gpus) or "none"
    remedy = f"Name each GPU once, of those there are ({indices}), or unset it."
    # An index and a UUID may name the same GPU twice.
    meant = [_index(word, gpus) or word for word in words]
    twice = sorted(word for word in meant if meant.count(word) > 1 and word not in _HIDING)
    if twice:
        return Check.failure(
            name, f"{value} names GPU {twice[0]} twice: CUDA then finds no GPU", remedy
        )
    number, word = next(
        ((n, w) for n, w in enumerate(words) if w in _HIDING or not _index(w, gpus)),
        (len(words), ""),
    )
    part = next((w for w in words[: len(words) - 1] if w.startswith("MIG-")), "")
    later = next((w for w in words[number:] if w not in _HIDING), "")
    if part:
        found = f"{value}: a CUDA process sees only the first of these parts (MIG)"
        return Check.warning(name, found, f"Name that one: export {name}={part}")
    if word in _HIDING and later:
        found = f"{value}: CUDA ends the list at {word!r}, and does not see {later}"
        return Check.warning(name, found, remedy)
    if later and (gpus or usable == 0):
        return Check.failure(
            name,
            f"{value} names GPU {word}, but there is: {indices}; CUDA ignores it and all after it",
            remedy,
        )
    return Check.ok(name, value)


def _index(word: str, gpus: Sequence[Gpu]) -> str:
    """Return the index of the GPU that a word names, the word for a part of one, else nothing."""
    if word.startswith("MIG-"):  # parts are not listed
        return word
    by_uuid = word.startswith("GPU-")  # its beginning is enough
    found = (g.index for g in gpus if word == g.index or (by_uuid and g.uuid.startswith(word)))
    return next(found, "")


def check_devices(
    world_size: int, backend: str, pool: Sequence[str], facts: Mapping[str, Any]
) -> Check:
    """Which rank would get which device. `pool` is the GPUs for ranks, `facts` is torch's."""
    name = "devices"
    try:
        for_gpus = not facts.get("torch") or bool(facts.get("cuda_build"))
        plan = plan_devices(world_size, "auto", backend, (), pool, for_gpus=for_gpus)
    except UsageMistake as mistake:
        return as_init_says(name, str(mistake), "")
    if plan.device == "cpu":
        found = f"{counted(world_size, 'rank')} on CPUs with gloo: "
        if not pool:
            return Check.ok(name, f"{found}no GPU is visible")
        return Check.warning(
            name,
            f"{found}torch {facts['torch']} was built without CUDA, and there "
            f"{agree(pool, 'is', 'are')} {counted(len(pool), 'GPU')}",
            "To use GPUs, install torch for CUDA from pytorch.org",
        )
    if facts.get("torch") and facts.get("devices") == 0:  # without torch another check says so
        why = facts.get("cuda_error") or "it finds none"
        return Check.failure(
            name,
            f"ranks would be given GPUs, and torch cannot use one ({why})",
            f"Ranks on CPUs: %ddp_init --world-size {world_size} --device cpu",
        )
    shown = ", ".join(f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(plan.gpus))
    return Check.ok(name, f"{shown}; {plan.backend}")


def check_gpus(gpus: Sequence[Gpu], links: Links, ranks: Mapping[int, int]) -> tuple[Check, ...]:
    """The GPUs have free memory; who uses them is said. `ranks` maps pids to ranks."""
    if not gpus:
        return ()
    # The driver of a container may hide how much each process uses.
    held = {
        state.gpu: ", ".join(
            f"{process_name(pid, ranks)} {format_bytes(size) if size else ''}".rstrip()
            for pid, size in state.users
        )
        for state in links.states
        if state.users
    }
    full = [g for g in gpus if g.total_bytes - g.used_bytes < 0.1 * g.total_bytes]
    if not full:
        by = "".join(f"; GPU {gpu}: {users}" for gpu, users in held.items())
        return (Check.ok("GPU memory", f"GPU {_indices(gpus)}: enough is free{by}"),)
    used, total = format_bytes(full[0].used_bytes), format_bytes(full[0].total_bytes)
    free = _indices([gpu for gpu in gpus if gpu not in full]).replace(" ", "")
    by = f" by {held[full[0].index]}" if full[0].index in held else ""
    remedy = "nvidia-smi shows which process uses it. Leave it out: %ddp_init --gpus "
    found = f"GPU {_indices(full)} nearly full: {used} of {total} in use{by}"
    return (Check.warning("GPU memory", found, remedy + (free or "…")),)


def check_driver(links: Links, cuda_build: str) -> tuple[Check, ...]:
    """The driver supports torch's CUDA, `cuda_build`."""
    if not links.states:
        return ()
    found = f"{links.driver or 'unknown'}, for CUDA {links.cuda or '?'} and older"
    # Within one major version a newer CUDA works with an older driver.
    build, most = (int(f"0{text.partition('.')[0]}") for text in (cuda_build, links.cuda))
    if most and build > most:
        remedy = "Install a newer driver, or a torch that was built for an older CUDA"
        found = f"{found}: torch was built for CUDA {cuda_build}"
        return (Check.warning("GPU driver", found, remedy),)
    if any(state.persistent is False for state in links.states):
        # https://docs.nvidia.com/deploy/driver-persistence/
        found += "; persistence mode is off: the first use of idle GPUs takes seconds"
    return (Check.ok("GPU driver", found),)


def check_gpu_faults(links: Links) -> tuple[Check, ...]:
    """No GPU is divided, or has memory errors; nothing is said of sound ones."""
    parts = [state.gpu for state in links.states if state.parts]
    found = f"GPU {', '.join(parts)} divided (MIG): all its ranks share the first part"
    remedy = "One rank for one part (nvidia-smi -L): export CUDA_VISIBLE_DEVICES=MIG-…. "
    remedy += f"Undivided, while idle: sudo nvidia-smi -i {','.join(parts)} -mig 0"
    made = [Check.warning("GPU parts", found, remedy)] if parts else []
    made += [
        Check.warning(
            f"GPU {state.gpu} errors",
            f"{state.memory_errors} uncorrected errors of its memory (ECC)",
            "See nvidia-smi -q -d ECC. Leave it out: %ddp_init --gpus; a reset may help",
        )
        for state in links.states
        if state.memory_errors
    ]
    return tuple(made)


def check_gpu_links(links: Links) -> tuple[Check, ...]:
    """Say what joins the GPUs, and which may not read each other's memory: facts, no fault."""
    if not links.text:
        return ()
    found = f"GPU {', '.join(state.gpu for state in links.states)}: {links.text}"
    refused = [pair.gpus for pair in links.pairs if pair.direct is False]
    if refused:
        first, others = " and ".join(refused[0]), len(refused) - 1
        more = f" and {counted(others, 'pair')} more" if others else ""
        found += (
            f"; no direct access (P2P) between {first}{more}: NCCL goes through {SHARED_MEMORY}"
        )
    return (Check.ok("GPU links", found),)


def check_infiniband(
    ports: Mapping[str, tuple[str, str]], environment: Mapping[str, str]
) -> tuple[Check, ...]:
    """NCCL between hosts can use InfiniBand, where there is any. `ports`: state and rate of each.

    As in /sys/class/infiniband: ``4: ACTIVE``, ``400 Gb/sec (4X NDR)``.
    """
    if not ports:
        return ()
    active = {port: rate for port, (state, rate) in ports.items() if "ACTIVE" in state}
    shown = ", ".join(f"{port} {rate}" for port, rate in active.items())
    off = environment.get("NCCL_IB_DISABLE", "").strip() not in ("", "0")
    if active and not off:
        return (Check.ok("InfiniBand", shown),)
    why = "NCCL_IB_DISABLE is set" if active else f"no port of {', '.join(ports)} is active"
    remedy = "Unset NCCL_IB_DISABLE" if active else "ibstat shows why"
    found = f"{why}: between hosts NCCL uses sockets"
    return (Check.warning("InfiniBand", found, f"{remedy}; on one host it does not matter"),)


def _indices(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.index for gpu in gpus)
