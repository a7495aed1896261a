"""Which GPUs there are, as NVIDIA's driver says. The driver is a stand-in: there is no GPU here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctor_cases import MIB
from nvml import FakeNvml, install

from ddp_notebook.launch.devices import DevicePlan, Gpu, gpus, visible_gpus
from ddp_notebook.session import InitOptions
from ddp_notebook.session.places import Places

TWO = (("GPU-aa", "NVIDIA A", (523 * MIB, 81559 * MIB)), ("GPU-bb", "NVIDIA B, 8 GB", None))


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeNvml(TWO))
    first, second = gpus()
    assert first == Gpu("0", "GPU-aa", "NVIDIA A", 523 * MIB, 81559 * MIB)
    assert second == Gpu("1", "GPU-bb", "NVIDIA B, 8 GB", 0, 0), "its memory is not known"
    assert fake.open == 0, "the library is closed again"
    install(monkeypatch, FakeNvml(()))
    assert gpus() == ()


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeNvml(None))
    assert gpus() == ()
    assert visible_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # left over from another machine
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert visible_gpus() == ()
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/kfd")
    assert visible_gpus() == ("0", "1"), "a driver that is not NVIDIA's"


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ("0", "1")),
        ("1,0", ("1", "0")),
        ("3,5", ()),
        ("0,-1,1", ("0",)),
        ("1,5,0", ("1",)),
        ("0,0", ("0",)),
        ("GPU-bb, MIG-11", ("GPU-bb", "MIG-11")),
        ("MIG-11,MIG-12", ("MIG-11",)),
        ("-1", ()),
        ("none", ()),
        ("NoDevFiles", ()),
        ("", ()),
    ],
)
def test_ranks_may_use_what_cuda_visible_devices_says_or_else_all(
    chosen: str | None, visible: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(TWO))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == visible


def test_what_the_flight_recorder_writes_goes_with_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def variables(backend: str) -> dict[str, str]:
        nothing: Any = None
        devices = DevicePlan(backend, ("cpu",))
        return Places(InitOptions(), devices, nothing, nothing, tmp_path).variables(0)

    assert variables("gloo").keys() == {*names[:2]}
    on_gpus = "cpu:gloo,cuda:nccl"
    assert variables(on_gpus)[names[2]] == f"{tmp_path}/log/nccl_trace_rank_"
    for name in names:
        monkeypatch.setenv(name, "the user's")
    assert variables(on_gpus) == {}
