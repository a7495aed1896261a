"""What links a machine has, as the kernel and the NVIDIA driver report them.

Links that they do not report are left out. Bandwidths are those of one direction.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_notebook.launch.devices import nvlink_gb_per_s

_SYS = Path("/sys")
_ENCODED = {"2.5": 0.8, "5.0": 0.8, "5": 0.8}
"""The usable share of PCIe's raw rate at the older speeds (8b/10b); later 128b/130b."""
_NEW_ENCODED = 128 / 130


def links(device_type: str, pci_address: str, sys: Path = _SYS) -> list[dict[str, Any]]:
    """The links that the ranks may use: JSON objects as in `floors.measure`, without latency.

    For GPUs NVLink and PCIe; network cards if there are any.
    """
    known = []
    if device_type == "cuda":
        nvlink = nvlink_gb_per_s(pci_address)
        if nvlink:
            known.append(_link("NVLink", nvlink, "NVML (nvidia-smi nvlink --status)"))
        pcie = pcie_gb_per_s(sys / "bus" / "pci" / "devices" / pci_address.lower())
        if pci_address and pcie:
            known.append(_link("PCIe", pcie, f"/sys/bus/pci/devices/{pci_address.lower()}"))
    for name, speed, source in (*_infiniband(sys), *_ethernet(sys)):
        known.append(_link(name, speed, source))
    return known


def pcie_gb_per_s(device: Path) -> float:
    """The bandwidth of a device's PCIe link, from its files in /sys; 0 if not known."""
    with suppress(OSError, ValueError, IndexError):
        speed = (device / "current_link_speed").read_text().split()[0]
        width = int((device / "current_link_width").read_text())
        return float(speed) * width / 8 * _ENCODED.get(speed, _NEW_ENCODED)
    return 0.0


def _infiniband(sys: Path) -> list[tuple[str, float, str]]:
    """InfiniBand and RoCE ports, whose rate reads ``400 Gb/sec (4X NDR)``."""
    ports = []
    for rate in sorted((sys / "class" / "infiniband").glob("*/ports/*/rate")):
        with suppress(OSError, ValueError, IndexError):
            gigabits = float(rate.read_text().split()[0])
            ports.append((f"network card {rate.parts[-4]}", gigabits / 8, f"{rate}"))
    return ports


def _ethernet(sys: Path) -> list[tuple[str, float, str]]:
    """Physical Ethernet cards that are up; their speed is in megabits per second."""
    cards = []
    for card in sorted((sys / "class" / "net").glob("*")):
        with suppress(OSError, ValueError):
            if (card / "device").exists() and (card / "operstate").read_text().strip() == "up":
                megabits = float((card / "speed").read_text())
                if megabits > 0:
                    cards.append((f"network card {card.name}", megabits / 8e3, f"{card}/speed"))
    return cards


def _link(what: str, gb_per_s: float, source: str) -> dict[str, Any]:
    return {"what": what, "latency_us": 0.0, "bandwidth_gb_per_s": gb_per_s, "source": source}
