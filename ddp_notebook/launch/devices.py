"""Which GPUs there are, and which rank gets which: decided before any rank starts.

NVIDIA's driver is queried through NVML, so that neither the notebook nor the fork server
initializes CUDA: such a process could not fork ranks that use CUDA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import counted


@dataclass(frozen=True)
class DevicePlan:
    """Which device and backend the ranks get."""

    backend: str
    devices: tuple[str, ...]
    """Per rank: ``cpu``, or ``cuda:1``, the number among the GPUs that every rank sees."""
    gpus: tuple[str, ...] = ()
    """Per rank: its GPU, as the user or the driver names it; nothing on CPUs."""
    environment: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    shared: bool = False
    """Ranks share GPUs by NCCL, each as a host of its own."""

    @property
    def device(self) -> str:
        """Return cpu, or cuda: in a rank, its own GPU."""
        return self.devices[0].partition(":")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Return each rank's device for the board: ``cpu``, ``cuda:1 (GPU 3)``."""
        named = [f"{at} (GPU {gpu})" for at, gpu in zip(self.devices, self.gpus, strict=False)]
        return tuple(named) or self.devices

    def of_script(self, rank: int, index: int, count: int) -> dict[str, str]:
        """Return what `rank` has besides torchrun's variables, as rank `index` of a script's.

        Where ranks share GPUs by NCCL each is a host of its own there too: the first of its ranks,
        and it sees its GPU alone. So `set_device(LOCAL_RANK)` finds that.
        """
        if not self.shared:
            return {}
        own = self.environment[rank].items()
        return {
            **{name: value for name, value in own if name.startswith("NCCL_")},
            "CUDA_VISIBLE_DEVICES": self.gpus[rank],
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(index),
            "GROUP_WORLD_SIZE": str(count),
        }

    def of_one_process(self) -> dict[str, str]:
        """Return what a script has that starts its ranks itself: they are of one host to NCCL.

        NCCL lets ranks of one host share a GPU from release 2.30 on; earlier ones refuse it.
        """
        return {**_SHARING, "NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.shared else {}


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
    import pynvml as nvml  # takes 50 ms, and only starting ranks needs it

    found = []
    try:
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                used_bytes = total_bytes = 0
                with contextlib.suppress(nvml.NVMLError):  # where it shares the system's memory
                    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                    used_bytes, total_bytes = memory.used, memory.total
                uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
                found.append(Gpu(str(index), uuid, name, used_bytes, total_bytes))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:  # no driver, or not reported
        return ()
    return tuple(found)


def visible_gpus(known: Sequence[Gpu] | None = None) -> tuple[str, ...]:
    """The GPUs that ranks may use: indices or UUIDs from CUDA_VISIBLE_DEVICES, else all indices.

    None where there is no driver, whatever CUDA_VISIBLE_DEVICES says. CUDA ends the list at the
    first word that names no GPU: ``0,-1,1`` is GPU 0, ``none`` is no GPU. `known` is what `gpus`
    gave earlier: to open the driver can take longer than a second.
    """
    chosen, known = os.environ.get("CUDA_VISIBLE_DEVICES"), gpus() if known is None else known
    if chosen is None:
        return tuple(gpu.index for gpu in known)
    # NVIDIA's driver, even where NVML reports no GPU; AMD's; WSL's.
    drivers = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")
    if not known and not any(map(os.path.exists, drivers)):
        return ()  # it was set for another machine

    def is_gpu(word: str) -> bool:
        if word.isdecimal():
            return not known or int(word) < len(known)
        return word.startswith(("GPU-", "MIG-"))

    words = list(takewhile(is_gpu, (word.strip() for word in chosen.split(","))))
    # Of parts of GPUs (MIG) a process sees one only.
    end = next((number for number, word in enumerate(words, 1) if word.startswith("MIG-")), None)
    return tuple(dict.fromkeys(words[:end]))


def torch_is_for_gpus() -> bool:
    """Return whether the installed torch was built for GPUs, without importing it; True if unknown.

    Its version.py says so: ``cuda: Optional[str] = None``.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return True
    said = re.findall(r"^(?:cuda|hip)\b.*=\s*(\S+)", text, re.MULTILINE)
    return not said or any(word != "None" for word in said)


def plan_devices(
    world_size: int,
    device: str,
    backend: str,
    gpus: Sequence[str],
    available: Sequence[str],
    *,
    share_gpu: bool = False,
    for_gpus: bool = True,
) -> DevicePlan:
    """Decide device and backend; `notes` explain unexpected choices.

    `device` is auto, cpu or cuda; `backend` auto, gloo or nccl; `gpus` what the user listed,
    `available` the existing GPUs; with `share_gpu` ranks may share one by NCCL; `for_gpus` says
    whether torch was built for them. Raises UsageMistake for options that cannot work.
    """
    init = f"%ddp_init --world-size {world_size}"
    _check_asked(init, device, backend, gpus, available, share_gpu=share_gpu)
    pool = list(gpus or available)
    missing = "none is visible here (nvidia-smi and CUDA_VISIBLE_DEVICES)"
    if pool and not for_gpus:
        pool, missing = [], "torch was built without CUDA here (pytorch.org has both)"
    listed = bool(gpus) and device != "cpu"
    if (device == "cuda" or backend == "nccl" or share_gpu or listed) and not pool:
        asked = "--gpus" if listed and device != "cuda" else "--device cuda"
        asked = "--share-gpu" if share_gpu else asked
        asked = "--backend nccl" if backend == "nccl" else asked
        raise UsageMistake(
            f"{asked} needs GPUs, and {missing}. The ranks can run on CPUs: {init} --backend gloo"
        )
    if device == "cpu" or not pool:
        why = "No GPU is visible" if not available else "torch was built without CUDA"
        note = "" if device == "cpu" else f"{why}: the ranks run on CPUs, with gloo."
        none: tuple[dict[str, str], ...] = tuple({} for _ in range(world_size))
        return DevicePlan("gloo", ("cpu",) * world_size, (), none, (note,) if note else ())
    pins = [pool[rank % len(pool)] for rank in range(world_size)]
    distinct = len(set(pins))
    have = counted(distinct, "GPU")
    if distinct == world_size or share_gpu:
        # The device of a tensor decides which of the two carries it.
        chosen = "cpu:gloo,cuda:nccl" if backend == "auto" else backend
        use = "share" if distinct < world_size else "use"
        note = (
            f"{world_size} ranks {use} {have} by NCCL, over sockets: the times mean nothing. In a "
            "script each has LOCAL_RANK 0, as on a host of its own."
        )
        return _on_gpus(chosen, pool, pins, (note,) if share_gpu else (), apart=share_gpu)
    if backend == "nccl":
        raise UsageMistake(
            f"{world_size} ranks but {have}: NCCL needs a GPU of its own for every rank. "
            f"Type %ddp_init --world-size {distinct} --backend nccl; to share, --share-gpu with "
            "NCCL, or --backend gloo."
        )
    note = (
        f"{world_size} ranks share {have}, so the backend is gloo: NCCL needs one GPU per rank. "
        f"NCCL all the same: {init} --share-gpu. On CPUs: {init} --device cpu"
    )
    return _on_gpus("gloo", pool, pins, (note,))


def _check_asked(
    init: str,
    device: str,
    backend: str,
    gpus: Sequence[str],
    available: Sequence[str],
    *,
    share_gpu: bool,
) -> None:
    """Raise UsageMistake for options that contradict each other, or name a GPU that is not here."""
    unknown = [gpu for gpu in gpus if gpu not in available]
    if unknown:
        there = ", ".join(available) if available else "none"
        raise UsageMistake(
            f"--gpus names GPU {unknown[0]}, but the GPUs here are: {there}. "
            + ("Leave --gpus out." if not available else f"Try --gpus {','.join(available)}")
        )
    if device == "cpu" and (backend == "nccl" or share_gpu):
        asked = "--backend nccl" if backend == "nccl" else "--share-gpu"
        raise UsageMistake(
            f"NCCL moves data between GPUs only, so {asked} does not go with --device cpu. "
            f"Type: {init} --backend gloo --device cpu"
        )
    if share_gpu and backend == "gloo":
        raise UsageMistake(
            "--share-gpu is for NCCL; with gloo, ranks share a GPU without it. "
            f"Type: {init} --backend gloo --device cuda"
        )


_OF_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    "NCCL_SET_THREAD_NAME": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Variables of ranks, unless the user has set them: torch's watchdog does not end a rank whose GPU
fails or hangs, which the user is looking at; NCCL's threads have names that distinguish them; CUDA
numbers GPUs as nvidia-smi and the board do."""

_SHARING = {
    "NCCL_NET": "Socket",
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_RAS_ENABLE"), "0"),
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""NCCL refuses two ranks on one GPU of one host; with an NCCL_HOSTID each, ranks are hosts of their
own to it. Then all that goes past the network is off, and few blocks of a GPU are taken, so that
the kernels of all ranks fit there at once: each waits for the others' while it runs."""


def _on_gpus(
    backend: str,
    pool: Sequence[str],
    pins: Sequence[str],
    notes: tuple[str, ...],
    *,
    apart: bool = False,
) -> DevicePlan:
    # Every rank sees all GPUs, as under torchrun: `model.to(rank)`, `device_ids=[rank]` and
    # `set_device(LOCAL_RANK)` mean in a cell what they mean in a script.
    visible = list(dict.fromkeys(pool))
    common = {**_OF_NCCL, **(_SHARING if apart else {})}
    common = {name: os.environ.get(name, value) for name, value in common.items()}
    common["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    hosts = [{"NCCL_HOSTID": f"ddp-rank-{rank}"} if apart else {} for rank in range(len(pins))]
    return DevicePlan(
        backend=backend,
        devices=tuple(f"cuda:{visible.index(gpu)}" for gpu in pins),
        gpus=tuple(pins),
        environment=tuple({**common, **host} for host in hosts),
        notes=notes,
        shared=apart,
    )
