"""What the doctor says of GPUs. NVIDIA's driver is a stand-in: there is no GPU here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_cases import CPU_TORCH, FAILURE, GIB, OK, TORCH, WARNING, expect
from nvml import FakeNvml, install

from ddp_notebook.doctor import examination
from ddp_notebook.doctor.examination import infiniband_ports
from ddp_notebook.doctor.gpu_checks import (
    check_devices,
    check_driver,
    check_gpu_faults,
    check_gpu_links,
    check_gpus,
    check_infiniband,
    check_visible_devices,
)
from ddp_notebook.launch import gpu_links
from ddp_notebook.launch.devices import Gpu
from ddp_notebook.launch.gpu_links import GpuState, Links, Pair
from ddp_notebook.model.doctor import Verdict
from ddp_notebook.session.tools.bench import Benchmarks

GPUS = (
    Gpu("0", "GPU-aa11", "NVIDIA A", GIB, 80 * GIB),
    Gpu("1", "GPU-bb22", "NVIDIA A", 0, 80 * GIB),
)


@pytest.mark.parametrize(
    ("value", "gpus", "usable", "verdict", "found"),
    [
        (None, GPUS, 2, OK, "not set"),
        ("0,1", GPUS, 2, OK, "0,1"),
        ("GPU-bb", GPUS, 1, OK, "GPU-bb"),
        ("MIG-1234", GPUS, 1, OK, "MIG-1234"),
        ("MIG-1234,MIG-5678", GPUS, 1, WARNING, "a CUDA process sees only the first"),
        ("", GPUS, 0, OK, "'' hides all GPUs"),
        ("-1", GPUS, 0, OK, "'-1' hides all GPUs"),
        ("NoDevFiles", GPUS, 0, OK, "'NoDevFiles' hides all GPUs"),
        ("0,-1", GPUS, 1, OK, "0,-1"),
        ("0,-1,1", GPUS, 1, WARNING, "CUDA ends the list at '-1', and does not see 1"),
        ("none,1", GPUS, 0, WARNING, "CUDA ends the list at 'none', and does not see 1"),
        ("0,0", GPUS, 0, FAILURE, "names GPU 0 twice: CUDA then finds no GPU"),
        ("1,GPU-bb22", GPUS, 0, FAILURE, "names GPU 1 twice"),
        ("7,7", (), 0, FAILURE, "names GPU 7 twice"),
        ("0,5", GPUS, 1, FAILURE, "names GPU 5, but there is: 0, 1; CUDA ignores it"),
        ("0", (), 0, FAILURE, "names GPU 0, but there is: none"),
        ("0", (), 1, OK, "0"),  # a container without the driver's library
        ("0", (), None, OK, "0"),
    ],
)
def test_gpus_that_are_made_visible(
    value: str | None, gpus: tuple[Gpu, ...], usable: int | None, verdict: Verdict, found: str
) -> None:
    remedy = "" if verdict is OK else "Name "
    expect(partial(check_visible_devices, value, gpus, usable), verdict, found, remedy)


TOO_OLD = {**TORCH, "devices": 0, "cuda_error": "RuntimeError: driver too old"}


@pytest.mark.parametrize(
    ("world_size", "backend", "pool", "torch", "verdict", "found", "remedy"),
    [
        (4, "auto", (), CPU_TORCH, OK, "4 ranks on CPUs with gloo: no GPU is visible", ""),
        (2, "auto", ("0",), TORCH, OK, "rank 0 on GPU 0, rank 1 on GPU 0; gloo", ""),
        (
            4,
            "auto",
            ("0", "1"),
            CPU_TORCH,
            WARNING,
            "4 ranks on CPUs with gloo: torch 2.8.0+cpu was built without CUDA, and there are",
            "install torch for CUDA",
        ),
        (2, "auto", ("0", "3"), TORCH, OK, "rank 0 on GPU 0, rank 1 on GPU 3; cpu:gloo,cuda", ""),
        (1, "nccl", ("0",), {}, OK, "rank 0 on GPU 0; nccl", ""),
        (
            2,
            "nccl",
            (),
            CPU_TORCH,
            FAILURE,
            "none is visible here",
            "%ddp_init --world-size 2 --ba",
        ),
        (
            4,
            "nccl",
            ("0", "1"),
            TORCH,
            FAILURE,
            "4 ranks but 2 GPUs: NCCL needs a GPU of its own for every rank",
            "%ddp_init --world-size 2 --backend nccl; to share, --share-gpu with NCCL",
        ),
        (1, "auto", ("0",), TOO_OLD, FAILURE, "(RuntimeError: driver too old)", "--device cpu"),
        (1, "auto", ("0",), {**TORCH, "devices": 0}, FAILURE, "it finds none", "--device cpu"),
    ],
)
def test_which_rank_gets_which_device(
    world_size: int,
    backend: str,
    pool: tuple[str, ...],
    torch: Mapping[str, Any],
    verdict: Verdict,
    found: str,
    remedy: str,
) -> None:
    expect(partial(check_devices, world_size, backend, pool, torch), verdict, found, remedy)


NOBODY = 2**22 + 7
"""A pid that no process can have."""


def test_gpus_with_room_and_without() -> None:
    assert check_gpus((), Links(), {}) == ()
    expect(partial(check_gpus, GPUS, Links(), {}), OK, "GPU 0, 1: enough is free")
    full = (GPUS[0], replace(GPUS[1], used_bytes=79 * GIB))
    remedy = "Leave it out: %ddp_init --gpus 0"
    found = "GPU 1 nearly full: 79 GiB of 80 GiB in use"
    expect(partial(check_gpus, full, Links(), {}), WARNING, found, remedy)
    used = Links((GpuState("1", users=((NOBODY, 70 * GIB), (10, 0))),))
    found += f" by pid {NOBODY} 70 GiB, rank 3"
    expect(partial(check_gpus, full, used, {10: 3}), WARNING, found, remedy)
    expect(partial(check_gpus, GPUS, used, {}), OK, f"is free; GPU 1: pid {NOBODY} 70 GiB, ")


# -- what joins them: the driver is a stand-in -------------------------------------------------


def driver(monkeypatch: pytest.MonkeyPatch, number: int, **answers: Any) -> Links:
    """What is read of so many GPUs whose driver gives these answers; of others it knows nothing."""
    gpus = [(f"GPU-{index}", "H200", (0, 139 * GIB)) for index in range(number)]
    fake = install(monkeypatch, FakeNvml(gpus))
    fake.answers = {"SystemGetDriverVersion": "580.159.04", **answers}
    links = gpu_links.read([str(index) for index in range(number)])
    assert fake.open == 0
    return links


def test_a_switch_of_nvlink_joins_every_two(monkeypatch: pytest.MonkeyPatch) -> None:
    links = driver(
        monkeypatch,
        4,
        DeviceGetNvLinkState=lambda gpu, link: int(link < 18),
        DeviceGetFieldValues=lambda gpu, fields: [FakeNvml.field(26562) for _ in fields],
        DeviceGetP2PStatus=0,
        DeviceGetTopologyCommonAncestor=50,
        SystemGetCudaDriverVersion_v2=13000,
        DeviceGetPersistenceMode=1,
    )
    assert links.limit_gb_per_s == pytest.approx(18 * 26.562)
    words = "GPU 0, 1, 2, 3: NVLink joins every two (18 links of 26.6 GB/s each way per GPU)"
    expect(partial(check_gpu_links, links), OK, words)
    expect(partial(check_driver, links, "13.0"), OK, "580.159.04, for CUDA 13.0 and older")
    remedy = "a torch that was built for an older CUDA"
    expect(partial(check_driver, links, "14.1"), WARNING, "built for CUDA 14.1", remedy)


def test_without_nvlink_the_slot_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    links = driver(
        monkeypatch,
        3,
        DeviceGetNvLinkState=FakeNvml.unknown,
        DeviceGetP2PStatus=lambda one, other, what: 0 if (one, other, what) == (0, 1, 0) else 3,
        DeviceGetTopologyCommonAncestor=lambda one, other: 10 if other == 1 else 40,
        DeviceGetMaxPcieLinkGeneration=4,
        DeviceGetMaxPcieLinkWidth=lambda gpu: 8 if gpu == 2 else 16,
    )
    assert links.limit_gb_per_s == pytest.approx(8 * 1.969)
    words = "PCIe 4 x8, through host bridges of a NUMA node (NODE); no direct access (P2P) between "
    expect(partial(check_gpu_links, links), OK, words + "0 and 2 and 1 pair more: NCCL goes")


def test_where_nvlink_joins_some_the_limit_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    links = driver(
        monkeypatch,
        4,
        DeviceGetNvLinkState=lambda gpu, link: int(link < 4),
        DeviceGetP2PStatus=lambda one, other, what: 0 if one // 2 == other // 2 else 5,
    )
    assert links.limit_gb_per_s == 0 and links.text == "NVLink joins 2 pairs (4 links per GPU)"


def test_a_driver_that_knows_nothing_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    links = driver(monkeypatch, 2)
    assert links.limit_gb_per_s == 0 and links.text == "" and check_gpu_links(links) == ()
    expect(partial(check_driver, links, "12.6"), OK, "580.159.04, for CUDA ? and older")
    install(monkeypatch, FakeNvml(None))
    assert gpu_links.read(["0"]) == Links() and check_driver(Links(), "12.6") == ()


def test_gpus_that_are_divided_or_have_errors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    links = driver(
        monkeypatch,
        2,
        DeviceGetMigMode=lambda gpu: [gpu, gpu],
        DeviceGetTotalEccErrors=lambda *asked: 7 if asked == (0, 1, 0) else 0,
        DeviceGetPersistenceMode=0,
    )
    state, parts, errors = (*check_driver(links, ""), *check_gpu_faults(links))
    assert state.verdict is OK and "the first use of idle GPUs takes seconds" in state.found
    assert parts.found == "GPU 1 divided (MIG): all its ranks share the first part"
    assert (errors.name, errors.verdict, "7 uncorrected errors" in errors.found) == (
        "GPU 0 errors",
        WARNING,
        True,
    )


def test_infiniband_is_read_from_the_system(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    ports = infiniband_ports(tmp_path)
    expect(partial(check_infiniband, ports, {}), OK, "mlx5_0:1 400 Gb/sec (4X NDR)")
    off = {"NCCL_IB_DISABLE": "1"}
    expect(partial(check_infiniband, ports, off), WARNING, "uses sockets", "Unset NCCL_IB_DISABLE")
    down = {"mlx5_1:1": ports["mlx5_1:1"]}
    expect(partial(check_infiniband, down, {}), WARNING, "no port of mlx5_1:1 is active", "ibstat")
    assert check_infiniband(infiniband_ports(tmp_path / "none"), off) == ()


def test_a_pair_of_which_nothing_is_known_has_no_words() -> None:
    assert Links((GpuState("0"), GpuState("1")), (Pair(("0", "1")),)).text == ""


def test_the_doctor_asks_the_driver_about_the_gpus_that_ranks_would_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [(f"GPU-{index}", "H200", (0, 139 * GIB)) for index in range(3)]
    fake = install(monkeypatch, FakeNvml(gpus))
    fake.answers = {"SystemGetDriverVersion": "580.1", "DeviceGetTopologyCommonAncestor": 10}
    fake.users[2] = [(NOBODY, GIB)]
    monkeypatch.setattr(examination, "torch_facts", lambda: TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    report = examination.examine(2)
    found = {check.name: check.found for check in report.checks}
    assert found["devices"] == "rank 0 on GPU 2, rank 1 on GPU 0; cpu:gloo,cuda:nccl"
    assert found["GPU memory"] == f"GPU 0, 1, 2: enough is free; GPU 2: pid {NOBODY} 1 GiB"
    assert found["GPU driver"] == "580.1, for CUDA ? and older"
    assert found["GPU links"] == "GPU 2, 0: PCIe, through a PCIe switch (PIX)"
    assert fake.open == 0


@pytest.mark.parametrize(
    ("gpus", "hosts", "limit"),
    [("01", "aa", 15.75), ("11", "aa", 0.0), ("01", "ab", 0.0)],
    ids=["one each", "shared", "on two hosts"],
)
def test_the_bench_has_a_limit_where_ranks_have_gpus_of_their_own_on_one_host(
    gpus: str, hosts: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcie = {"DeviceGetMaxPcieLinkGeneration": 3, "DeviceGetMaxPcieLinkWidth": 16}
    driver(monkeypatch, 2, DeviceGetP2PStatus=5, DeviceGetTopologyCommonAncestor=30, **pcie)
    devices = SimpleNamespace(gpus=tuple(gpus))
    bench: Any = SimpleNamespace(
        _pool=SimpleNamespace(need=lambda _: SimpleNamespace(devices=devices))
    )
    facts = {rank: {"host": host} for rank, host in enumerate(hosts)}
    found = Benchmarks._links(bench, (0, 1), facts)
    assert found.limit_gb_per_s == pytest.approx(limit, abs=0.02)
    assert bool(found.text) is bool(limit)
