"""A stand-in for pynvml, NVIDIA's driver library: there is no GPU where these tests run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """As pynvml's: any failure of the library."""


class FakeNvml:
    """What is used of pynvml. A GPU is (uuid, name, used and total bytes, or None for unknown).

    `links` are the states of every GPU's NVLinks, `speed_mb_per_s` that of an active one.
    """

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(
        self,
        gpus: Sequence[tuple[str, str, tuple[int, int] | None]] | None,
        links: Sequence[int] = (),
        speed_mb_per_s: int | None = 26_562,
    ) -> None:
        self.gpus = gpus
        self.links = links
        self.speed_mb_per_s = speed_mb_per_s
        self.open = 0

    def nvmlInit(self) -> None:
        if self.gpus is None:
            raise NVMLError("Shared library not found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open and self.gpus is not None
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> int:
        if not address:
            raise NVMLError("Invalid argument")
        return 0

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        assert self.gpus is not None
        return self.gpus[gpu][0]

    def nvmlDeviceGetName(self, gpu: int) -> str:
        assert self.gpus is not None
        return self.gpus[gpu][1]

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        assert self.gpus is not None
        memory = self.gpus[gpu][2]
        if memory is None:
            raise NVMLError("Not supported")
        return SimpleNamespace(used=memory[0], total=memory[1])

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= len(self.links):
            raise NVMLError("Invalid argument")
        return self.links[link]

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: Sequence[int]) -> list[Any]:
        known = self.speed_mb_per_s is not None and list(fields) == [90]
        value = SimpleNamespace(uiVal=self.speed_mb_per_s)
        return [SimpleNamespace(nvmlReturn=0 if known else 3, value=value)]


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> FakeNvml:
    """Have `import pynvml` give `fake`."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake
