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
    """What is used of pynvml. A GPU is (uuid, name, used and total bytes, or None for unknown)."""

    NVMLError = NVMLError

    def __init__(self, gpus: Sequence[tuple[str, str, tuple[int, int] | None]] | None) -> None:
        self.gpus = gpus
        self.open = 0
        self.users: dict[int, list[tuple[int, int | None]]] = {}
        """Of a GPU: the processes that use it, and how many bytes of it."""
        self.answers: dict[str, Any] = {}
        """What else is answered, by the names of functions without ``nvml``: values, or functions
        of their arguments."""

    @staticmethod
    def unknown(*_: Any) -> None:
        """Answer as of what a GPU does not have."""
        raise NVMLError("Not supported")

    @staticmethod
    def field(value: int) -> Any:
        """A value of nvmlDeviceGetFieldValues."""
        return SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value))

    def __getattr__(self, name: str) -> Any:
        answer = self.__dict__.get("answers", {}).get(name.removeprefix("nvml"))
        if answer is None:
            raise AttributeError(name)
        return answer if callable(answer) else lambda *_: answer

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

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        assert self.gpus is not None
        found = [index for index, gpu in enumerate(self.gpus) if gpu[0] == uuid]
        if not found:
            raise NVMLError("Not found")
        return found[0]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.users.get(gpu, ())
        ]


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> FakeNvml:
    """Have `import pynvml` give `fake`."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake
