"""The state of GPUs and what joins them, by NVIDIA's driver (NVML): for the doctor and the bench.

A fact that a GPU, a driver or its library does not report is left out: nearly every question of
this kind is unsupported somewhere. From NVML's documentation, and never run on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.model import counted

_MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of the newest driver."""
_READS_PEER, _BY_NVLINK, _MAY = 0, 2, 0
"""NVML's numbers: two questions of nvmlDeviceGetP2PStatus, and the answer yes."""
_PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane of PCIe each way, by its generation: the rate less its line code."""
_PATHS = {
    0: "on one board",
    10: "through a PCIe switch (PIX)",
    20: "through PCIe switches (PXB)",
    30: "through a PCIe host bridge (PHB)",
    40: "through host bridges of a NUMA node (NODE)",
    50: "between NUMA nodes (SYS)",
}
"""How the PCIe buses of two GPUs meet, by NVML's level; the letters are nvidia-smi's."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU; 0 or None for a fact that the driver does not report."""

    gpu: str
    """Its index or UUID, as it was asked for."""
    links: int = 0
    """How many NVLinks are up."""
    link_gb_per_s: float = 0.0
    """The GB/s of one of them each way."""
    pcie: tuple[int, int] = (0, 0)
    """Generation and lanes of its PCIe slot, at most: an idle GPU uses less."""
    parts: bool = False
    """It is divided into parts (MIG)."""
    persistent: bool | None = None
    """The driver stays loaded while no process uses it."""
    memory_errors: int = 0
    """Errors of its memory that were not corrected (ECC), since the driver was loaded."""
    users: tuple[tuple[int, int], ...] = ()
    """The processes that compute there, and how many bytes each holds."""

    @property
    def by_nvlink_gb_per_s(self) -> float:
        """Return what all its NVLinks together carry each way."""
        return self.links * self.link_gb_per_s

    @property
    def by_pcie_gb_per_s(self) -> float:
        """Return what its PCIe slot carries each way."""
        generation, lanes = self.pcie
        return lanes * _PCIE_GB_PER_S.get(generation, 0.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """The links between two GPUs; None for a fact that the driver does not report."""

    gpus: tuple[str, str]
    path: int | None = None
    """NVML's level of the topology: see `_PATHS`."""
    direct: bool | None = None
    """Each may read the other's memory (P2P)."""
    nvlink: bool | None = None
    """NVLink joins them, directly or by a switch."""


@dataclass(frozen=True, slots=True)
class Links:
    """GPUs of one host, and what joins each two of them."""

    states: tuple[GpuState, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver supports: ``13.0``."""

    @property
    def limit_gb_per_s(self) -> float:
        """Return what the slowest GPU can send at most; 0.0 where that is not known.

        nccl-tests' bus bandwidth is to be compared with it. Where NVLink joins some pairs only, it
        depends on the order in which NCCL passes data on.
        """
        by = {pair.nvlink for pair in self.pairs}
        if len(by) != 1 or None in by:
            return 0.0
        if True in by:
            return min(state.by_nvlink_gb_per_s for state in self.states)
        return min(state.by_pcie_gb_per_s for state in self.states)

    @property
    def text(self) -> str:
        """Return what joins the GPUs in a clause; empty for fewer than two, or if not known."""
        linked = [pair for pair in self.pairs if pair.nvlink]
        if linked:
            link = min(self.states, key=lambda state: state.by_nvlink_gb_per_s)
            speed = f" of {link.link_gb_per_s:.3g} GB/s each way" if link.link_gb_per_s else ""
            which = "every two" if len(linked) == len(self.pairs) else f"{len(linked)} pairs"
            return f"NVLink joins {which} ({counted(link.links, 'link')}{speed} per GPU)"
        paths = [pair.path for pair in self.pairs if pair.path is not None]
        if not paths:
            return ""
        generation, lanes = min(self.states, key=lambda state: state.by_pcie_gb_per_s).pcie
        slot = f"PCIe {generation} x{lanes}" if lanes else "PCIe"
        return f"{slot}, {_PATHS.get(max(paths), 'by an unknown path')}"


def read(gpus: Sequence[str]) -> Links:
    """Return the state of `gpus`, indices or UUIDs, and what joins them; empty without a driver.

    To open the driver can take longer than a second.
    """
    import pynvml  # takes 50 ms, and only sessions on GPUs need it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Links()
    try:
        ask = functools.partial(_answer, pynvml)
        handles = {
            gpu: ask(None, "DeviceGetHandleByIndex", int(gpu))
            if gpu.isdecimal()
            else ask(None, "DeviceGetHandleByUUID", gpu)
            for gpu in dict.fromkeys(gpus)
        }
        known = {gpu: handle for gpu, handle in handles.items() if handle is not None}
        cuda = ask(0, "SystemGetCudaDriverVersion_v2")
        return Links(
            tuple(_state(ask, gpu, handle) for gpu, handle in known.items()),
            tuple(_pair(ask, *two) for two in itertools.combinations(known.items(), 2)),
            ask("", "SystemGetDriverVersion"),
            f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        )
    finally:
        pynvml.nvmlShutdown()


def _answer(nvml: Any, otherwise: Any, name: str, *arguments: Any) -> Any:
    """Return what the driver answers; `otherwise` where it, or this GPU, cannot be asked that."""
    try:
        return getattr(nvml, f"nvml{name}")(*arguments)
    except (nvml.NVMLError, AttributeError):  # AttributeError: another release of pynvml
        return otherwise


def _state(ask: Any, gpu: str, handle: Any) -> GpuState:
    # 90: NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, of one link each way.
    speeds = [each for each in ask((), "DeviceGetFieldValues", handle, [90]) if not each.nvmlReturn]
    persistent = ask(None, "DeviceGetPersistenceMode", handle)
    users = ask((), "DeviceGetComputeRunningProcesses", handle)
    pcie = (f"DeviceGetMaxPcieLink{what}" for what in ("Generation", "Width"))
    generation, lanes = (ask(0, name, handle) for name in pcie)
    return GpuState(
        gpu,
        sum(ask(0, "DeviceGetNvLinkState", handle, number) for number in range(_MOST_LINKS)),
        speeds[0].value.uiVal / 1000 if speeds else 0.0,
        (generation, lanes),
        ask((0, 0), "DeviceGetMigMode", handle)[0] == 1,
        None if persistent is None else bool(persistent),
        ask(0, "DeviceGetTotalEccErrors", handle, 1, 0),  # uncorrected ones, since the start
        tuple((user.pid, user.usedGpuMemory or 0) for user in users),
    )


def _pair(ask: Any, one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    (gpu, handle), (peer, peer_handle) = one, other
    reads = ask(None, "DeviceGetP2PStatus", handle, peer_handle, _READS_PEER)
    linked = ask(None, "DeviceGetP2PStatus", handle, peer_handle, _BY_NVLINK)
    return Pair(
        (gpu, peer),
        ask(None, "DeviceGetTopologyCommonAncestor", handle, peer_handle),
        None if reads is None else reads == _MAY,
        None if linked is None else linked == _MAY,
    )
